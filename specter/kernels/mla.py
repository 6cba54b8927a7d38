"""Multi-head latent attention (MLA), absorbed: W_uk is applied to queries, W_uv to weighted sums of latents.

    kv_b  [H * (nope + v), lora] as in the checkpoint: per head, W_uk rows, then W_uv rows
    cache [positions, lora + rope] of one layer: RMS-normed latent with gain, then the rotated key
    bytes per layer = kv_b + cache[: position + 1]

Split-K attention, merged in split order by `specter.kernels.partials`. A row reads only the splits in its causal
range: one launch configuration serves draft, plain decoding and verification with equal bits per row.

`position` and the cache before it are read without waiting for the previous kernel: they must be complete before
the pass's first kernel, which is therefore not launched early.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter.kernels.device import TILE, pow2, wait_previous
from specter.kernels.partials import CHUNK, MASKED, Partials, merge, merged
from specter.models.spec import ModelSpec

_LATENT_NORM_EPS = 1e-6  # fixed in the published model, independent of rms_norm_eps


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention shape and launch parameters."""

    num_heads: int
    nope: int
    rope: int
    v: int
    lora: int
    scale: float
    block_c: int = 64  # latent channels per program of `absorb`
    block_v: int = 16  # value channels per program of `values`
    split: int = 32  # positions per program of `attend`

    @classmethod
    def of(cls, spec: ModelSpec, scale: float) -> Heads:
        return cls(spec.num_heads, spec.nope_dim, spec.rope_dim, spec.v_dim, spec.kv_lora, scale)

    def partials(self, num_rows: int, capacity: int, device: torch.device | str) -> Partials:
        return Partials.empty(num_rows, -(-capacity // self.split), self.num_heads, self.lora, device)


@triton.jit
def _rotate(even, odd, cos, sin):
    return even * cos - odd * sin, even * sin + odd * cos


@triton.jit(do_not_specialize=["T"])
def _absorb(
    qkv, kv_b, kv_gain, cos, sin, position, queries, cache, T, capacity, eps, H: tl.constexpr, NOPE: tl.constexpr,
    ROPE: tl.constexpr, V: tl.constexpr, LORA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = LORA // BLOCK_C
    QK: tl.constexpr = NOPE + ROPE
    WIDTH: tl.constexpr = LORA + ROPE
    STRIDE: tl.constexpr = H * QK + WIDTH
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = (rows < T)[:, None]
    pid = tl.program_id(0)
    pairs = tl.arange(0, ROPE // 2)
    at = tl.minimum(tl.load(position) + rows, capacity - 1)
    if pid < H * BLOCKS:
        head = pid // BLOCKS
        columns = pid % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
        nopes = tl.arange(0, NOPE)
        up_k = tl.load(kv_b + (head * (NOPE + V) + nopes)[:, None] * LORA + columns[None, :])
        wait_previous(PDL)
        q = tl.load(qkv + rows[:, None] * STRIDE + head * QK + nopes[None, :], mask=real, other=0.0)
        absorbed = tl.dot(q, up_k, input_precision="ieee")
        out = queries + (rows[:, None] * H + head) * WIDTH
        tl.store(out + columns[None, :], absorbed.to(queries.dtype.element_ty), mask=real)
        if pid % BLOCKS == 0:
            angles = at[:, None] * (ROPE // 2) + pairs[None, :]
            q_pe = qkv + rows[:, None] * STRIDE + head * QK + NOPE + 2 * pairs[None, :]
            even = tl.load(q_pe, mask=real, other=0.0).to(tl.float32)
            odd = tl.load(q_pe + 1, mask=real, other=0.0).to(tl.float32)
            even, odd = _rotate(even, odd, tl.load(cos + angles), tl.load(sin + angles))
            tl.store(out + LORA + 2 * pairs[None, :], even.to(queries.dtype.element_ty), mask=real)
            tl.store(out + LORA + 2 * pairs[None, :] + 1, odd.to(queries.dtype.element_ty), mask=real)
    else:
        wait_previous(PDL)
        latents = tl.arange(0, LORA)
        source = qkv + rows[:, None] * STRIDE + H * QK
        latent = tl.load(source + latents[None, :], mask=real, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(latent * latent, axis=1) / LORA + eps)
        latent *= rstd[:, None] * tl.load(kv_gain + latents).to(tl.float32)[None, :]
        target = cache + at[:, None] * WIDTH
        tl.store(target + latents[None, :], latent.to(cache.dtype.element_ty), mask=real)
        angles = at[:, None] * (ROPE // 2) + pairs[None, :]
        even = tl.load(source + LORA + 2 * pairs[None, :], mask=real, other=0.0).to(tl.float32)
        odd = tl.load(source + LORA + 2 * pairs[None, :] + 1, mask=real, other=0.0).to(tl.float32)
        even, odd = _rotate(even, odd, tl.load(cos + angles), tl.load(sin + angles))
        tl.store(target + LORA + 2 * pairs[None, :], even.to(cache.dtype.element_ty), mask=real)
        tl.store(target + LORA + 2 * pairs[None, :] + 1, odd.to(cache.dtype.element_ty), mask=real)


def absorb(
    heads: Heads, qkv: Tensor, kv_b: Tensor, kv_gain: Tensor, rotary: tuple[Tensor, Tensor], position: Tensor,
    queries: Tensor, cache: Tensor, pdl: bool,
) -> None:  # fmt: skip
    """Appends latents and rotated keys to the cache and projects queries into the latent space.

    Args:
        qkv: [T, H * (nope + rope) + lora + rope]. rotary: cos, sin fp32 [positions, rope / 2].
        position: int32 [1], of row 0; row t is written at position + t. queries: [T, H, lora + rope] out.
        cache: [positions, lora + rope], rows written in place.
    """
    num_rows, block_c = qkv.shape[0], min(heads.block_c, heads.lora)
    grid = (heads.num_heads * (heads.lora // block_c) + 1, triton.cdiv(num_rows, TILE))
    _absorb[grid](
        qkv, kv_b, kv_gain, *rotary, position, queries, cache, num_rows, cache.shape[0], _LATENT_NORM_EPS,
        H=heads.num_heads, NOPE=heads.nope, ROPE=heads.rope, V=heads.v, LORA=heads.lora, BLOCK_M=TILE,
        BLOCK_C=block_c, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _attend(
    queries, cache, position, sums, peaks, masses, scale, H: tl.constexpr, ROPE: tl.constexpr, LORA: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_H: tl.constexpr, MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = LORA + ROPE
    split, row = tl.program_id(0), tl.program_id(1)
    begin = tl.load(position)
    end = begin + row
    heads = tl.arange(0, BLOCK_H)
    real = (heads < H)[:, None]
    latents, rotated = tl.arange(0, LORA), LORA + tl.arange(0, ROPE)
    keys = split * SPLIT + tl.arange(0, SPLIT)
    at = cache + keys[:, None] * WIDTH
    old = (keys < begin)[:, None]  # of earlier passes: complete, no wait needed
    old_latent = tl.load(at + latents[None, :], mask=old, other=0.0)
    old_key = tl.load(at + rotated[None, :], mask=old, other=0.0)
    wait_previous(PDL)
    if split * SPLIT <= end:
        seen = keys <= end
        new = seen[:, None] & (keys >= begin)[:, None]
        latent = tl.where(old, old_latent, tl.load(at + latents[None, :], mask=new, other=0.0))
        key = tl.where(old, old_key, tl.load(at + rotated[None, :], mask=new, other=0.0))
        base = queries + (row * H + heads)[:, None] * WIDTH
        q = tl.load(base + latents[None, :], mask=real, other=0.0)
        q_pe = tl.load(base + rotated[None, :], mask=real, other=0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores += tl.dot(q_pe, tl.trans(key), input_precision="ieee")
        scores = tl.where(seen[None, :], scores * scale, MASKED)
        peak = tl.max(scores, axis=1)
        weights = tl.exp(scores - peak[:, None])
        total = tl.dot(weights.to(latent.dtype), latent, input_precision="ieee")
        out = (row * SPLITS + split) * H + heads
        tl.store(sums + out[:, None] * LORA + latents[None, :], total, mask=real)
        tl.store(peaks + out, peak, mask=heads < H)
        tl.store(masses + out, tl.sum(weights, axis=1), mask=heads < H)


def attend(heads: Heads, queries: Tensor, cache: Tensor, position: Tensor, partials: Partials, pdl: bool) -> None:
    """Partial sums of row t over positions 0…position + t; later splits are not written.

    Args:
        queries: [T, H, lora + rope]. cache: [positions, lora + rope].
    """
    num_rows, num_splits = queries.shape[0], partials.sums.shape[1]
    _attend[(num_splits, num_rows)](
        queries, cache, position, partials.sums, partials.peaks, partials.masses, heads.scale, H=heads.num_heads,
        ROPE=heads.rope, LORA=heads.lora, SPLITS=num_splits, SPLIT=heads.split,
        BLOCK_H=max(TILE, pow2(heads.num_heads)), MASKED=MASKED, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _values(
    sums, peaks, masses, kv_b, position, out, H: tl.constexpr, NOPE: tl.constexpr, V: tl.constexpr,
    LORA: tl.constexpr, SPLITS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_S: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    latents = tl.arange(0, LORA)
    up_v = tl.load(kv_b + (head * (NOPE + V) + NOPE + channels)[:, None] * LORA + latents[None, :])
    last = tl.load(position) // SPLIT
    wait_previous(PDL)
    latent = merged(sums, peaks, masses, 0, head, last, H, LORA, SPLITS, BLOCK_S, CHUNK)
    value = tl.sum(up_v.to(tl.float32) * latent[None, :], axis=1)
    tl.store(out + head * V + channels, value.to(out.dtype.element_ty))


def values(heads: Heads, partials: Partials, kv_b: Tensor, position: Tensor, out: Tensor, pdl: bool) -> None:
    """Merges one row's partial sums and applies W_uv: out [H * v]."""
    num_splits, block_v = partials.sums.shape[1], min(heads.block_v, heads.v)
    _values[(heads.num_heads, heads.v // block_v)](
        partials.sums, partials.peaks, partials.masses, kv_b, position, out, H=heads.num_heads, NOPE=heads.nope,
        V=heads.v, LORA=heads.lora, SPLITS=num_splits, SPLIT=heads.split, BLOCK_S=pow2(num_splits), CHUNK=CHUNK,
        BLOCK_V=block_v, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _project(
    latents, kv_b, out, T, H: tl.constexpr, NOPE: tl.constexpr, V: tl.constexpr, LORA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = (rows < T)[:, None]
    ks = tl.arange(0, BLOCK_K)
    up_v = kv_b + (head * (NOPE + V) + NOPE + channels)[:, None] * LORA
    wait_previous(PDL)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for k in range(0, LORA, BLOCK_K):
        latent = tl.load(latents + (rows[:, None] * H + head) * LORA + (k + ks)[None, :], mask=real, other=0.0)
        acc = tl.dot(latent, tl.trans(tl.load(up_v + (k + ks)[None, :])), acc, input_precision="ieee")
    tl.store(out + (rows[:, None] * H + head) * V + channels[None, :], acc.to(out.dtype.element_ty), mask=real)


def merge_and_project(
    heads: Heads, partials: Partials, kv_b: Tensor, position: Tensor, latents: Tensor, out: Tensor, pdl: bool
) -> None:
    """`values` for T rows in two launches: latents [T, H, lora], then out [T, H * v]."""
    num_rows, block_v = out.shape[0], min(heads.block_v, heads.v)
    merge(partials, position, latents, heads.split, pdl)
    _project[(heads.num_heads, heads.v // block_v, triton.cdiv(num_rows, TILE))](
        latents, kv_b, out, num_rows, H=heads.num_heads, NOPE=heads.nope, V=heads.v, LORA=heads.lora, BLOCK_M=TILE,
        BLOCK_V=block_v, BLOCK_K=min(128, heads.lora), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
