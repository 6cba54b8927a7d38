"""Decodes a wave of residual experts from slots into a staging area (see docs/codec.md): what a pass launches.

    wave    int32 [3 + 2 n]: number of experts, reach of their windows in 16ths, first place, the experts, their slots
    slots   uint8 [num_slots, slot_bytes]: a slot begins with a blob, of which it may hold only the first bytes
    tails   uint8: of each longer blob what is beyond the slot, from the start of the block that straddles its end
    staging bf16 [n, values]: the wave's expert i is written to row first place + i, gate_up [2F, D], then down [D, F]
    bytes per weight: residual about 0.9, codes 1/2 + 4/group, out 2

The wave lies on the device, so that a graph can decode any wave up to its size. A program is one warp and decodes a
piece: a few segments of 512 weights, one after the other. (A fixed grid of programs that take turns over all pieces
took 25 instead of 19 us per expert on an H200.) All tensors have one dimension, so that table look-ups become exchanges
within the warp (two-dimensional ones took twice as long). Lane l holds octets l and l + 32 of a segment. A weight is
rebuilt by one multiplication: with x its level word (see `level_words`), (number * multiplier + x) >> 16 are its bits.
The multiplier is -2^16, or 2^31 - 2^15 for level k = 0, whose number holds the sign in its lowest bit.

Integer work is the bound, not memory. Blobs must have been checked (`specter.codecs.residual.decode.check_layer`). A
slot without a blob decodes to NaN, so that its use shows.
"""

# mypy: disable-error-code=no-untyped-def
# (the arguments of a kernel are typed by its launch)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter.codecs.residual.layout import MAGIC, Layout
from specter.codecs.residual.resident import SCALE_DTYPES, ResidentCodes, layout_of
from specter.codecs.residual.sizes import BLOCK_SEGMENTS, SEGMENT
from specter.codecs.residual.windows import Windows
from specter.errors import SpecterError
from specter.kernels.residual_parts import (
    extend,
    extension_bits,
    level_words,
    look_up,
    main_code,
    pair,
    rebuild,
    starts,
    window32,
    window64,
)

_SEGMENTS = 4  # of a piece; divides 16
_MAX_REGISTERS = 64


@triton.jit
def _segment(
    entry, stream, out, words, params, segment, num, reach, edge, GROUP: tl.constexpr, RAGGED: tl.constexpr,
    TWO_SIDED: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Decodes a segment: `entry` is its block's in the table, `stream` its block's."""
    LEVELS: tl.constexpr = 8192 // GROUP  # of all groups of a segment, 16 each
    within = segment % 16
    halves = tl.load(entry + 2 + within // 2)
    base = ((halves >> (16 * (within % 2))) & 0xFFFF) * 2

    octets = tl.arange(0, 64)
    inside = segment * 64 + octets < num // 8
    entries = tl.arange(0, LEVELS)
    groups = segment * (512 // GROUP) + entries // 16
    if RAGGED:
        groups = tl.minimum(groups, num // GROUP - 1)
    table = level_words(tl.load(params + groups), entries % 16, reach, edge, TWO_SIDED, BF16)
    if RAGGED:
        codes = tl.load(words + segment * 64 + octets, mask=inside, other=0)
    else:
        codes = tl.load(words + segment * 64 + octets)
    first = octets // (GROUP // 8) * 16
    w0, w1 = look_up(table, first, codes, 0), look_up(table, first, codes, 8)
    w2, w3 = look_up(table, first, codes, 16), look_up(table, first, codes, 24)
    w4, w5 = look_up(table, first, codes, 4), look_up(table, first, codes, 12)
    w6, w7 = look_up(table, first, codes, 20), look_up(table, first, codes, 28)
    low_bits = (w0 & 15) + (w1 & 15) + (w2 & 15) + (w3 & 15)
    high_bits = (w4 & 15) + (w5 & 15) + (w6 & 15) + (w7 & 15)
    counts = low_bits + high_bits
    if RAGGED:
        counts = tl.where(inside, counts, 0)
    start, base = starts(counts, base)
    window = window64(stream, start)
    c0, at = main_code(w0, window, start * 0)
    c1, at = main_code(w1, window, at)
    c2, at = main_code(w2, window, at)
    c3, at = main_code(w3, window, at)
    window = window64(stream, start + low_bits)
    c4, at = main_code(w4, window, start * 0)
    c5, at = main_code(w5, window, at)
    c6, at = main_code(w6, window, at)
    c7, at = main_code(w7, window, at)

    v0, f0 = rebuild(w0, c0, TWO_SIDED)
    v1, f1 = rebuild(w1, c1, TWO_SIDED)
    v2, f2 = rebuild(w2, c2, TWO_SIDED)
    v3, f3 = rebuild(w3, c3, TWO_SIDED)
    v4, f4 = rebuild(w4, c4, TWO_SIDED)
    v5, f5 = rebuild(w5, c5, TWO_SIDED)
    v6, f6 = rebuild(w6, c6, TWO_SIDED)
    v7, f7 = rebuild(w7, c7, TWO_SIDED)
    counts = extension_bits(f0, TWO_SIDED) + extension_bits(f1, TWO_SIDED) + extension_bits(f2, TWO_SIDED)
    counts += extension_bits(f3, TWO_SIDED) + extension_bits(f4, TWO_SIDED) + extension_bits(f5, TWO_SIDED)
    counts += extension_bits(f6, TWO_SIDED) + extension_bits(f7, TWO_SIDED)
    if RAGGED:
        counts = tl.where(inside, counts, 0)
    start, base = starts(counts, base)
    bits = window32(stream, start)
    v0, bits = extend(v0, f0, bits, TWO_SIDED)
    v1, bits = extend(v1, f1, bits, TWO_SIDED)
    v2, bits = extend(v2, f2, bits, TWO_SIDED)
    v3, bits = extend(v3, f3, bits, TWO_SIDED)
    v4, bits = extend(v4, f4, bits, TWO_SIDED)
    v5, bits = extend(v5, f5, bits, TWO_SIDED)
    v6, bits = extend(v6, f6, bits, TWO_SIDED)
    v7, bits = extend(v7, f7, bits, TWO_SIDED)
    values = tl.join(
        tl.join(pair(v0, v1), pair(v4, v5)), tl.join(pair(v2, v3), pair(v6, v7))
    )  # the last dim first: words 0, 1, 2, 3 of an octet
    at = segment * 256 + tl.arange(0, 256)
    if RAGGED:
        tl.store(out + at, tl.reshape(values, [256]), mask=at < num // 2)
    else:
        tl.store(out + at, tl.reshape(values, [256]))


@triton.jit
def _apply_patches(patches, begin, end, out, first, SEGMENTS: tl.constexpr):
    """Overwrites the patched weights of the segments `first`.. of a block; `out` is the block's."""
    tl.debug_barrier()  # other lanes stored these weights
    values = out.to(tl.pointer_type(tl.int16))
    for start in range(begin, end, 64):
        at = start + tl.arange(0, 64)
        patch = tl.load(patches + at, mask=at < end, other=0)
        place = (patch >> 16) & 0x1FFF
        mine = (at < end) & (place // 512 >= first) & (place // 512 < first + SEGMENTS)
        tl.store(values + place, (patch << 16 >> 16).to(tl.int16), mask=mine)


@triton.jit
def _where(condition, pointer, other):
    return tl.where(condition, pointer.to(tl.int64), other.to(tl.int64)).to(tl.pointer_type(tl.int32))


@triton.jit(do_not_specialize=["first_piece", "pieces0", "blocks0", "num0", "num1", "limit"])
def _decode_wave(
    wave, slots, tails, beyond, staging, words0, params0, words1, params1, slot_words, slot_stride, staging_stride,
    first_piece, pieces0, blocks0, num0, num1, limit, stream_offset, GROUP: tl.constexpr, RAGGED: tl.constexpr,
    SEGMENTS: tl.constexpr, TWO_SIDED: tl.constexpr, BF16: tl.constexpr, MAGIC: tl.constexpr,
):  # fmt: skip
    """Pieces `first_piece`… of the wave's experts; the first `pieces0` of an expert belong to gate_up."""
    place = tl.program_id(1)
    if place < tl.load(wave):
        piece = tl.program_id(0) + first_piece
        expert = tl.load(wave + 3 + place).to(tl.int64)
        blob = slots + tl.load(wave + 3 + limit + place).to(tl.int64) * slot_stride
        tail = tails + tl.load(beyond + expert)  # word w of the blob is tail + w, where it is beyond the slot
        is_second = piece >= pieces0
        piece -= tl.where(is_second, pieces0, 0)
        num = tl.where(is_second, num1, num0)  # weights of the matrix
        begin = tl.where(is_second, num0 // 2, 0)  # int32 words of the expert before it
        out = staging + (tl.load(wave + 2) + place).to(tl.int64) * staging_stride + begin
        out = tl.multiple_of(out, 16)
        first = piece * SEGMENTS
        last = tl.minimum(first + SEGMENTS, (num + 511) // 512)
        is_blob = tl.load(blob) == MAGIC
        if (not is_blob) or ((tl.load(blob + 1) >> 8) & 1) != 0:
            for segment in range(first, last):
                at = segment * 256 + tl.arange(0, 256)
                end = begin + tl.minimum(segment * 256 + 256, num // 2)
                source = _where(16 + end <= slot_words, blob, tail) + 16 + begin
                values = tl.load(source + at, mask=is_blob & (at < num // 2), other=-1)
                tl.store(out + at, values, mask=at < num // 2)
        else:
            reach = tl.load(wave + 1).to(tl.float32) * 0.0625
            words = _where(is_second, words1, words0) + expert * (num // 8)
            params = _where(is_second, params1, params0) + expert * (num // GROUP)
            block = first // 16
            entry = blob + 16 + (tl.where(is_second, blocks0, 0) + block) * 10
            stream = _where(stream_offset + tl.load(entry + 10) <= slot_words, blob, tail)
            stream += stream_offset + tl.load(entry)
            for segment in range(first, last):
                _segment(
                    entry, stream, out, words, params, segment, num, reach, tl.maximum(reach, 0.5625), GROUP, RAGGED,
                    TWO_SIDED, BF16,
                )  # fmt: skip
            begin, end = tl.load(entry + 1), tl.load(entry + 11)
            if end > begin:
                first_patch = tl.load(blob + 4)
                patches = _where(first_patch + end <= slot_words, blob, tail) + first_patch
                _apply_patches(patches, begin, end, out + block * 4096, first % 16, SEGMENTS)


@dataclass(frozen=True, slots=True)
class WaveDecoder:
    """Decodes experts whose codes are rows of the same tensors: those of one layer, or of all layers.

    Args:
        codes: gate_up [N, 2F, D] and down [N, D, F].
        segments: of a piece. max_registers: per thread.
    Raises SpecterError: a layout that the kernel does not serve.
    """

    codes: Sequence[ResidentCodes]
    segments: int = _SEGMENTS
    max_registers: int | None = _MAX_REGISTERS
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", layout_of(self.codes))
        if len(self.codes) != 2 or any(part.scale_dtype not in SCALE_DTYPES for part in self.codes):
            raise SpecterError("the decoder takes gate_up and down with fp16 or bf16 scales", "use the torch decoder")
        if BLOCK_SEGMENTS % self.segments:
            raise ValueError(f"segments={self.segments} does not divide {BLOCK_SEGMENTS}")

    def launch(self, wave: Tensor, slots: SlotMemory, staging: Tensor, *, two_sided: bool, num_experts: int) -> None:
        """Decodes a wave of at most `num_experts` experts (see `wave_row`), into the current stream.

        Programs for experts that the wave lacks end at once.

        Args:
            wave: int32, on the device.
            staging: bf16 [places, >= values of an expert].
            two_sided: of the wave's windows.
        """
        if not num_experts:
            return
        first, second = self.layout.matrices
        gate_up, down = self.codes
        per_block = BLOCK_SEGMENTS // self.segments
        pieces = [matrix.num_blocks * per_block for matrix in self.layout.matrices]
        # One launch for both matrices where their groups are alike.
        launches = [(0, sum(pieces), first.group)]
        if first.group != second.group:
            launches = [(0, pieces[0], first.group), (pieces[0], pieces[1], second.group)]
        for begin, num_pieces, group in launches:
            _decode_wave[(num_pieces, num_experts)](
                wave, slots.flat.view(torch.int32), slots.tails.view(torch.int32), slots.beyond,
                staging.view(torch.int32), gate_up.words, gate_up.params, down.words, down.params,
                slots.flat.shape[1] // 4, slots.flat.stride(0) // 4, staging.stride(0) // 2, begin, pieces[0],
                first.num_blocks, first.num_weights, second.num_weights, (len(wave) - 3) // 2,
                self.layout.stream_offset, GROUP=group,
                RAGGED=any(matrix.num_weights % SEGMENT for matrix in self.layout.matrices),
                SEGMENTS=self.segments, TWO_SIDED=two_sided, BF16=gate_up.scale_dtype == torch.bfloat16, MAGIC=MAGIC,
                num_warps=1, maxnreg=self.max_registers,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """Slots of blobs and the tails of blobs that are longer than a slot."""

    flat: Tensor  # uint8 [num_slots, slot_bytes]
    tails: Tensor  # uint8
    beyond: Tensor  # int64 [experts as in the codes]: what to add to the number of a word to find it in `tails`

    @classmethod
    def whole(cls, flat: Tensor, num_experts: int) -> SlotMemory:
        """Slots that any blob fits."""
        return cls(flat, flat[:0].view(-1), torch.zeros(num_experts, dtype=torch.int64, device=flat.device))


def wave_row(windows: Windows, first_place: int, experts: Sequence[int], slots: Sequence[int], limit: int) -> list[int]:
    """A wave of experts, numbered as rows of the codes, whose blobs are in these slots: 3 + 2 * limit numbers."""
    spare = [0] * (limit - len(experts))
    return [len(experts), windows.reach16, first_place, *experts, *spare, *slots, *spare]
