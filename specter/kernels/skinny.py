"""Matrix-vector products of the draft: y = W x for one row, W streamed once.

    W [N, K] model dtype, x [K] model dtype; bytes = N * K * itemsize

A program owns `block_n` output channels and reads their rows in chunks of `block_k`, 16 bytes per thread and load.
It loads the first chunk before it waits for the previous kernel. Partial sums stay in registers until one final
reduction. The draft needs no row invariance.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter.kernels.device import Launch, Stream, inverse_rms, load_squares, pow2, silu, wait_previous
from specter.kernels.octets import Octets, store_octets
from specter.kernels.routing import RowRouting, Rule, route_if_last

VECTOR = 8  # channels summed by one thread before any exchange


@triton.jit
def load_chunk(w, rows, ks, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """w[rows, k: k + BLOCK_K]; zero beyond K."""
    pointers = w + rows[:, None] * K + (k + ks)[None, :]
    if k + BLOCK_K <= K:
        return tl.load(pointers)
    return tl.load(pointers, mask=(k + ks)[None, :] < K, other=0.0)


@triton.jit
def load_vector(x, ks, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    if k + BLOCK_K <= K:
        return tl.load(x + k + ks).to(tl.float32)
    return tl.load(x + k + ks, mask=k + ks < K, other=0.0).to(tl.float32)


@triton.jit
def fold(tile, x, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr):
    """Sums of VECTOR adjacent products: [BLOCK_N, BLOCK_K] -> [BLOCK_N, BLOCK_K / VECTOR]."""
    products = tile.to(tl.float32) * x[None, :]
    return tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_K // VECTOR, VECTOR)), axis=2)


@triton.jit
def load_channels(x, channels, N: tl.constexpr):
    """x [N] at `channels`, fp32, 0 beyond N; load before a product to hide the latency."""
    return tl.load(x + channels, mask=channels < N, other=0.0).to(tl.float32)


@triton.jit
def store_stream(value, gain, x, scaled, squares, channels, N: tl.constexpr):
    """Stores value in x [N] at `channels`, with the inputs of the next norm (see `Stream`); returns gain * value."""
    inside = channels < N
    tl.store(x + channels, value, mask=inside)
    tl.store(squares + tl.program_id(0), tl.sum(tl.where(inside, value * value, 0.0), axis=0))
    value *= gain
    tl.store(scaled + channels, value.to(scaled.dtype.element_ty), mask=inside)
    return value


@triton.jit
def partial_product(
    first, x, w, rows, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """W[rows] · x as fp32 [BLOCK_N, BLOCK_K / VECTOR], not yet reduced; `first` is the first chunk of W."""
    ks = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_K // VECTOR), tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        tile = first if k == 0 else load_chunk(w, rows, ks, k, K, BLOCK_K)
        acc += fold(tile, load_vector(x, ks, k, K, BLOCK_K), BLOCK_N, BLOCK_K, VECTOR)
    return acc


@triton.jit
def _linear(
    x, squares, w, bias, out, eps, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, NORMED: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    channels = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(channels, N - 1)
    first = load_chunk(w, rows, tl.arange(0, BLOCK_K), 0, K, BLOCK_K)
    if BIAS:
        biases = load_channels(bias, channels, N)
    wait_previous(PDL)
    parts = load_squares(squares, tl.arange(0, 1), BLOCKS, BLOCK_B)
    sums = tl.sum(partial_product(first, x, w, rows, K, BLOCK_N, BLOCK_K, VECTOR), axis=1)
    result = sums * inverse_rms(parts, K, eps, NORMED)
    if BIAS:
        result += biases
    tl.store(out + channels, result.to(out.dtype.element_ty), mask=channels < N)


def norm_linear(
    stream: Stream, w: Tensor, out: Tensor, eps: float, launch: Launch, pdl: bool, bias: Tensor | None = None
) -> None:
    """out [N] = W · norm(stream) + bias: one row of K channels, W [N, K], bias [N]."""
    num_out, num_in = w.shape
    num_blocks = stream.squares.shape[1]
    _linear[(triton.cdiv(num_out, launch.block_n),)](
        stream.scaled, stream.squares, w, w if bias is None else bias, out, eps, N=num_out, K=num_in,
        BIAS=bias is not None, NORMED=stream.is_normed, BLOCKS=num_blocks, BLOCK_B=pow2(num_blocks),
        BLOCK_N=launch.block_n, BLOCK_K=min(launch.block_k, pow2(num_in)), VECTOR=VECTOR, PDL=pdl,
        **launch.options(pdl),
    )  # fmt: skip


@triton.jit
def _residual(
    x, w, bias, stream, gain, scaled, squares, octets, scales, N: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr, OCTETS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    channels = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(channels, N - 1)
    first = load_chunk(w, rows, tl.arange(0, BLOCK_K), 0, K, BLOCK_K)
    gains = load_channels(gain, channels, N)
    if BIAS:
        biases = load_channels(bias, channels, N)
    wait_previous(PDL)
    before = load_channels(stream, channels, N)
    if BIAS:
        before += biases
    value = before + tl.sum(partial_product(first, x, w, rows, K, BLOCK_N, BLOCK_K, VECTOR), axis=1)
    value = store_stream(value, gains, stream, scaled, squares, channels, N)
    if OCTETS:
        store_octets(value, tl.program_id(0) * (BLOCK_N // 8), octets, scales, N // 8, N // 8, BLOCK_N)


def linear_residual(
    x: Tensor, w: Tensor, stream: Stream, gain: Tensor, octets: Octets | None, launch: Launch, pdl: bool,
    bias: Tensor | None = None,
) -> None:  # fmt: skip
    """stream += W · x + bias: x [K], W [D, K], bias [D]; gain [D] of the next norm.

    Args:
        octets: D channels, also receives gain * stream; `launch.block_n` is then a multiple of 8.
    """
    num_out, num_in = w.shape
    _residual[(triton.cdiv(num_out, launch.block_n),)](
        x, w, gain if bias is None else bias, stream.x, gain, stream.scaled, stream.squares,
        stream.x if octets is None else octets.values, stream.x if octets is None else octets.scales, N=num_out,
        K=num_in, BIAS=bias is not None, OCTETS=octets is not None, BLOCK_N=launch.block_n,
        BLOCK_K=min(launch.block_k, pow2(num_in)), VECTOR=VECTOR, PDL=pdl, **launch.options(pdl),
    )  # fmt: skip


@triton.jit
def _norm_gated(
    x, squares, w, inner, logits, scale, weights, history, counts, step, arrived, scaling, jitter, eps,
    F: tl.constexpr, R: tl.constexpr, E: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    STEP_STRIDE: tl.constexpr, NORMED_TOP: tl.constexpr, MIXER: tl.constexpr, BLOCK_E: tl.constexpr,
    NORMED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program order: the router's R channels in blocks of 2 BLOCK_N, then BLOCK_N gate and up channels each."""
    ks = tl.arange(0, BLOCK_K)
    num_router: tl.constexpr = (R + 2 * BLOCK_N - 1) // (2 * BLOCK_N)
    pid = tl.program_id(0)
    is_router = pid < num_router
    channels = tl.where(is_router, pid * 2, pid - num_router) * BLOCK_N + tl.arange(0, BLOCK_N)
    last = tl.where(is_router, R, F) - 1
    low = tl.minimum(channels, last) + tl.where(is_router, 0, R)
    high = tl.where(is_router, tl.minimum(channels + BLOCK_N, last), low + F)
    first_low = load_chunk(w, low, ks, 0, K, BLOCK_K)
    first_high = load_chunk(w, high, ks, 0, K, BLOCK_K)
    wait_previous(PDL)
    lone = tl.arange(0, 1)
    parts = load_squares(squares, lone, BLOCKS, BLOCK_B)
    acc_low = tl.zeros((BLOCK_N, BLOCK_K // VECTOR), tl.float32)
    acc_high = tl.zeros((BLOCK_N, BLOCK_K // VECTOR), tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        tile_low = first_low if k == 0 else load_chunk(w, low, ks, k, K, BLOCK_K)
        tile_high = first_high if k == 0 else load_chunk(w, high, ks, k, K, BLOCK_K)
        values = load_vector(x, ks, k, K, BLOCK_K)
        acc_low += fold(tile_low, values, BLOCK_N, BLOCK_K, VECTOR)
        acc_high += fold(tile_high, values, BLOCK_N, BLOCK_K, VECTOR)
    inverse = inverse_rms(parts, K, eps, NORMED)
    below, above = tl.sum(acc_low, axis=1) * inverse, tl.sum(acc_high, axis=1) * inverse
    if is_router:
        tl.store(logits + channels, below, mask=channels <= last)
        tl.store(logits + channels + BLOCK_N, above, mask=channels + BLOCK_N <= last)
        tl.store(scale + lone, inverse, mask=pid == 0)
        if E > 0:
            route_if_last(
                logits, weights, history, counts, step, arrived, scaling, jitter, num_router, E, TOP_K, STEP_STRIDE,
                NORMED_TOP, MIXER, BLOCK_E,
            )  # fmt: skip
    else:
        tl.store(inner + channels, (silu(below) * above).to(inner.dtype.element_ty), mask=channels <= last)


def norm_gated(
    stream: Stream, w: Tensor, inner: Tensor, routing: RowRouting | None, eps: float, launch: Launch, pdl: bool
) -> None:
    """inner [F] = silu(gate) * up of norm(stream), and the layer's routing with its scale.

    Args:
        w: [R + 2F, K]: router (absent in a dense layer, where `routing` is None) with the shared expert's gate if it
            has one, then gate, then up; F is 0 without a shared expert.
    """
    num_inner, num_in, num_blocks = inner.shape[0], w.shape[1], stream.squares.shape[1]
    num_router, num_experts, top_k, stride, rule = 0, 0, 0, 0, Rule()
    parts = (stream.x,) * 7  # placeholders, not accessed
    if routing is not None:
        num_router, top_k = routing.logits.shape[0], routing.weights.shape[0]
        num_experts = num_router - routing.is_gated
        stride, rule = routing.history.stride(0), routing.rule
        parts = (
            routing.logits, routing.scale, routing.weights, routing.history, routing.counts, routing.step,
            routing.arrived,
        )  # fmt: skip
    grid = triton.cdiv(num_router, 2 * launch.block_n) + triton.cdiv(num_inner, launch.block_n)
    _norm_gated[(grid,)](
        stream.scaled, stream.squares, w, inner, *parts, rule.scaling, rule.jitter, eps, F=num_inner, R=num_router,
        E=num_experts, K=num_in, TOP_K=top_k, STEP_STRIDE=stride, NORMED_TOP=rule.is_normed, MIXER=rule.is_mixer,
        BLOCK_E=pow2(num_experts), NORMED=stream.is_normed, BLOCKS=num_blocks, BLOCK_B=pow2(num_blocks),
        BLOCK_N=launch.block_n, BLOCK_K=min(launch.block_k, pow2(num_in)), VECTOR=VECTOR, PDL=pdl,
        **launch.options(pdl),
    )  # fmt: skip
