"""Routed INT4 experts of the draft, one row: all k experts of a layer in two launches.

    words  int32 [E, N, K / 8]: codes of an octet (eight adjacent input channels) in nibbles 0, 2, 4, 6, 1, 3, 5, 7
    scales int32 [E, N, K / group]: fp16 scale in the low half, fp16 zero point in the high half
    bytes per weight = 1/2 + 4/group

Converting each code to a float takes longer than reading it. The row is therefore given as `Octets`, and codes enter
integer dot products (dp2a): eight codes in seven instructions, without rounding. Sums start from the bits of
1.5 * 2^23, so their bits are already a float.

`down` prefetches its codes before `gate_up` completes: it starts once every program of `gate_up` has waited for the
router's kernel (`specter.kernels.routing`). Router weights are multiplied into the inner activations, so `down` is one
sum over k * F channels; it adds the shared expert and the residual in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter.codecs.int4 import Int4Matrices
from specter.codecs.residual.resident import ResidentCodes
from specter.errors import SpecterError
from specter.kernels.device import Launch, Stream, pow2, silu, wait_previous, wait_then_release
from specter.kernels.octets import OCTET, Octets, octet_sums, store_octets
from specter.kernels.routing import RowRouting
from specter.kernels.skinny import VECTOR, load_channels, load_chunk, partial_product, store_stream
from specter.models.spec import ModelSpec

_RUN = 32  # channels in 16 bytes of codes


def pack_matrices(matrices: Int4Matrices) -> tuple[Tensor, Tensor]:
    """(words, scales) of matrices [..., N, K], in the layout of the module's header.

    Raises SpecterError: K or the group is not a multiple of 32.
    """
    num_in = matrices.codes.shape[-1]
    if matrices.group % _RUN or num_in % _RUN:
        raise SpecterError(
            f"INT4 groups of {matrices.group} in rows of {num_in} do not fit the fused kernel",
            "quantise with a group size that is a multiple of 32",
        )
    packed = ResidentCodes.pack(matrices)
    return packed.words, packed.params


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """All INT4 experts on the device, packed at load time."""

    gate_up: Tensor  # words [layers, E, 2F, D / 8]
    gate_up_params: Tensor  # [layers, E, 2F, D / group]
    down: Tensor  # words [layers, E, D, F / 8]
    down_params: Tensor  # [layers, E, D, F / group]

    @classmethod
    def empty(cls, spec: ModelSpec, group: int, device: torch.device | str) -> PackedExperts:
        """Zeros for the experts of `spec`; `group` is limited to the length of the row."""

        def zeros(num_out: int, num_in: int) -> tuple[Tensor, Tensor]:
            lead = spec.num_moe_layers, spec.num_experts, num_out
            widths = num_in // OCTET, num_in // min(group, num_in)
            words, params = (torch.zeros(*lead, width, dtype=torch.int32, device=device) for width in widths)
            return words, params

        return cls(*zeros(2 * spec.expert_inter, spec.hidden), *zeros(spec.hidden, spec.expert_inter))

    def set_layer(self, layer: int, gate: Int4Matrices, up: Int4Matrices, down: Int4Matrices) -> None:
        """Packs one MoE layer: gate, up [E, F, D] and down [E, D, F], on any device."""
        inter = gate.codes.shape[-2]
        for part, rows in ((gate, slice(inter)), (up, slice(inter, None))):
            self.gate_up[layer, :, rows], self.gate_up_params[layer, :, rows] = pack_matrices(part)
        self.down[layer], self.down_params[layer] = pack_matrices(down)

    def layer(self, layer: int) -> list[ResidentCodes]:
        """gate_up [E, 2F, D] and down [E, D, F] of one MoE layer, as the residual codec reads them; views."""
        return [
            ResidentCodes(self.gate_up[layer], self.gate_up_params[layer]),
            ResidentCodes(self.down[layer], self.down_params[layer]),
        ]

    def layers(self) -> list[ResidentCodes]:
        """All layers as if they were one: row layer * E + expert; views."""
        return [
            ResidentCodes(self.gate_up.flatten(0, 1), self.gate_up_params.flatten(0, 1)),
            ResidentCodes(self.down.flatten(0, 1), self.down_params.flatten(0, 1)),
        ]


@triton.jit
def _load_octets(octets, scales, at, OCTETS: tl.constexpr):
    """Pairs a…d and scales of octets `at` [RUNS, 4]."""
    a, b = tl.load(octets + at), tl.load(octets + OCTETS + at)
    c, d = tl.load(octets + 2 * OCTETS + at), tl.load(octets + 3 * OCTETS + at)
    return a, b, c, d, tl.load(scales + at)


@triton.jit
def _product(a, b, IS_LONE: tl.constexpr):
    """a * b. If IS_LONE, prevents fusing with the cross-lane sum that follows, where a thread has one product.

    Fused, each lane would add the rounded products of others to its own unrounded one, and lanes would disagree.
    """
    return tl.fma(a, b, 0.0) if IS_LONE else a * b


@triton.jit
def _weighted_sums(words, packed_scales, a, b, c, d, x_scales, DP2A: tl.constexpr, IS_LONE: tl.constexpr = False):
    """Sum of weight * x over the 32 channels of each run, per run and row: [RUNS, BLOCK_N].

    Runs are the first axis because the compiler distributes a warp's lanes along it: adjacent lanes then read
    adjacent runs of one row, and activations need no exchange between threads.

    words: codes int32 [RUNS, BLOCK_N, 4]. packed_scales: int32 [RUNS, BLOCK_N]. The rest: [RUNS, 4].
    """
    ones = tl.full(a.shape, 0x11111111, tl.int32)
    plain = tl.sum(_product(octet_sums(ones, a, b, c, d, DP2A), x_scales, IS_LONE), axis=1)
    sums = octet_sums(words, a[:, None, :], b[:, None, :], c[:, None, :], d[:, None, :], DP2A)
    total = tl.sum(_product(sums, x_scales[:, None, :], IS_LONE), axis=2)
    scale = (packed_scales & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = (packed_scales >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return _product(scale, total - zero * plain[:, None], IS_LONE)


@triton.jit
def _load_codes(words, packed_scales, runs, inside):
    """Codes [RUNS, BLOCK_N, 4] at words [RUNS, BLOCK_N] and their scales; 0 outside `inside` [RUNS]."""
    lanes = tl.arange(0, 4)
    codes = tl.load(words[:, :, None] + lanes[None, None, :], mask=inside[:, None, None], other=0)
    return codes, tl.load(packed_scales, mask=inside[:, None], other=0)


@triton.jit
def _gate_up(
    x, x_scales, scale, words, packed_scales, inner, inner_scales, history, weights, step, F: tl.constexpr,
    D: tl.constexpr, TOP_K: tl.constexpr, G: tl.constexpr, STEP_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, DP2A: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = D // 32
    rank = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(channels, F - 1)
    lanes = tl.arange(0, 4)
    chosen = history + tl.load(step) * STEP_STRIDE + rank
    wait_then_release(PDL)
    expert = tl.load(chosen, cache_modifier=".cg").to(tl.int32)  # the L1 line can be stale, from an earlier layer
    gate = words + (expert * 2 * F + rows[None, :]) * (RUNS * 4)
    gate_scales = packed_scales + (expert * 2 * F + rows[None, :]) * G
    acc_gate = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for r in tl.static_range(0, RUNS, BLOCK_R):
        runs = r + tl.arange(0, BLOCK_R)
        inside = runs < RUNS  # runs beyond the end have scale 0
        runs = tl.minimum(runs, RUNS - 1)
        codes, scales = gate + runs[:, None] * 4, gate_scales + (runs * G // RUNS)[:, None]
        gate_codes, gate_scale = _load_codes(codes, scales, runs, inside)
        up_codes, up_scale = _load_codes(codes + F * RUNS * 4, scales + F * G, runs, inside)
        a, b, c, d, by = _load_octets(x, x_scales, runs[:, None] * 4 + lanes[None, :], D // 8)
        acc_gate += _weighted_sums(gate_codes, gate_scale, a, b, c, d, by, DP2A)
        acc_up += _weighted_sums(up_codes, up_scale, a, b, c, d, by, DP2A)
    inverse, weight = tl.load(scale), tl.load(weights + rank)
    value = silu(tl.sum(acc_gate, axis=0) * inverse) * tl.sum(acc_up, axis=0) * (inverse * weight)
    first = rank * (F // 8)
    octet = first + tl.program_id(0) * (BLOCK_N // 8)
    store_octets(value, octet, inner, inner_scales, first + F // 8, TOP_K * F // 8, BLOCK_N)


def gate_up(
    x: Octets, words: Tensor, packed_scales: Tensor, routing: RowRouting, inner: Octets, launch: Launch,
    pdl: bool,
) -> None:  # fmt: skip
    """Gate and up projections of the chosen experts; `launch.block_n` is a multiple of 8.

    Args:
        x: gain * x, D channels. words, packed_scales: of one layer, [E, 2F, …].
        inner: out, k * F channels, multiplied by the router's weights.
    """
    _, wide, num_words = words.shape
    inter, top_k, num_in = wide // 2, routing.weights.shape[0], num_words * OCTET
    _gate_up[(triton.cdiv(inter, launch.block_n), top_k)](
        x.values.view(torch.int32), x.scales, routing.scale, words, packed_scales, inner.values, inner.scales,
        routing.history, routing.weights, routing.step, F=inter, D=num_in, TOP_K=top_k, G=packed_scales.shape[-1],
        STEP_STRIDE=routing.history.stride(0), BLOCK_N=launch.block_n,
        BLOCK_R=min(launch.block_k, pow2(num_in)) // _RUN, DP2A=words.is_cuda, PDL=pdl,
        **launch.options(pdl),
    )  # fmt: skip


@triton.jit
def _load_down(
    words, packed_scales, chosen, begin, rows, N: tl.constexpr, RUNS: tl.constexpr, ALL_RUNS: tl.constexpr,
    G: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Codes and scales of BLOCK_R runs from `begin` on, the rows of the chosen experts concatenated."""
    runs = begin + tl.arange(0, BLOCK_R)
    inside = runs < ALL_RUNS
    runs = tl.minimum(runs, ALL_RUNS - 1)
    expert = tl.load(chosen + runs // RUNS, cache_modifier=".cg").to(tl.int32)
    codes = words + (expert * (N * RUNS * 4) + runs % RUNS * 4)[:, None] + rows[None, :] * (RUNS * 4)
    scales = packed_scales + (expert * (N * G) + runs % RUNS * G // RUNS)[:, None] + rows[None, :] * G
    return _load_codes(codes, scales, runs, inside)


@triton.jit
def _down_sums(
    codes, scales, inner, inner_scales, begin, ALL_RUNS: tl.constexpr, BLOCK_R: tl.constexpr, DP2A: tl.constexpr,
    IS_LONE: tl.constexpr,
):  # fmt: skip
    runs = tl.minimum(begin + tl.arange(0, BLOCK_R), ALL_RUNS - 1)
    at = runs[:, None] * 4 + tl.arange(0, 4)[None, :]
    a, b, c, d, by = _load_octets(inner, inner_scales, at, ALL_RUNS * 4)
    return _weighted_sums(codes, scales, a, b, c, d, by, DP2A, IS_LONE)


@triton.jit
def _down(
    shared, shared_w, gate, inner, inner_scales, words, packed_scales, history, step, x, gain, scaled, squares,
    N: tl.constexpr, S: tl.constexpr, GATED: tl.constexpr, F: tl.constexpr, TOP_K: tl.constexpr, G: tl.constexpr,
    STEP_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    VECTOR: tl.constexpr, DP2A: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = F // 32  # per expert
    ALL_RUNS: tl.constexpr = TOP_K * RUNS
    channels = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(channels, N - 1)
    chosen = history + tl.load(step) * STEP_STRIDE
    codes, scales = _load_down(words, packed_scales, chosen, 0, rows, N, RUNS, ALL_RUNS, G, MAIN)
    if REST > 0:
        rest_codes, rest_scales = _load_down(words, packed_scales, chosen, MAIN, rows, N, RUNS, ALL_RUNS, G, REST)
    if S > 0:
        first = load_chunk(shared_w, rows, tl.arange(0, BLOCK_K), 0, S, BLOCK_K)
    gains = load_channels(gain, channels, N)
    wait_previous(PDL)
    value = load_channels(x, channels, N)
    # Cross-thread sums come last: the compiler moves no load above their barriers.
    main_sums = _down_sums(codes, scales, inner, inner_scales, 0, ALL_RUNS, MAIN, DP2A, False)
    if REST > 0:
        rest_sums = _down_sums(rest_codes, rest_scales, inner, inner_scales, MAIN, ALL_RUNS, REST, DP2A, True)
    if S > 0:
        shared_sums = partial_product(first, shared, shared_w, rows, S, BLOCK_N, BLOCK_K, VECTOR)
    value += tl.sum(main_sums, axis=0)
    if REST > 0:
        value += tl.sum(rest_sums, axis=0)
    if S > 0:
        whole = tl.sum(shared_sums, axis=1)
        if GATED:
            whole *= tl.sigmoid(tl.load(gate))
        value += whole
    store_stream(value, gains, x, scaled, squares, channels, N)


def down(
    shared: Tensor, shared_w: Tensor, inner: Octets, words: Tensor, packed_scales: Tensor, routing: RowRouting,
    stream: Stream, gain: Tensor, launch: Launch, pdl: bool,
) -> None:  # fmt: skip
    """stream += W_shared · shared + down projections of `inner` by the chosen experts; runs after `gate_up`.

    Args:
        shared: [S], shared_w: [D, S]; S is 0 without a shared expert. Its gate, if any, is the routing's last logit.
        words, packed_scales: of one layer, [E, D, …]. gain: [D], of the next norm.
    """
    _, hidden, num_words = words.shape
    top_k, num_in, num_shared = routing.weights.shape[0], num_words * OCTET, shared_w.shape[-1]
    num_runs = top_k * num_in // _RUN
    main = pow2(num_runs + 1) // 2  # largest power of two in the runs; the rest follows
    _down[(triton.cdiv(hidden, launch.block_n),)](
        shared, shared_w, routing.logits[-1:], inner.values.view(torch.int32), inner.scales, words, packed_scales,
        routing.history, routing.step, stream.x, gain, stream.scaled, stream.squares, N=hidden, S=num_shared,
        GATED=routing.is_gated, F=num_in, TOP_K=top_k,
        G=packed_scales.shape[-1], STEP_STRIDE=routing.history.stride(0), BLOCK_N=launch.block_n,
        BLOCK_K=min(launch.block_k, pow2(num_shared)) if num_shared else VECTOR, MAIN=main,
        REST=pow2(num_runs - main) if num_runs > main else 0, VECTOR=VECTOR, DP2A=words.is_cuda, PDL=pdl,
        **launch.options(pdl),
    )  # fmt: skip
