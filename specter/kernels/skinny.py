"""One row through a matrix: y = W x, streamed once (the draft's dense products).

    W [N, K] model dtype, x [K]; bytes = N * K * itemsize, and nothing else of weight.

A program owns `block_n` output channels and reads their rows in chunks of `block_k`, 16 bytes per thread and
load; the first chunk is asked for before the previous kernel's results are waited for. Partial sums stay in
registers until one reduction at the end. These kernels serve the draft, which needs no invariance of rows.
RMS norm costs no pass of its own: y = rstd * (W (gain * x)), with the sum of squares taken on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter.kernels.device import Launch, pow2, silu, wait_previous

_VECTOR = 8  # channels that one thread sums before anything is exchanged


@triton.jit
def _load_chunk(w, rows, ks, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns k… of the given rows, fp32 conversion left to the caller; zero beyond K."""
    pointers = w + rows[:, None] * K + (k + ks)[None, :]
    if k + BLOCK_K <= K:
        return tl.load(pointers)
    return tl.load(pointers, mask=(k + ks)[None, :] < K, other=0.0)


@triton.jit
def _load_vector(x, ks, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    if k + BLOCK_K <= K:
        return tl.load(x + k + ks).to(tl.float32)
    return tl.load(x + k + ks, mask=k + ks < K, other=0.0).to(tl.float32)


@triton.jit
def _fold(tile, x, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr):
    """Sums of VECTOR neighbouring products: [BLOCK_N, BLOCK_K] -> [BLOCK_N, BLOCK_K / VECTOR]."""
    products = tile.to(tl.float32) * x[None, :]
    return tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_K // VECTOR, VECTOR)), axis=2)


@triton.jit
def _linear(
    x, gain, w, out, eps, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    channels = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(channels, N - 1)
    ks = tl.arange(0, BLOCK_K)
    first = _load_chunk(w, rows, ks, 0, K, BLOCK_K)
    wait_previous(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_K // VECTOR), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        tile = first if k == 0 else _load_chunk(w, rows, ks, k, K, BLOCK_K)
        values = _load_vector(x, ks, k, K, BLOCK_K)
        if NORM:
            squares += values * values
            values *= _load_vector(gain, ks, k, K, BLOCK_K)
        acc += _fold(tile, values, BLOCK_N, BLOCK_K, VECTOR)
    result = tl.sum(acc, axis=1)
    if NORM:
        result *= tl.rsqrt(tl.sum(squares) / K + eps)
    if RESIDUAL:
        result += tl.load(out + rows)
    tl.store(out + channels, result.to(out.dtype.element_ty), mask=channels < N)


def norm_linear(x: Tensor, gain: Tensor, w: Tensor, out: Tensor, eps: float, launch: Launch, pdl: bool) -> None:
    """out [N] = W · rmsnorm(x): x fp32 [K], gain [K], W [N, K]."""
    _launch_linear(x, gain, w, out, eps, launch, norm=True, residual=False, pdl=pdl)


def linear_residual(x: Tensor, w: Tensor, out: Tensor, launch: Launch, pdl: bool) -> None:
    """out fp32 [N] += W · x: x [K], W [N, K]."""
    _launch_linear(x, x, w, out, 0.0, launch, norm=False, residual=True, pdl=pdl)


def _launch_linear(
    x: Tensor, gain: Tensor, w: Tensor, out: Tensor, eps: float, launch: Launch, norm: bool, residual: bool, pdl: bool
) -> None:
    num_out, num_in = w.shape
    _linear[(triton.cdiv(num_out, launch.block_n),)](
        x, gain, w, out, eps, N=num_out, K=num_in, BLOCK_N=launch.block_n, BLOCK_K=min(launch.block_k, pow2(num_in)),
        VECTOR=_VECTOR, NORM=norm, RESIDUAL=residual, PDL=pdl, num_warps=launch.num_warps, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _norm_gated(
    x, gain, w, inner, logits, normed, eps, F: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs: the router's channels in blocks of 2 BLOCK_N first, then blocks of BLOCK_N gate and up channels."""
    ks = tl.arange(0, BLOCK_K)
    num_router: tl.constexpr = (E + 2 * BLOCK_N - 1) // (2 * BLOCK_N)
    pid = tl.program_id(0)
    is_router = pid < num_router
    channels = tl.where(is_router, pid * 2, pid - num_router) * BLOCK_N + tl.arange(0, BLOCK_N)
    last = tl.where(is_router, E, F) - 1
    low = tl.minimum(channels, last) + tl.where(is_router, 0, E)
    high = tl.where(is_router, tl.minimum(channels + BLOCK_N, last), low + F)
    first_low = _load_chunk(w, low, ks, 0, K, BLOCK_K)
    first_high = _load_chunk(w, high, ks, 0, K, BLOCK_K)
    wait_previous(PDL)
    acc_low = tl.zeros((BLOCK_N, BLOCK_K // VECTOR), tl.float32)
    acc_high = tl.zeros((BLOCK_N, BLOCK_K // VECTOR), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        tile_low = first_low if k == 0 else _load_chunk(w, low, ks, k, K, BLOCK_K)
        tile_high = first_high if k == 0 else _load_chunk(w, high, ks, k, K, BLOCK_K)
        values = _load_vector(x, ks, k, K, BLOCK_K)
        squares += values * values
        values *= _load_vector(gain, ks, k, K, BLOCK_K)
        acc_low += _fold(tile_low, values, BLOCK_N, BLOCK_K, VECTOR)
        acc_high += _fold(tile_high, values, BLOCK_N, BLOCK_K, VECTOR)
    rstd = tl.rsqrt(tl.sum(squares) / K + eps)
    below, above = tl.sum(acc_low, axis=1) * rstd, tl.sum(acc_high, axis=1) * rstd
    if is_router:
        tl.store(logits + channels, below, mask=channels <= last)
        tl.store(logits + channels + BLOCK_N, above, mask=channels + BLOCK_N <= last)
    else:
        tl.store(inner + channels, (silu(below) * above).to(inner.dtype.element_ty), mask=channels <= last)
    if E > 0:  # noqa: SIM102 (a compile-time condition)
        if pid == num_router:
            for k in tl.static_range(0, K, BLOCK_K):
                values = _load_vector(x, ks, k, K, BLOCK_K) * _load_vector(gain, ks, k, K, BLOCK_K) * rstd
                at = k + ks
                order = (at % 32 // 4) * (K // 8) + (at // 32) * 4 + at % 4  # of the INT4 codes
                tl.store(normed + order, values.to(normed.dtype.element_ty), mask=at < K)


def norm_gated(
    x: Tensor, gain: Tensor, w: Tensor, inner: Tensor, logits: Tensor, normed: Tensor, eps: float, launch: Launch,
    pdl: bool,
) -> None:  # fmt: skip
    """inner [F] = silu(gate) * up and logits fp32 [E] of rmsnorm(x), which also goes to `normed` in code order.

    Args:
        x: fp32 [K]. w: [E + 2F, K]: router (none in a dense layer, then E is 0), gate, up.
        normed: [K], see `specter.kernels.int4_moe`.
    """
    num_experts, num_inner, num_in = logits.shape[0], inner.shape[0], w.shape[1]
    grid = triton.cdiv(num_experts, 2 * launch.block_n) + triton.cdiv(num_inner, launch.block_n)
    _norm_gated[(grid,)](
        x, gain, w, inner, logits, normed, eps, F=num_inner, E=num_experts, K=num_in,
        BLOCK_N=launch.block_n, BLOCK_K=min(launch.block_k, pow2(num_in)), VECTOR=_VECTOR, PDL=pdl,
        num_warps=launch.num_warps, launch_pdl=pdl,
    )  # fmt: skip
