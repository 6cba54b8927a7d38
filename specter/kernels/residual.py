"""Decodes residual experts (see docs/codec.md): blobs and resident INT4 codes to BF16, many experts a launch.

    job int64 [8]: addresses of blob; gate_up out, words, params; down out, words, params; 1 if the blob is raw
    out bf16 [rows, columns] per matrix, anywhere on a multiple of 16 bytes: a staging slot
    bytes per weight: residual about 0.9, codes 1/2 + 4/group, out 2

A program is one warp and decodes a few segments of 512 weights, one after the other. All tensors have one dimension, so
that table look-ups become exchanges within the warp (two-dimensional ones took twice as long). Lane l holds octets l
and l + 32 of a segment. A weight is rebuilt by one multiplication: with x its level word (see `level_words`),
(number * multiplier + x) >> 16 are its bits. The multiplier is -2^16, or 2^31 - 2^15 for level k = 0, whose number
holds the sign in its lowest bit.

Integer work is the bound, not memory. Blobs must have been checked (`specter.codecs.residual.decode.check_layer`).
"""

# mypy: disable-error-code=no-untyped-def
# (the arguments of a kernel are typed by its launch)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter.codecs.residual.layout import Header, Kind, Layout
from specter.codecs.residual.resident import SCALE_DTYPES, ResidentCodes
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

JOB_WORDS = 8
_SEGMENTS = 4  # per program; divides 16
_MAX_REGISTERS = 64
_ALIGN_BYTES = 16


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
    if end > begin:
        tl.debug_barrier()  # other lanes stored these weights
        values = out.to(tl.pointer_type(tl.int16))
        for start in range(begin, end, 64):
            at = start + tl.arange(0, 64)
            patch = tl.load(patches + at, mask=at < end, other=0)
            place = (patch >> 16) & 0x1FFF
            mine = (at < end) & (place // 512 >= first) & (place // 512 < first + SEGMENTS)
            tl.store(values + place, (patch << 16 >> 16).to(tl.int16), mask=mine)


@triton.jit
def _copy_raw(source, out, segment, num, RAGGED: tl.constexpr):
    at = segment * 256 + tl.arange(0, 256)
    if RAGGED:
        tl.store(out + at, tl.load(source + at, mask=at < num // 2), mask=at < num // 2)
    else:
        tl.store(out + at, tl.load(source + at))


@triton.jit
def _pointer(job, index):
    return tl.load(job + index).to(tl.pointer_type(tl.int32))


@triton.jit
def _aligned_pointer(job):
    """Says that the address is a multiple of 16, for stores of 16 bytes; on a call's result the hint would be lost."""
    return tl.multiple_of(tl.load(job).to(tl.pointer_type(tl.int32)), 16)


@triton.jit(do_not_specialize=["first_program", "num_programs0", "blocks0", "num0", "num1"])
def _decode(
    jobs, first_program, num_programs0, blocks0, num0, num1, stream_offset, reach, edge, GROUP: tl.constexpr,
    RAGGED: tl.constexpr, SEGMENTS: tl.constexpr, TWO_SIDED: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Programs from `first_program` on; the first `num_programs0` belong to gate_up, the others to down."""
    program = tl.program_id(0) + first_program
    is_second = program >= num_programs0
    program -= tl.where(is_second, num_programs0, 0)
    num = tl.where(is_second, num1, num0)  # weights of the matrix
    job = jobs + tl.program_id(1).to(tl.int64) * 8
    blob = _pointer(job, 0)
    job += tl.where(is_second, 4, 1)
    out = _aligned_pointer(job)
    first = program * SEGMENTS
    last = tl.minimum(first + SEGMENTS, (num + 511) // 512)
    if tl.load(jobs + tl.program_id(1).to(tl.int64) * 8 + 7) != 0:
        for segment in range(first, last):
            _copy_raw(blob + 16 + tl.where(is_second, num0, 0) // 2, out, segment, num, RAGGED)
    else:
        words, params = _pointer(job, 1), _pointer(job, 2)
        block = first // 16
        entry = blob + 16 + (tl.where(is_second, blocks0, 0) + block) * 10
        stream = blob + stream_offset + tl.load(entry)
        for segment in range(first, last):
            _segment(entry, stream, out, words, params, segment, num, reach, edge, GROUP, RAGGED, TWO_SIDED, BF16)
        patches = blob + tl.load(blob + 4)
        _apply_patches(patches, tl.load(entry + 1), tl.load(entry + 11), out + block * 4096, first % 16, SEGMENTS)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes experts of one layout whose blobs share their windows: those of one layer."""

    layout: Layout
    windows: Windows
    scale_dtype: torch.dtype = torch.float16
    segments_per_program: int = _SEGMENTS
    max_registers: int | None = _MAX_REGISTERS

    def __post_init__(self) -> None:
        """Raises SpecterError for a layout that the kernel does not serve."""
        if len(self.layout.matrices) != 2 or self.scale_dtype not in SCALE_DTYPES:
            raise SpecterError("the decoder takes gate_up and down with fp16 or bf16 scales", "use the torch decoder")
        if BLOCK_SEGMENTS % self.segments_per_program:
            raise ValueError(f"segments_per_program={self.segments_per_program} does not divide {BLOCK_SEGMENTS}")

    def job(
        self, blob: Tensor, header: Header, out: Sequence[Tensor], codes: Sequence[ResidentCodes]
    ) -> tuple[int, ...]:
        """One row of a job table. The tensors must stay where they are until the launch has run.

        Args:
            blob: int32 [n]. header: what `check_layer` returned for it. out: bf16 matrices, contiguous.
            codes: of this expert.

        Raises:
            SpecterError: a tensor of another shape, type or alignment, or a blob with other windows.
        """
        if header.layout_digest != self.layout.digest or (
            header.kind is Kind.RESIDUAL and header.windows != self.windows
        ):
            raise SpecterError(
                f"a blob with {header.windows} in a launch for {self.windows}",
                "decode experts of one layer and one model per launch",
            )
        tensors = [blob]
        for target, part, matrix in zip(out, codes, self.layout.matrices, strict=True):
            if target.shape != (matrix.rows, matrix.columns) or target.dtype != torch.bfloat16:
                raise SpecterError(f"output is {target.dtype} {list(target.shape)}", f"give a bf16 {matrix}")
            if part.matrix != matrix or part.scale_dtype != self.scale_dtype:
                raise SpecterError(f"INT4 codes are of {part.matrix}, {part.scale_dtype}", f"give those of {matrix}")
            tensors += [target, part.words, part.params]
        for tensor in tensors:
            if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGN_BYTES or tensor.device != blob.device:
                raise SpecterError(
                    "a tensor of a decode job is not contiguous, not on a multiple of 16 bytes or on another device",
                    "give slots and blobs addresses that are multiples of 16",
                )
        return (*(tensor.data_ptr() for tensor in tensors), int(header.kind is Kind.RAW))

    def launch(self, jobs: Tensor) -> None:
        """Decodes jobs int64 [n, 8] on the device, into the current stream; n may be 0.

        Raises:
            SpecterError: a table of another shape or type.
        """
        if jobs.dtype != torch.int64 or jobs.dim() != 2 or jobs.shape[1] != JOB_WORDS or not jobs.is_contiguous():
            raise SpecterError(f"a job table is {jobs.dtype} {list(jobs.shape)}", "give int64 [n, 8], contiguous")
        if not len(jobs):
            return
        first, second = self.layout.matrices
        per_block = BLOCK_SEGMENTS // self.segments_per_program
        programs = [matrix.num_blocks * per_block for matrix in self.layout.matrices]
        # One launch for both matrices where their groups are alike.
        launches = [(0, sum(programs), first.group)]
        if first.group != second.group:
            launches = [(0, programs[0], first.group), (programs[0], programs[1], second.group)]
        for begin, num_programs, group in launches:
            _decode[(num_programs, len(jobs))](
                jobs, begin, programs[0], first.num_blocks, first.num_weights, second.num_weights,
                self.layout.stream_offset, self.windows.reach, self.windows.edge, GROUP=group,
                RAGGED=any(matrix.num_weights % SEGMENT for matrix in self.layout.matrices),
                SEGMENTS=self.segments_per_program, TWO_SIDED=self.windows.two_sided,
                BF16=self.scale_dtype == torch.bfloat16, num_warps=1,
                maxnreg=self.max_registers,
            )  # fmt: skip
