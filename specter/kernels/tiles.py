"""Dense products of the target: y = x W^T on tiles of 16 rows, the same bits for a row whatever runs beside it.

    x [T, K], W [N, K] model dtype; bytes = N * K * itemsize, read from device memory once: the programs of all
    row tiles of one block of channels run side by side, and all but one of them hit the L2.

One configuration whatever T is; a program reads the whole of K, so that nothing is split and joined.
RMS norm costs no pass of its own: y = rstd * ((gain * x) W^T), with the sum of squares taken on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter.kernels.device import Launch, pow2, silu, wait_previous
from specter.kernels.mla import TILE


@triton.jit
def _load_rows(x, rows, ks, k, real, K: tl.constexpr, EVEN: tl.constexpr):
    pointers = x + rows[:, None] * K + (k + ks)[None, :]
    if EVEN:
        return tl.load(pointers, mask=real, other=0.0)
    return tl.load(pointers, mask=real & ((k + ks)[None, :] < K), other=0.0)


@triton.jit
def _load_weight(w, channels, ks, k, K: tl.constexpr, EVEN: tl.constexpr):
    pointers = w + channels[:, None] * K + (k + ks)[None, :]
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(k + ks)[None, :] < K, other=0.0)


@triton.jit(do_not_specialize=["T"])
def _linear(
    x, gain, w, out, results, weights, T, eps, N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = K % BLOCK_K == 0
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = (rows < T)[:, None]
    channels = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.minimum(channels, N - 1)
    ks = tl.arange(0, BLOCK_K)
    wait_previous(PDL)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        values = _load_rows(x, rows, ks, k, real, K, EVEN)
        if NORM:
            squares += tl.sum(values * values, axis=1)
            scale = tl.load(gain + k + ks, mask=k + ks < K, other=0.0)
            values = (values * scale.to(tl.float32)[None, :]).to(w.dtype.element_ty)
        acc = tl.dot(values, tl.trans(_load_weight(w, safe, ks, k, K, EVEN)), acc, input_precision="ieee")
    if NORM:
        acc *= tl.rsqrt(squares / K + eps)[:, None]
    inside = real & (channels < N)[None, :]
    at = rows[:, None] * N + channels[None, :]
    if RESIDUAL:
        acc += tl.load(out + at, mask=inside, other=0.0)
        for rank in tl.static_range(TOP_K):
            weight = tl.load(weights + rows * TOP_K + rank, mask=rows < T, other=0.0)
            at_rank = (rows[:, None] * TOP_K + rank) * N + channels[None, :]
            acc += weight[:, None] * tl.load(results + at_rank, mask=inside, other=0.0)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


def norm_linear(x: Tensor, gain: Tensor, w: Tensor, out: Tensor, eps: float, launch: Launch, pdl: bool) -> None:
    """out [T, N] = rmsnorm(x) W^T: x fp32 [T, K], gain [K], W [N, K]."""
    _launch_linear(x, gain, w, out, x, x, eps, 0, launch, norm=True, pdl=pdl)


def linear_residual(x: Tensor, w: Tensor, out: Tensor, launch: Launch, pdl: bool) -> None:
    """out fp32 [T, N] += x W^T: x [T, K], W [N, K]."""
    _launch_linear(x, x, w, out, x, x, 0.0, 0, launch, norm=False, pdl=pdl)


def linear_combine(
    x: Tensor, w: Tensor, out: Tensor, results: Tensor, weights: Tensor, launch: Launch, pdl: bool
) -> None:
    """`linear_residual`, plus the experts: out[t] += sum over rank r of weights[t, r] * results[t, r], in rank order.

    Args:
        results: fp32 [T, k, N]. weights: fp32 [T, k].
    """
    _launch_linear(x, x, w, out, results, weights, 0.0, weights.shape[1], launch, norm=False, pdl=pdl)


def _launch_linear(
    x: Tensor, gain: Tensor, w: Tensor, out: Tensor, results: Tensor, weights: Tensor, eps: float, top_k: int,
    launch: Launch, norm: bool, pdl: bool,
) -> None:  # fmt: skip
    num_out, num_in = w.shape
    _linear[(triton.cdiv(x.shape[0], TILE), triton.cdiv(num_out, launch.block_n))](
        x, gain, w, out, results, weights, x.shape[0], eps, N=num_out, K=num_in, TOP_K=top_k, BLOCK_M=TILE,
        BLOCK_N=launch.block_n, BLOCK_K=min(launch.block_k, pow2(num_in)), STAGES=launch.num_stages, NORM=norm,
        RESIDUAL=not norm, PDL=pdl, num_warps=launch.num_warps, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _norm_gated(
    x, gain, w, inner, logits, normed, T, eps, F: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Blocks of channels: the router's in blocks of 2 BLOCK_N first, then BLOCK_N gate and up channels each."""
    EVEN: tl.constexpr = K % BLOCK_K == 0
    num_router: tl.constexpr = (E + 2 * BLOCK_N - 1) // (2 * BLOCK_N)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = (rows < T)[:, None]
    block = tl.program_id(1)
    is_router = block < num_router
    channels = tl.where(is_router, block * 2, block - num_router) * BLOCK_N + tl.arange(0, BLOCK_N)
    last = tl.where(is_router, E, F) - 1
    low = tl.minimum(channels, last) + tl.where(is_router, 0, E)
    high = tl.where(is_router, tl.minimum(channels + BLOCK_N, last), low + F)
    ks = tl.arange(0, BLOCK_K)
    wait_previous(PDL)
    acc_low = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_high = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        values = _load_rows(x, rows, ks, k, real, K, EVEN)
        squares += tl.sum(values * values, axis=1)
        scale = tl.load(gain + k + ks, mask=k + ks < K, other=0.0)
        values = (values * scale.to(tl.float32)[None, :]).to(w.dtype.element_ty)
        acc_low = tl.dot(values, tl.trans(_load_weight(w, low, ks, k, K, EVEN)), acc_low, input_precision="ieee")
        acc_high = tl.dot(values, tl.trans(_load_weight(w, high, ks, k, K, EVEN)), acc_high, input_precision="ieee")
    rstd = tl.rsqrt(squares / K + eps)[:, None]
    acc_low *= rstd
    acc_high *= rstd
    if is_router:
        router = logits + rows[:, None] * E + channels[None, :]
        tl.store(router, acc_low, mask=real & (channels <= last)[None, :])
        tl.store(router + BLOCK_N, acc_high, mask=real & (channels + BLOCK_N <= last)[None, :])
    else:
        target = inner + rows[:, None] * F + channels[None, :]
        value = silu(acc_low) * acc_high
        tl.store(target, value.to(inner.dtype.element_ty), mask=real & (channels <= last)[None, :])
    if E > 0:  # noqa: SIM102 (a compile-time condition)
        if block == num_router:
            for k in range(0, K, BLOCK_K):
                scale = tl.load(gain + k + ks, mask=k + ks < K, other=0.0)
                values = _load_rows(x, rows, ks, k, real, K, EVEN) * scale.to(tl.float32)[None, :] * rstd
                at = normed + rows[:, None] * K + (k + ks)[None, :]
                tl.store(at, values.to(normed.dtype.element_ty), mask=real & ((k + ks)[None, :] < K))


def norm_gated(
    x: Tensor, gain: Tensor, w: Tensor, inner: Tensor, logits: Tensor, normed: Tensor, eps: float, launch: Launch,
    pdl: bool,
) -> None:  # fmt: skip
    """inner [T, F] = silu(gate) * up and logits fp32 [T, E] of rmsnorm(x), which also goes to `normed` [T, K].

    Args:
        x: fp32 [T, K]. w: [E + 2F, K]: router (none in a dense layer, then E is 0), gate, up.
    """
    num_rows, num_in = x.shape
    num_experts, num_inner = logits.shape[1], inner.shape[1]
    blocks = triton.cdiv(num_experts, 2 * launch.block_n) + triton.cdiv(num_inner, launch.block_n)
    _norm_gated[(triton.cdiv(num_rows, TILE), blocks)](
        x, gain, w, inner, logits, normed, num_rows, eps, F=num_inner, E=num_experts, K=num_in, BLOCK_M=TILE,
        BLOCK_N=launch.block_n, BLOCK_K=min(launch.block_k, pow2(num_in)), STAGES=launch.num_stages, PDL=pdl,
        num_warps=launch.num_warps, launch_pdl=pdl,
    )  # fmt: skip
