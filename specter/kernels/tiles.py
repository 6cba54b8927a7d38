"""Dense products of the target: y = x W^T on tiles of 16 rows; a row's bits do not depend on other rows.

    x [T, K], W [N, K] model dtype; bytes = N * K * itemsize, read from device memory once: programs of all row tiles
    of a block of channels are adjacent, and all but one hit the L2

One configuration for every T. A program reads all of K in steps of `block_k`. Within a step each warp multiplies its
own part of K, and the warps' sums are added once, in order: a chain of K / 16 dependent matrix instructions would take
longer than the memory traffic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter.kernels.device import TILE, Launch, Stream, inverse_rms, load_squares, pow2, silu, wait_previous


@triton.jit
def load_parts(x, rows, k, real, K: tl.constexpr, PARTS: tl.constexpr, BLOCK_K: tl.constexpr):
    """x[rows, k: k + BLOCK_K] as [PARTS, rows, BLOCK_K / PARTS]; 0 where `real` is false and beyond K."""
    parts, ks = tl.arange(0, PARTS), tl.arange(0, BLOCK_K // PARTS)
    at = k + parts[:, None] * (BLOCK_K // PARTS) + ks[None, :]
    pointers = x + rows[None, :, None] * K + at[:, None, :]
    mask = real[None, :, None]
    if K % BLOCK_K != 0:
        mask = mask & (at < K)[:, None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def multiply(x, w, acc):
    """acc [PARTS, M, N] + x [PARTS, M, K] w[PARTS, N, K]^T."""
    return tl.dot(x, tl.permute(w, (0, 2, 1)), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["T"])
def _linear(
    x, squares, w, bias, out, T, eps, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, NORMED: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channels = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real, inside = rows < T, channels < N
    wait_previous(PDL)
    square_parts = load_squares(squares, tl.where(real, rows, 0), BLOCKS, BLOCK_B)
    acc = tl.zeros((PARTS, BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        weights = load_parts(w, channels, k, inside, K, PARTS, BLOCK_K)
        acc = multiply(load_parts(x, rows, k, real, K, PARTS, BLOCK_K), weights, acc)
    result = tl.sum(acc, axis=0) * inverse_rms(square_parts, K, eps, NORMED)[:, None]
    if BIAS:
        result += tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = rows[:, None] * N + channels[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


def norm_linear(
    stream: Stream, w: Tensor, out: Tensor, eps: float, launch: Launch, pdl: bool, bias: Tensor | None = None
) -> None:
    """out [T, N] = norm(stream) W^T + bias: W [N, D], bias [N]."""
    (num_rows, num_blocks), (num_out, num_in) = stream.squares.shape, w.shape
    _linear[(triton.cdiv(num_rows, TILE), triton.cdiv(num_out, launch.block_n))](
        stream.scaled, stream.squares, w, w if bias is None else bias, out, num_rows, eps, N=num_out, K=num_in,
        BIAS=bias is not None, NORMED=stream.is_normed, BLOCKS=num_blocks, BLOCK_B=pow2(num_blocks), BLOCK_M=TILE,
        BLOCK_N=launch.block_n, BLOCK_K=launch.block_k, PARTS=launch.num_warps, STAGES=launch.num_stages, PDL=pdl,
        num_warps=launch.num_warps, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _residual(
    x, w, bias, gates, stream, gain, scaled, squares, results, weights, T, N: tl.constexpr, K: tl.constexpr,
    TOP_K: tl.constexpr, BIAS: tl.constexpr, GATE_STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    channels = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real, inside = rows < T, channels < N
    wait_previous(PDL)
    acc = tl.zeros((PARTS, BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        tile = load_parts(w, channels, k, inside, K, PARTS, BLOCK_K)
        acc = multiply(load_parts(x, rows, k, real, K, PARTS, BLOCK_K), tile, acc)
    written = real[:, None] & inside[None, :]
    at = rows[:, None] * N + channels[None, :]
    product = tl.sum(acc, axis=0)
    if GATE_STRIDE > 0:
        product *= tl.sigmoid(tl.load(gates + rows * GATE_STRIDE, mask=real, other=0.0))[:, None]
    if BIAS:
        product += tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
    value = tl.load(stream + at, mask=written, other=0.0) + product
    for rank in tl.static_range(TOP_K):
        weight = tl.load(weights + rows * TOP_K + rank, mask=real, other=0.0)
        at_rank = (rows[:, None] * TOP_K + rank) * N + channels[None, :]
        value += weight[:, None] * tl.load(results + at_rank, mask=written, other=0.0)
    tl.store(stream + at, value, mask=written)
    tl.store(squares + rows * tl.num_programs(1) + tl.program_id(1), tl.sum(value * value, axis=1), mask=real)
    value *= tl.load(gain + channels, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(scaled + at, value.to(scaled.dtype.element_ty), mask=written)


def linear_residual(
    x: Tensor, w: Tensor, stream: Stream, gain: Tensor, launch: Launch, pdl: bool, bias: Tensor | None = None,
    experts: tuple[Tensor, Tensor] | None = None, gates: Tensor | None = None,
) -> None:  # fmt: skip
    """stream += sigmoid(gates) x W^T + bias + sum over rank r of weights[t, r] * results[t, r], in rank order.

    Args:
        x: [T, K]; K is 0 without a shared expert. w: [D, K]. gain: [D] of the next norm. bias: [D].
        experts: (results fp32 [T, k, D], weights fp32 [T, k]). gates: fp32 [T] of any stride; None: factor 1.
    """
    num_out, num_in = w.shape
    results, weights = experts or (stream.x, stream.x)
    top_k = weights.shape[1] if experts else 0
    _residual[(triton.cdiv(x.shape[0], TILE), triton.cdiv(num_out, launch.block_n))](
        x, w, gain if bias is None else bias, stream.x if gates is None else gates, stream.x, gain, stream.scaled,
        stream.squares, results, weights, x.shape[0], N=num_out, K=num_in, TOP_K=top_k, BIAS=bias is not None,
        GATE_STRIDE=0 if gates is None else gates.stride(0), BLOCK_M=TILE, BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k, PARTS=launch.num_warps, STAGES=launch.num_stages, PDL=pdl,
        num_warps=launch.num_warps, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _norm_gated(
    x, squares, w, inner, logits, scales, T, eps, F: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
    NORMED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program order: the router's channels in blocks of 2 BLOCK_N, then BLOCK_N gate and up channels each."""
    num_router: tl.constexpr = (E + 2 * BLOCK_N - 1) // (2 * BLOCK_N)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = rows < T
    block = tl.program_id(1)
    is_router = block < num_router
    channels = tl.where(is_router, block * 2, block - num_router) * BLOCK_N + tl.arange(0, BLOCK_N)
    last = tl.where(is_router, E, F) - 1
    low = tl.minimum(channels, last) + tl.where(is_router, 0, E)
    high = tl.where(is_router, tl.minimum(channels + BLOCK_N, last), low + F)
    everywhere = channels >= 0
    wait_previous(PDL)
    square_parts = load_squares(squares, tl.where(real, rows, 0), BLOCKS, BLOCK_B)
    acc_low = tl.zeros((PARTS, BLOCK_M, BLOCK_N), tl.float32)
    acc_high = tl.zeros((PARTS, BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        values = load_parts(x, rows, k, real, K, PARTS, BLOCK_K)
        acc_low = multiply(values, load_parts(w, low, k, everywhere, K, PARTS, BLOCK_K), acc_low)
        acc_high = multiply(values, load_parts(w, high, k, everywhere, K, PARTS, BLOCK_K), acc_high)
    inverse = inverse_rms(square_parts, K, eps, NORMED)
    below, above = tl.sum(acc_low, axis=0) * inverse[:, None], tl.sum(acc_high, axis=0) * inverse[:, None]
    if is_router:
        router = logits + rows[:, None] * E + channels[None, :]
        tl.store(router, below, mask=real[:, None] & (channels <= last)[None, :])
        tl.store(router + BLOCK_N, above, mask=real[:, None] & (channels + BLOCK_N <= last)[None, :])
        tl.store(scales + rows, inverse, mask=real & (block == 0))
    else:
        target = inner + rows[:, None] * F + channels[None, :]
        value = silu(below) * above
        tl.store(target, value.to(inner.dtype.element_ty), mask=real[:, None] & (channels <= last)[None, :])


def norm_gated(
    stream: Stream, w: Tensor, inner: Tensor, logits: Tensor, scales: Tensor, eps: float, launch: Launch, pdl: bool
) -> None:
    """inner [T, F] = silu(gate) * up and logits fp32 [T, E] of norm(stream); scales fp32 [T] = norm / scaled.

    Args:
        w: [E + 2F, D]: router (absent in a dense layer: E is 0, `scales` is not written), gate, up. The shared
            expert's gate is one more row of the router; F is 0 without a shared expert.
    """
    (num_rows, num_blocks), num_in = stream.squares.shape, w.shape[1]
    num_experts, num_inner = logits.shape[1], inner.shape[1]
    blocks = triton.cdiv(num_experts, 2 * launch.block_n) + triton.cdiv(num_inner, launch.block_n)
    _norm_gated[(triton.cdiv(num_rows, TILE), blocks)](
        stream.scaled, stream.squares, w, inner, logits, scales, num_rows, eps, F=num_inner, E=num_experts, K=num_in,
        NORMED=stream.is_normed, BLOCKS=num_blocks, BLOCK_B=pow2(num_blocks), BLOCK_M=TILE, BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k, PARTS=launch.num_warps, STAGES=launch.num_stages, PDL=pdl,
        num_warps=launch.num_warps, launch_pdl=pdl,
    )  # fmt: skip
