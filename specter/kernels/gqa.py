"""Grouped-query attention over a KV cache: H query heads share Hk key heads of width W.

    qkv   [T, (H + 2 Hk) * W], model dtype: queries, keys, values with biases; queries are rotated in place
    cache [positions, 2 Hk * W], model dtype, one layer: rotated keys of all key heads, then their values
    bytes per layer = cache[: position + 1], read once per 16 / (H / Hk) rows

Split-K attention: a program takes one split of keys, one key head and a tile of 16 queries (the group's, of as many
rows as fit); `specter.kernels.partials` merges the splits in order. Keys outside a query's causal range add exact
zeros, so one launch configuration serves draft, plain decoding and verification with equal bits per row.

`position` and the cache before it are read without waiting for the previous kernel: they must be complete before the
pass's first kernel, which is therefore not launched early.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter.errors import SpecterError
from specter.kernels.device import TILE, pow2, wait_previous
from specter.kernels.partials import MASKED, Partials
from specter.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention shape and launch parameters."""

    num_heads: int  # H
    num_keys: int  # Hk
    width: int  # W
    scale: float
    split: int = 32  # positions per program of `attend`

    @classmethod
    def of(cls, spec: ModelSpec, scale: float) -> Heads:
        """Raises SpecterError: the head width is not supported."""
        if spec.rope_dim < TILE or spec.rope_dim != pow2(spec.rope_dim):
            raise SpecterError(
                f"{spec.name} has heads of {spec.rope_dim} channels; the device's kernels support powers of two "
                f"from {TILE} on",
                "use clock=virtual",
            )
        return cls(spec.num_heads, spec.num_kv_heads, spec.rope_dim, scale)

    def partials(self, num_rows: int, capacity: int, device: torch.device | str) -> Partials:
        return Partials.empty(num_rows, -(-capacity // self.split), self.num_heads, self.width, device)


@triton.jit(do_not_specialize=["T"])
def _rotate(
    qkv, cos, sin, position, cache, T, capacity, H: tl.constexpr, HK: tl.constexpr, W: tl.constexpr,
    BLOCK_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = W // 2
    head = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = (rows < T)[:, None]
    pairs = tl.arange(0, HALF)[None, :]
    at = tl.minimum(tl.load(position) + rows, capacity - 1)[:, None]
    is_rotated = head < H + HK  # values are copied: angle 0
    c = tl.load(cos + at * HALF + pairs, mask=is_rotated, other=1.0)
    s = tl.load(sin + at * HALF + pairs, mask=is_rotated, other=0.0)
    wait_previous(PDL)
    source = qkv + (rows[:, None] * (H + 2 * HK) + head) * W + pairs
    low = tl.load(source, mask=real, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=real, other=0.0).to(tl.float32)
    new_low = (low * c - high * s).to(qkv.dtype.element_ty)
    new_high = (low * s + high * c).to(qkv.dtype.element_ty)
    if head < H:
        tl.store(source, new_low, mask=real)
        tl.store(source + HALF, new_high, mask=real)
    else:
        target = cache + (at * (2 * HK) + head - H) * W + pairs
        tl.store(target, new_low, mask=real)
        tl.store(target + HALF, new_high, mask=real)


def turn(heads: Heads, qkv: Tensor, rotary: tuple[Tensor, Tensor], position: Tensor, cache: Tensor, pdl: bool) -> None:
    """Rotates queries in place and appends rotated keys and values to the cache.

    Args:
        qkv: [T, (H + 2 Hk) * W]. rotary: cos, sin fp32 [positions, W / 2]; pairs are channels (i, i + W / 2).
        position: int32 [1], of row 0; row t is written at position + t. cache: [positions, 2 Hk * W].
    """
    grid = (heads.num_heads + 2 * heads.num_keys, triton.cdiv(qkv.shape[0], TILE))
    _rotate[grid](
        qkv, *rotary, position, cache, qkv.shape[0], cache.shape[0], H=heads.num_heads, HK=heads.num_keys,
        W=heads.width, BLOCK_M=TILE, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _attend(
    qkv, cache, position, sums, peaks, masses, T, scale, H: tl.constexpr, HK: tl.constexpr, W: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    GROUP: tl.constexpr = H // HK
    ROWS: tl.constexpr = BLOCK_M // BLOCK_G
    split, key_head = tl.program_id(0), tl.program_id(2)
    lanes, channels = tl.arange(0, BLOCK_M), tl.arange(0, W)[None, :]
    row, member = tl.program_id(1) * ROWS + lanes // BLOCK_G, lanes % BLOCK_G
    real = (row < T) & (member < GROUP)
    begin = tl.load(position)
    last = begin + tl.minimum(tl.program_id(1) * ROWS + ROWS, T) - 1
    keys = split * SPLIT + tl.arange(0, SPLIT)
    at = cache + (keys[:, None] * (2 * HK) + key_head) * W + channels
    old = (keys < begin)[:, None]  # of earlier passes: complete, no wait needed
    old_key = tl.load(at, mask=old, other=0.0)
    old_value = tl.load(at + HK * W, mask=old, other=0.0)
    wait_previous(PDL)
    if split * SPLIT <= last:
        new = ((keys >= begin) & (keys <= last))[:, None]
        key = tl.where(old, old_key, tl.load(at, mask=new, other=0.0))
        value = tl.where(old, old_value, tl.load(at + HK * W, mask=new, other=0.0))
        head = key_head * GROUP + member
        query = qkv + (row * (H + 2 * HK) + head)[:, None] * W + channels
        scores = tl.dot(tl.load(query, mask=real[:, None], other=0.0), tl.trans(key), input_precision="ieee")
        seen = keys[None, :] <= (begin + row)[:, None]
        scores = tl.where(seen, scores * scale, MASKED)
        peak = tl.max(scores, axis=1)
        weights = tl.exp(scores - peak[:, None])
        total = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        out = (row * SPLITS + split) * H + head
        tl.store(sums + out[:, None] * W + channels, total, mask=real[:, None])
        tl.store(peaks + out, peak, mask=real)
        tl.store(masses + out, tl.sum(weights, axis=1), mask=real)


def attend(heads: Heads, qkv: Tensor, cache: Tensor, position: Tensor, partials: Partials, pdl: bool) -> None:
    """Partial sums of row t over positions 0…position + t; later splits are left undefined.

    Args:
        qkv: [T, (H + 2 Hk) * W] with rotated queries. cache: [positions, 2 Hk * W].
    """
    num_rows, num_splits = qkv.shape[0], partials.sums.shape[1]
    group = pow2(heads.num_heads // heads.num_keys)
    block = max(TILE, group)
    _attend[(num_splits, triton.cdiv(num_rows, block // group), heads.num_keys)](
        qkv, cache, position, partials.sums, partials.peaks, partials.masses, num_rows, heads.scale,
        H=heads.num_heads, HK=heads.num_keys, W=heads.width, SPLITS=num_splits, SPLIT=heads.split, BLOCK_G=group,
        BLOCK_M=block, MASKED=MASKED, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
