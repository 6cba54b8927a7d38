"""Byte layout of a blob, the payload of one expert. Offsets are in 32-bit little-endian words.

Weights of a matrix are numbered row by row. A segment is 512 consecutive weights, a block 16 segments; a matrix starts
with a block of its own, and its last segment may be short.

    0..15            header, see `Header`
    16..             table, 10 words a block: first word of its stream, counted from the start of all streams; its first
                     patch, likewise; 16 times 16 bits: half the bit offset of each segment in the block's stream.
                     Two more words hold both ends
    stream_offset..  streams. A block starts on a word, a segment on an even bit; bit p is bit p % 32 of word p / 32.
                     A segment is the main codes in column order, then the extensions of long codes, without gaps
    4 words          zeros, which a decoder may read past the end of a stream
    patch_offset..   patches by block and position: position in the block (13 bits) << 16, BF16 bits below
    to 16 words      zeros

Where residual bytes would not be fewer than raw ones, the kind is RAW and the BF16 values follow the header.
Table and streams start at offsets that follow from the shapes alone.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from specter.codecs.residual import sizes
from specter.codecs.residual.sizes import BLOCK, HEADER_WORDS, SEGMENT
from specter.codecs.residual.windows import Windows
from specter.errors import SpecterError

MAGIC = 0x52535053  # "SPSR"
VERSION = 1
NUM_HEADER_FIELDS = 10
PATCH_OFFSET_WORD = 4
CHECKSUM_WORDS = slice(8, 10)


class Kind(IntEnum):
    RESIDUAL = 0
    RAW = 1


@dataclass(frozen=True, slots=True)
class Matrix:
    """Shape of one matrix and its INT4 group, in input channels."""

    rows: int
    columns: int
    group: int

    @property
    def num_weights(self) -> int:
        return self.rows * self.columns

    @property
    def num_blocks(self) -> int:
        return -(-self.num_weights // BLOCK)


@dataclass(frozen=True, slots=True)
class Layout:
    """The matrices of an expert in order: gate_up, then down."""

    matrices: tuple[Matrix, ...]

    def __post_init__(self) -> None:
        """Raises SpecterError for shapes that the codec does not take."""
        for matrix in self.matrices:
            group = matrix.group
            if group % 8 or SEGMENT % group or matrix.columns % group:
                raise SpecterError(
                    f"the residual codec takes no INT4 groups of {group} in rows of {matrix.columns} weights",
                    "quantise with a group of 8, 16, 32, 64, 128, 256 or 512 that divides the row",
                )

    @property
    def num_weights(self) -> int:
        return sum(matrix.num_weights for matrix in self.matrices)

    @property
    def num_blocks(self) -> int:
        return sum(matrix.num_blocks for matrix in self.matrices)

    @property
    def stream_offset(self) -> int:
        return sizes.stream_offset([matrix.num_weights for matrix in self.matrices])

    @property
    def raw_words(self) -> int:
        """Words of a RAW blob; no blob is larger."""
        return sizes.raw_words([matrix.num_weights for matrix in self.matrices])

    @property
    def digest(self) -> int:
        """32 bits of the shapes and groups."""
        shapes = [(matrix.rows, matrix.columns, matrix.group) for matrix in self.matrices]
        return zlib.crc32(repr(shapes).encode())


@dataclass(frozen=True, slots=True)
class Header:
    """The first words: magic, version and parameters, layout digest, sizes and checksums."""

    kind: Kind
    windows: Windows
    layout_digest: int
    num_words: int
    patch_offset: int = 0  # RAW: 0
    num_patches: int = 0
    codes_checksum: int = 0  # int64, of the resident words
    blob_checksum: int = 0  # int64, of all words of the blob, these two as 0

    def pack(self) -> Tensor:
        """int32 [16], on the CPU."""
        parameters = VERSION | self.kind << 8 | self.windows.two_sided << 16
        fields = [
            MAGIC, parameters | self.windows.reach16 << 24, self.layout_digest, self.num_words, self.patch_offset,
            self.num_patches, *_halves(self.codes_checksum), *_halves(self.blob_checksum),
        ]  # fmt: skip
        words = torch.zeros(HEADER_WORDS, dtype=torch.int64)
        words[:NUM_HEADER_FIELDS] = torch.tensor(fields)
        return signed(words)

    @classmethod
    def unpack(cls, blob: Tensor, name: str) -> Header:
        """The header of a blob, int32 [n].

        Raises:
            SpecterError: it is none, of another version, or damaged.
        """
        if blob.dtype != torch.int32 or blob.dim() != 1 or len(blob) < HEADER_WORDS:
            raise damaged(name, "is no blob of 32-bit words")
        words = [word & 0xFFFFFFFF for word in blob[:HEADER_WORDS].tolist()]
        magic, parameters, digest, num_words, patch_offset, num_patches = words[:6]
        if magic != MAGIC:
            raise damaged(name, "does not begin with the codec's magic number")
        if parameters & 0xFF != VERSION:
            raise SpecterError(
                f"{name}: residual format version {parameters & 0xFF}, this code reads {VERSION}", "encode it again"
            )
        if any(words[NUM_HEADER_FIELDS:]) or parameters & 0x00FEFE00:
            raise damaged(name, "has reserved header bits set")
        windows = Windows(bool(parameters >> 16 & 1), parameters >> 24)
        return cls(
            Kind(parameters >> 8 & 1), windows, digest, num_words, patch_offset, num_patches,
            _joined(*words[6:8]), _joined(*words[8:10]),
        )  # fmt: skip


def damaged(name: str, fault: str) -> SpecterError:
    return SpecterError(f"{name}: the residual {fault}", "get or encode the residual directory again")


def signed(words: Tensor) -> Tensor:
    """Unsigned 32-bit numbers held as int64, as int32 of the same bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _halves(value: int) -> tuple[int, int]:
    return value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF


def _joined(low: int, high: int) -> int:
    value = low | high << 32
    return value - (1 << 64) if value >> 63 else value
