"""The encoder, in torch on any device: all experts of a layer at once, a bounded number of blocks at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.codecs.residual.checksum import checksum
from specter.codecs.residual.fields import to_fields
from specter.codecs.residual.layout import CHECKSUM_WORDS, Header, Kind, Layout, Matrix, signed
from specter.codecs.residual.resident import ResidentCodes, codes_checksum, layout_of, unpack_codes, unpack_params
from specter.codecs.residual.sizes import (
    BLOCK,
    BLOCK_SEGMENTS,
    ENTRY_WORDS,
    GUARD_WORDS,
    HEADER_WORDS,
    SEGMENT,
    aligned,
)
from specter.codecs.residual.windows import CANDIDATES, LARGEST_SCALE, SMALLEST_SCALE, Windows, level_words
from specter.errors import SpecterError

BLOCKS_AT_ONCE = 512  # about 0.6 GB of scratch
SAMPLE_WEIGHTS = 1 << 24  # at least, on which the windows of a layer are chosen
PATCH_BITS = 32


@dataclass(frozen=True, slots=True)
class Encoded:
    """The blobs of a layer's experts, each int32 [n] on the encoder's device."""

    blobs: list[Tensor]
    windows: Windows
    num_patches: list[int]  # 0 for raw blobs
    is_raw: list[bool]
    bits_per_weight: float  # of all bytes, headers included


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Some blocks of one matrix of every expert: weights and level words int32 [n, 16, 512], and what is no padding."""

    weights: Tensor
    words: Tensor
    is_weight: Tensor  # bool, broadcasts


@dataclass(frozen=True, slots=True)
class _Stream:
    """Encoded blocks in order."""

    words: Tensor  # int32, of all blocks
    num_words: Tensor  # int64 [blocks]
    offsets: Tensor  # int64 [blocks, 16], bits / 2
    patches: Tensor  # int32, of all blocks
    num_patches: Tensor  # int64 [blocks]


def choose_windows(
    weights: Sequence[Tensor], codes: Sequence[ResidentCodes], candidates: Sequence[Windows] = CANDIDATES
) -> Windows:
    """The candidate that takes the fewest bits on some rows of all experts; arguments as in `encode_layer`."""
    step = max(1, sum(weight.numel() for weight in weights) // SAMPLE_WEIGHTS)
    rows = slice(step // 2, None, step)
    sample = (
        [weight[:, rows] for weight in weights],
        [ResidentCodes(part.words[:, rows], part.params[:, rows], part.scale_dtype) for part in codes],
    )
    return min(candidates, key=lambda windows: measure_bits(*sample, windows))


def measure_bits(weights: Sequence[Tensor], codes: Sequence[ResidentCodes], windows: Windows) -> int:
    """Bits of all fields and patches; tables and headers are not counted."""
    total = 0
    for weight, part in zip(weights, codes, strict=True):
        for blocks in _blocks(weight, part, windows, BLOCKS_AT_ONCE):
            fields = to_fields(blocks.weights, blocks.words, windows)
            bits = fields.width + fields.extension_width + PATCH_BITS * fields.is_patch
            total += int((bits * blocks.is_weight).sum())
    return total


def encode_layer(
    weights: Sequence[Tensor],
    codes: Sequence[ResidentCodes],
    windows: Windows | None = None,
    blocks_at_once: int = BLOCKS_AT_ONCE,
) -> Encoded:
    """Encodes all experts of a layer.

    Args:
        weights: bf16 [E, rows, columns] per matrix, any bit patterns.
        codes: the resident codes of the same matrices, on the same device.
        windows: None chooses them.

    Raises:
        SpecterError: weights that are not bf16, or shapes that the codec does not take.
    """
    layout = layout_of(codes)
    for weight, part in zip(weights, codes, strict=True):
        if weight.dtype != torch.bfloat16:
            raise SpecterError(f"weights are {weight.dtype}", "the residual codec is lossless for bf16 weights only")
        if weight.shape != (*part.words.shape[:-1], part.matrix.columns):
            raise SpecterError(f"weights {list(weight.shape)} do not fit their INT4 codes", "give both of one model")
    if windows is None:
        windows = choose_windows(weights, codes)
    streams = [
        _encode_matrix(weight, part, windows, blocks_at_once) for weight, part in zip(weights, codes, strict=True)
    ]
    checksums = codes_checksum(codes).tolist()
    usable = torch.stack([_has_usable_scales(part) for part in codes]).all(0).tolist()
    blobs = []
    for expert, codes_sum in enumerate(checksums):
        parts = [_expert_part(s, matrix, expert) for s, matrix in zip(streams, layout.matrices, strict=True)]
        blob = _assemble(layout, parts, windows, codes_sum) if usable[expert] else None
        if blob is None:
            blob = _raw_blob(layout, [weight[expert] for weight in weights], windows, codes_sum)
        blobs.append(blob)
    headers = [Header.unpack(blob, f"expert {expert}") for expert, blob in enumerate(blobs)]
    return Encoded(
        blobs=blobs,
        windows=windows,
        num_patches=[header.num_patches for header in headers],
        is_raw=[header.kind is Kind.RAW for header in headers],
        bits_per_weight=32 * sum(len(blob) for blob in blobs) / (len(blobs) * layout.num_weights),
    )


def finish(header: Header, body: Tensor) -> Tensor:
    """A blob of header and body, with the checksum of both filled in."""
    blob = torch.cat([replace(header, blob_checksum=0).pack().to(body.device), body])
    total = int(checksum(blob))
    blob[CHECKSUM_WORDS] = replace(header, blob_checksum=total).pack()[CHECKSUM_WORDS].to(body.device)
    return blob


def _blocks(weights: Tensor, codes: ResidentCodes, windows: Windows, at_once: int) -> Iterator[_Blocks]:
    matrix, num_experts = codes.matrix, len(weights)
    num_groups = BLOCK // matrix.group
    bits = _in_blocks(weights.contiguous().view(torch.int16).view(num_experts, -1), matrix, BLOCK)
    words = _in_blocks(codes.words.reshape(num_experts, -1), matrix, BLOCK // 8)
    params = _in_blocks(codes.params.reshape(num_experts, -1), matrix, num_groups)
    place = torch.arange(BLOCK, device=weights.device).view(BLOCK_SEGMENTS, SEGMENT)
    for start in range(0, len(bits), at_once):
        part = slice(start, start + at_once)
        number = torch.arange(start, min(start + at_once, len(bits)), device=weights.device) % matrix.num_blocks
        levels = level_words(*unpack_params(params[part], codes.scale_dtype), windows)
        index = unpack_codes(words[part]).view(-1, num_groups, matrix.group).long()
        shape = (-1, BLOCK_SEGMENTS, SEGMENT)
        yield _Blocks(
            weights=bits[part].int().view(shape) & 0xFFFF,
            words=levels.gather(2, index).view(shape),
            is_weight=place < (matrix.num_weights - number * BLOCK)[:, None, None],
        )


def _in_blocks(flat: Tensor, matrix: Matrix, per_block: int) -> Tensor:
    """[E, n] as [E * blocks, per_block], padded with zeros."""
    padding = matrix.num_blocks * per_block - flat.shape[1]
    return (F.pad(flat, (0, padding)) if padding else flat).reshape(-1, per_block)


def _has_usable_scales(codes: ResidentCodes) -> Tensor:
    scales, zeros = unpack_params(codes.params, codes.scale_dtype)
    good = (scales >= SMALLEST_SCALE) & (scales <= LARGEST_SCALE) & (zeros >= 0) & (zeros <= 15)
    return good.flatten(1).all(1)


def _encode_matrix(weights: Tensor, codes: ResidentCodes, windows: Windows, at_once: int) -> _Stream:
    """The blocks of one matrix of every expert, expert by expert."""
    parts = [_encode_blocks(blocks, windows) for blocks in _blocks(weights, codes, windows, at_once)]
    return _Stream(*(torch.cat([getattr(part, name) for part in parts]) for name in _Stream.__slots__))


def _encode_blocks(blocks: _Blocks, windows: Windows) -> _Stream:
    fields = to_fields(blocks.weights, blocks.words, windows)
    is_patch = fields.is_patch & blocks.is_weight
    main, extension = fields.width * blocks.is_weight, fields.extension_width * blocks.is_weight
    num_bits = (main + extension).sum(-1)
    num_bits += num_bits & 1
    offsets = num_bits.cumsum(-1) - num_bits
    num_words = (num_bits.sum(-1) + 31) >> 5
    first = num_words.cumsum(0) - num_words
    begin = (first[:, None] * 32 + offsets)[..., None]
    at_extension = begin + main.sum(-1, keepdim=True)
    words = torch.zeros(int(num_words.sum()) + 2, dtype=torch.int64, device=num_bits.device)
    _write(words, begin + main.cumsum(-1) - main, fields.code * blocks.is_weight)
    _write(words, at_extension + extension.cumsum(-1) - extension, fields.extension * blocks.is_weight)
    place = is_patch.flatten().nonzero()[:, 0]
    patches = (place % BLOCK) << 16 | blocks.weights.flatten()[place]
    counts = torch.bincount(place // BLOCK, minlength=len(num_words))
    return _Stream(signed(words[:-2]), num_words, offsets >> 1, signed(patches), counts)


def _write(words: Tensor, positions: Tensor, values: Tensor) -> None:
    """Adds values, below 2^16, at bit positions of `words`, int64 that hold 32 bits each."""
    positions = positions.flatten()
    shifted = values.flatten().long() << (positions & 31)
    words.scatter_add_(0, positions >> 5, shifted & 0xFFFFFFFF)
    words.scatter_add_(0, (positions >> 5) + 1, shifted >> 32)


def _expert_part(stream: _Stream, matrix: Matrix, expert: int) -> _Stream:
    """One expert's blocks."""
    blocks = slice(expert * matrix.num_blocks, (expert + 1) * matrix.num_blocks)

    def cut(values: Tensor, counts: Tensor) -> Tensor:
        begin = int(counts[: blocks.start].sum())
        return values[begin : begin + int(counts[blocks].sum())]

    words, patches = cut(stream.words, stream.num_words), cut(stream.patches, stream.num_patches)
    return _Stream(words, stream.num_words[blocks], stream.offsets[blocks], patches, stream.num_patches[blocks])


def _assemble(layout: Layout, parts: list[_Stream], windows: Windows, codes_sum: int) -> Tensor | None:
    """The blob of one expert, or None where a raw one is not larger."""
    joined = _Stream(*(torch.cat([getattr(part, name) for part in parts]) for name in _Stream.__slots__))
    patch_offset = layout.stream_offset + len(joined.words) + GUARD_WORDS
    num_words = aligned(patch_offset + len(joined.patches))
    if num_words >= layout.raw_words:
        return None
    table = torch.zeros(layout.num_blocks + 1, ENTRY_WORDS, dtype=torch.int64, device=joined.words.device)
    table[1:, 0] = joined.num_words.cumsum(0)
    table[1:, 1] = joined.num_patches.cumsum(0)
    table[:-1, 2:] = joined.offsets[:, 0::2] | joined.offsets[:, 1::2] << 16
    body = torch.zeros(num_words - HEADER_WORDS, dtype=torch.int32, device=table.device)
    for begin, content in (
        (HEADER_WORDS, signed(table).flatten()[: ENTRY_WORDS * layout.num_blocks + 2]),
        (layout.stream_offset, joined.words),
        (patch_offset, joined.patches),
    ):
        body[begin - HEADER_WORDS : begin - HEADER_WORDS + len(content)] = content
    num_patches = len(joined.patches)
    return finish(Header(Kind.RESIDUAL, windows, layout.digest, num_words, patch_offset, num_patches, codes_sum), body)


def _raw_blob(layout: Layout, weights: list[Tensor], windows: Windows, codes_sum: int) -> Tensor:
    values = torch.cat([weight.flatten() for weight in weights]).view(torch.int32)
    body = F.pad(values, (0, layout.raw_words - HEADER_WORDS - len(values)))
    return finish(Header(Kind.RAW, windows, layout.digest, layout.raw_words, codes_checksum=codes_sum), body)
