"""The store of residual blobs, and its loading: encoded on the device, or read from a residual directory.

Every blob is checked as it lies in the store (`check_layer`). A blob that was encoded here is also decoded and compared
with its source bit by bit. So the host never holds the 16-bit experts of more than one layer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from specter.codecs.residual.decode import check_layer
from specter.codecs.residual.encode import encode_layer
from specter.codecs.residual.layout import PATCH_OFFSET_WORD, Header, Kind, Layout, damaged
from specter.codecs.residual.resident import ResidentCodes, layout_of
from specter.codecs.residual.sizes import ENTRY_WORDS, HEADER_WORDS, SEGMENT
from specter.codecs.residual.windows import Windows
from specter.errors import SpecterError
from specter.experts.slots import SLOT_ALIGNMENT_BYTES
from specter.kernels.int4_moe import PackedExperts
from specter.kernels.residual import SlotMemory, WaveDecoder, wave_row
from specter.models.checkpoint import Checkpoint
from specter.models.cuda.store import LoadReport, PinnedArenas
from specter.models.inflation.inflated import InflatedCheckpoint
from specter.models.spec import ExpertId, ModelSpec
from specter.progress import make_progress
from specter.quantize.residual.convert import check_lossless, read_bf16
from specter.quantize.residual.directory import ResidualDirectory, expert_name
from specter.timeline.payload import Blobs

_AT_ONCE = 4  # experts decoded together for the comparison
_BLOCKS_AT_ONCE = 2048  # of the encoder: twice as fast as 512 on an H200, with 2.4 GB of scratch


class BlobSource(Protocol):
    """Blobs of a model, layer by layer, in order."""

    def layer(self, layer: int, codes: Sequence[ResidentCodes]) -> tuple[list[Tensor], list[Tensor] | None]:
        """Blobs int32 [n] on any device, and the originals bf16 [E, rows, columns] on the device if they are known."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blobs of a residual directory, whose originals are not read."""

    directory: ResidualDirectory

    @classmethod
    def open(cls, directory: Path, spec: ModelSpec, quantized: Path) -> Stored:
        """Raises SpecterError: another model's directory, or encoded with another INT4 directory."""
        return cls(ResidualDirectory.open(directory, spec, quantized))

    def layer(self, layer: int, codes: Sequence[ResidentCodes]) -> tuple[list[Tensor], None]:
        blobs = self.directory.layer(layer)
        return [blobs.blob(expert) for expert in range(self.directory.spec.num_experts)], None


@dataclass(frozen=True, slots=True)
class Encoding:
    """Blobs that are encoded on the device when they are read."""

    source: Checkpoint | InflatedCheckpoint
    device: torch.device

    def __post_init__(self) -> None:
        """Raises SpecterError: experts that are not stored as BF16."""
        if isinstance(self.source, Checkpoint):
            check_lossless(self.source)

    def layer(self, layer: int, codes: Sequence[ResidentCodes]) -> tuple[list[Tensor], list[Tensor]]:
        source = self.source
        if isinstance(source, Checkpoint):
            weights = read_bf16(source, layer, self.device)
        else:
            weights = [part.bfloat16() for part in source.experts(layer)]
        return encode_layer(weights, codes, blocks_at_once=_BLOCKS_AT_ONCE).blobs, weights


@dataclass(frozen=True, slots=True)
class BlobReport:
    """What a `BlobStore` holds."""

    sizes: Blobs
    num_weights: int
    num_raw: int
    num_patches: int
    num_compared: int  # experts that were decoded and are equal to their source

    @property
    def facts(self) -> dict[str, float | int]:
        """For records."""
        return {
            "residual_bits_per_weight": 8 * sum(self.sizes.sizes) / self.num_weights,
            "residual_largest_bytes": max(self.sizes.sizes),
            "residual_num_raw": self.num_raw,
            "residual_num_patches": self.num_patches,
            "residual_experts_compared": self.num_compared,
        }


@dataclass(frozen=True, slots=True)
class Tails:
    """What blobs have beyond slots of one size.

    Attributes:
        parts: the first byte of each tail in their common memory, and its bytes, uint8.
        beyond: by expert: what to add to the number of a word to find it there. 0: all is in the slot.
    """

    parts: list[tuple[int, Tensor]]
    beyond: list[int]

    @property
    def num_bytes(self) -> int:
        return sum(_aligned(len(tail)) for _, tail in self.parts)


class BlobStore(PinnedArenas):
    """Residual blobs, of any size, one after the other.

    Attributes:
        windows: of each layer; its blobs share them.
    """

    def __init__(self, layout: Layout, num_layers: int, num_experts: int, *options: Any, **named: Any) -> None:
        """`layout`: of an expert. Options as in `PinnedArenas`."""
        super().__init__(num_layers, num_experts, *options, **named)
        self.windows: list[Windows] = []
        self._layout = layout

    def add_layer(self, blobs: Sequence[Tensor], windows: Windows) -> Tensor:
        """Copies the next layer's blobs, int32 [n] on any device, into an arena of their bytes, and returns it, int32.
        Raises SpecterError: see `PinnedArenas`."""
        arena = self._open(len(self.windows), [blob.nbytes for blob in blobs])
        arena.view(torch.int32).copy_(torch.cat(list(blobs)))
        self.windows.append(windows)
        return arena.view(torch.int32)

    def tails(self, slot_bytes: int) -> Tails:
        """What the blobs have beyond slots of this size."""
        parts: list[tuple[int, Tensor]] = []
        beyond, end = [], 0
        for payload in (payload for layer in range(len(self.windows)) for payload in self.payloads(layer)):
            if len(payload) <= slot_bytes:
                beyond.append(0)
                continue
            first = tail_start(payload.view(torch.int32), self._layout, slot_bytes // 4)
            parts.append((end, payload[4 * first :]))
            beyond.append(end // 4 - first)
            end += _aligned(len(payload) - 4 * first)
        return Tails(parts, beyond)


def tail_start(blob: Tensor, layout: Layout, slot_words: int) -> int:
    """The first word of what a decoder reads beyond the first `slot_words` words of a blob: the start of the block of a
    stream, or of its patches, that straddles them, or of a segment's weights."""
    if Header.unpack(blob, "a blob").kind is Kind.RAW:
        return slot_words - SEGMENT // 2
    table = blob[HEADER_WORDS : HEADER_WORDS + ENTRY_WORDS * layout.num_blocks + 2].numpy()
    patch_offset = int(blob[PATCH_OFFSET_WORD])
    for column, offset in enumerate((layout.stream_offset, patch_offset)):
        starts = offset + table[column::ENTRY_WORDS]
        if starts[-1] > slot_words:
            return int(starts[np.searchsorted(starts[1:], slot_words, side="right")])
    return slot_words  # only padding is beyond


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def load_blobs(
    source: BlobSource, experts: PackedExperts, store: BlobStore, console: Console
) -> tuple[LoadReport, BlobReport]:
    """Fills `store` layer by layer, with progress on `console`. `experts`: the codes, on the device.

    Raises SpecterError: naming a blob that is damaged, belongs to other codes or differs from its source; or as
    `PinnedArenas`. The store is then closed.
    """
    device, ends = experts.down.device, [time.perf_counter()]
    headers: list[Header] = []
    num_compared = 0
    try:
        with make_progress(console) as progress:
            task = progress.add_task("load residual experts", total=store.num_layers)
            for layer in range(store.num_layers):
                codes = experts.layer(layer)
                blobs, originals = source.layer(layer, codes)
                names = [expert_name(ExpertId(layer, expert)) for expert in range(len(blobs))]
                arena = store.add_layer(blobs, Header.unpack(blobs[0], names[0]).windows)
                sizes = [len(blob) for blob in blobs]
                del blobs
                arrived = list(arena.to(device).split(sizes))  # as they lie in the store
                found = check_layer(arrived, codes, names)
                for header, name in zip(found, names, strict=True):
                    if header.windows != store.windows[layer]:
                        raise damaged(name, "has other windows than its layer")
                if originals is not None:
                    _compare(arrived, codes, originals, names)
                    num_compared += len(names)
                headers += found
                ends.append(time.perf_counter())
                progress.advance(task)
    except BaseException:
        store.close()
        raise
    report = BlobReport(
        sizes=Blobs([4 * header.num_words for header in headers]),
        num_weights=layout_of(codes).num_weights * len(headers),
        num_raw=sum(header.kind is Kind.RAW for header in headers),
        num_patches=sum(header.num_patches for header in headers),
        num_compared=num_compared,
    )
    return LoadReport.of(store, ends), report


def _compare(
    blobs: Sequence[Tensor], codes: Sequence[ResidentCodes], originals: Sequence[Tensor], names: Sequence[str]
) -> None:
    """Decodes checked blobs, int32 [n] on the device, and compares with originals bf16 [E, rows, columns], bit by bit.
    Raises SpecterError naming the first expert that differs."""
    decoder, windows = WaveDecoder(codes), Header.unpack(blobs[0], names[0]).windows
    layout, device = decoder.layout, originals[0].device
    slot_bytes = 4 * max(len(blob) for blob in blobs)
    slots = SlotMemory.whole(torch.zeros(_AT_ONCE, slot_bytes, dtype=torch.uint8, device=device), len(blobs))
    staging = torch.zeros(_AT_ONCE, layout.num_weights, dtype=torch.bfloat16, device=device)
    for first in range(0, len(blobs), _AT_ONCE):
        experts = range(first, min(first + _AT_ONCE, len(blobs)))
        for place, expert in enumerate(experts):
            slots.flat[place, : blobs[expert].nbytes] = blobs[expert].view(torch.uint8)
        wave = torch.tensor(
            wave_row(windows, 0, experts, range(len(experts)), _AT_ONCE), dtype=torch.int32, device=device
        )
        decoder.launch(wave, slots, staging, two_sided=windows.two_sided, num_experts=len(experts))
        for place, expert in enumerate(experts):
            parts = staging[place].split([matrix.num_weights for matrix in layout.matrices])
            for part, original in zip(parts, originals, strict=True):
                if not torch.equal(part.view(torch.int16), original[expert].reshape(-1).view(torch.int16)):
                    raise SpecterError(
                        f"{names[expert]}: the decoded residual differs from the expert that was encoded",
                        "report this, and run with codec=bf16",
                    )
