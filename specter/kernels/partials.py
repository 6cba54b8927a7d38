"""Split-K softmax: partial results of each split of keys, merged in split order.

    sums fp32 [T, splits, H, W], peaks and masses fp32 [T, splits, H] -> out [T, H * W] model dtype
    bytes = T * splits in range * H * (W + 2) * 4

A row reads only the splits in its causal range, so its bits depend on its own position alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter.kernels.device import pow2, wait_previous

MASKED = -1e30  # score of a key outside the causal range: exp gives exactly 0
CHUNK = 16  # splits merged at a time


@dataclass(frozen=True, slots=True)
class Partials:
    """Per row, split and head: unnormalised sums of values, largest score, sum of weights; fp32."""

    sums: Tensor  # [T, splits, H, W]
    peaks: Tensor  # [T, splits, H]
    masses: Tensor  # [T, splits, H]

    @classmethod
    def empty(cls, num_rows: int, num_splits: int, num_heads: int, width: int, device: torch.device | str) -> Partials:
        shape = (num_rows, num_splits, num_heads)
        return cls(
            torch.empty(*shape, width, device=device),
            torch.empty(shape, device=device),
            torch.empty(shape, device=device),
        )


@triton.jit
def merged(
    sums, peaks, masses, row, head, last, H: tl.constexpr, W: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Softmax-weighted mean of values [W] of one row and head over splits 0…last."""
    splits = tl.arange(0, BLOCK_S)
    at = (row * SPLITS + splits) * H + head
    seen = splits <= last
    peak = tl.max(tl.load(peaks + at, mask=seen, other=float("-inf")), axis=0)
    channels = tl.arange(0, W)
    total = tl.zeros((W,), tl.float32)
    mass = tl.full((), 0.0, tl.float32)
    for begin in range(0, last + 1, CHUNK):
        chunk = begin + tl.arange(0, CHUNK)
        inside = chunk <= last
        where = (row * SPLITS + chunk) * H + head
        weights = tl.exp(tl.load(peaks + where, mask=inside, other=float("-inf")) - peak)
        part = tl.load(sums + where[:, None] * W + channels[None, :], mask=inside[:, None], other=0.0)
        total += tl.sum(part * weights[:, None], axis=0)
        mass += tl.sum(tl.load(masses + where, mask=inside, other=0.0) * weights, axis=0)
    return total / mass


@triton.jit
def _merge(
    sums, peaks, masses, position, out, H: tl.constexpr, W: tl.constexpr, SPLITS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_S: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1)
    last = (tl.load(position) + row) // SPLIT
    wait_previous(PDL)
    value = merged(sums, peaks, masses, row, head, last, H, W, SPLITS, BLOCK_S, CHUNK)
    tl.store(out + (row * H + head) * W + tl.arange(0, W), value.to(out.dtype.element_ty))


def merge(partials: Partials, position: Tensor, out: Tensor, split: int, pdl: bool) -> None:
    """out [T, H * W]: merges row t over positions 0…position + t; a split has `split` positions."""
    _, num_splits, num_heads, width = partials.sums.shape
    _merge[(num_heads, out.shape[0])](
        partials.sums, partials.peaks, partials.masses, position, out, H=num_heads, W=width, SPLITS=num_splits,
        SPLIT=split, BLOCK_S=pow2(num_splits), CHUNK=CHUNK, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
