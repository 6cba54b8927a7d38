"""The draft's routed experts on one row: INT4 codes, all chosen experts of a layer in two launches.

    words  int32 [E, N, K / 8]: code c of input channel 32 v + 4 j + i is slot j of word 4 v + i
    scales int32 [E, N, K / group]: fp16 scale in the low half, zero point above it
    bytes per weight = 1/2 + 4/group

Sixteen bytes of one row are 32 neighbouring channels of one group. Slot j lies at bits 4 j + 3 … (mod 32), so
that by at most one rotation its four bits fall to bit 11, 15 or 19: under the exponent of 4096, 256 or 16 they
*are* the float 4096 + c, 256 + c or 16 + c, one logical operation per code and no conversion. Per thread and
group, sum s (c - z) x = s (sum f x - sum (f - c) x - z sum x), where the last two sums do not depend on the row.

`gate_up` routes too: every program recomputes the top-k of E logits, which is cheaper than one more launch.
Router weights are multiplied into the inner activations, so that `down` is one sum over k * F channels; it
takes the shared expert and the residual along, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter.errors import SpecterError
from specter.kernels.device import Launch, Stream, pow2, ranked_keys, silu, wait_previous
from specter.kernels.skinny import VECTOR, add_to_stream, code_place, fold, load_chunk, load_vector
from specter.model.spec import ModelSpec
from specter.quantize.int4 import Int4Matrices

_WORD = 8  # codes
_RUN = 32  # channels in 16 bytes of codes
_SIXTEEN = 0x41800000  # the bits of 16.0


def code_order(num_channels: int, device: torch.device | str = "cpu") -> Tensor:
    """Where channel i lies in an activation that meets INT4 codes: int64 [num_channels]."""
    at = torch.arange(num_channels, device=device)
    return (at % _RUN // 4) * (num_channels // _WORD) + at // _RUN * 4 + at % 4


def pack_matrices(matrices: Int4Matrices) -> tuple[Tensor, Tensor]:
    """(words, params) of a batch of matrices [..., N, K]; see the module.

    Raises:
        SpecterError: K or the group is not a multiple of 32.
    """
    num_in = matrices.codes.shape[-1]
    if matrices.group % _RUN or num_in % _RUN:
        raise SpecterError(
            f"INT4 groups of {matrices.group} in rows of {num_in} do not fit the fused kernel",
            "quantise with a group size that is a multiple of 32",
        )
    runs = matrices.codes.unflatten(-1, (num_in // _RUN, _WORD, 4))  # [..., v, j, i]
    shifts = torch.arange(_WORD, device=runs.device) * 4
    words = (runs.long() << shifts[:, None]).sum(-2)  # [..., v, i]
    rotated = (words << 3 | words >> 29) & 0xFFFFFFFF
    params = matrices.scales.view(torch.int16).int() & 0xFFFF | matrices.zeros.int() << 16
    return torch.where(rotated >= 2**31, rotated - 2**32, rotated).int().flatten(-2), params


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """All INT4 experts on the device, packed once at load; a layer's part is a view."""

    gate_up: Tensor  # words [layers, E, 2F, D / 8]
    gate_up_params: Tensor  # [layers, E, 2F, D / group]
    down: Tensor  # words [layers, E, D, F / 8]
    down_params: Tensor  # [layers, E, D, F / group]

    @classmethod
    def empty(cls, spec: ModelSpec, group: int, device: torch.device | str) -> PackedExperts:
        """Room for the experts of `spec`; `group` is cut to the row where the row is shorter."""
        layers, experts, wide, hidden = spec.num_moe_layers, spec.num_experts, 2 * spec.expert_inter, spec.hidden

        def room(num_out: int, num_in: int, per: int) -> Tensor:
            return torch.zeros(layers, experts, num_out, num_in // per, dtype=torch.int32, device=device)

        return cls(
            room(wide, hidden, _WORD),
            room(wide, hidden, min(group, hidden)),
            room(hidden, spec.expert_inter, _WORD),
            room(hidden, spec.expert_inter, min(group, spec.expert_inter)),
        )

    def set_layer(self, layer: int, gate: Int4Matrices, up: Int4Matrices, down: Int4Matrices) -> None:
        """Packs one MoE layer: gate, up [E, F, D] and down [E, D, F], on any device."""
        for part, begin in ((gate, 0), (up, gate.codes.shape[-2])):
            words, params = pack_matrices(part)
            self.gate_up[layer, :, begin : begin + words.shape[-2]] = words
            self.gate_up_params[layer, :, begin : begin + words.shape[-2]] = params
        words, params = pack_matrices(down)
        self.down[layer] = words
        self.down_params[layer] = params

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.gate_up, self.gate_up_params, self.down, self.down_params))


@triton.jit
def _choose(logits, rank, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Expert of rank `rank` by softmax weight (ties: the lower index), and its weight."""
    experts = tl.arange(0, BLOCK_E)
    scores = tl.load(logits + experts, mask=experts < E, other=float("-inf"))
    probs = tl.exp(scores - tl.max(scores, axis=0))
    keys = ranked_keys(probs, experts, BLOCK_E)
    best = tl.max(keys, axis=0)
    for _ in range(rank):
        best = tl.max(tl.where(keys < best, keys, -1), axis=0)
    weight = (best // BLOCK_E).to(tl.int32).to(tl.float32, bitcast=True) / tl.sum(probs, axis=0)
    return (BLOCK_E - 1 - best % BLOCK_E).to(tl.int32), weight


@triton.jit
def _slot(words, sixteen, j: tl.constexpr):
    """Float of slot j (0…7): its code plus 4096, 256 or 16.

    sixteen: the bits of 16.0, at run time: a constant beside the constant mask would cost a second operation.
    """
    turned = words
    if j < 2:
        turned = (words << 12) | (words >> 20)
    if j >= 5:
        turned = (words >> 12) | (words << 20)
    place: tl.constexpr = (j + 1) % 3  # bits 11, 15, 19
    mask: tl.constexpr = 15 << (11 + 4 * place)
    exponent = sixteen + ((8 - 4 * place) << 23)
    return ((turned & mask) | exponent).to(tl.float32, bitcast=True)


@triton.jit
def _scaled_sums(words, packed_scales, x, plane, sixteen):
    """Per run and row, sum of weight * x over the run's 32 channels: [RUNS, BLOCK_N].

    Runs come first because the compiler deals the lanes of a warp out from there: neighbouring lanes then read
    neighbouring runs of one row, and activations need no exchange between threads.

    words: codes int32 [RUNS, BLOCK_N, 4]. packed_scales: int32 [RUNS, BLOCK_N].
    x: pointers [RUNS, 4] to slot 0 of an activation in code order; `plane`: distance to the next slot.
    """
    words = words.to(tl.uint32, bitcast=True)
    total = tl.zeros(words.shape, tl.float32)
    plain = tl.zeros(x.shape, tl.float32)
    biased = tl.zeros(x.shape, tl.float32)
    for j in tl.static_range(8):
        values = tl.load(x + j * plane).to(tl.float32)
        total += _slot(words, sixteen, j) * values[:, None, :]
        plain += values
        biased += values * (4096 >> (4 * ((j + 1) % 3)))
    scale = (packed_scales & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = (packed_scales >> 16).to(tl.float32)
    offset = tl.sum(biased, axis=1)[:, None] + zero * tl.sum(plain, axis=1)[:, None]
    return scale * (tl.sum(total, axis=2) - offset)


@triton.jit(do_not_specialize=["sixteen"])
def _gate_up(
    logits, scale, x, words, packed_scales, inner, chosen, history, counts, step, scaling, sixteen,
    F: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, G: tl.constexpr, STEP_STRIDE: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = D // 32
    rank = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(channels, F - 1)
    lanes = tl.arange(0, 4)
    wait_previous(PDL)
    expert, weight = _choose(logits, rank, E, BLOCK_E)
    if tl.program_id(0) == 0:
        tl.store(chosen + rank, expert)
        tl.store(history + tl.load(step) * STEP_STRIDE + rank, expert.to(history.dtype.element_ty))
        tl.store(counts + expert, tl.load(counts + expert) + 1)  # ranks hold different experts
    gate = words + (expert * 2 * F + rows[None, :]) * (RUNS * 4)
    gate_scales = packed_scales + (expert * 2 * F + rows[None, :]) * G
    acc_gate = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    acc_up = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for r in tl.static_range(0, RUNS, BLOCK_R):
        runs = r + tl.arange(0, BLOCK_R)
        inside = (runs < RUNS)[:, None]  # a run beyond the end is read from the last one, with scale 0
        runs = tl.minimum(runs, RUNS - 1)
        codes = (gate + runs[:, None] * 4)[:, :, None] + lanes[None, None, :]
        scales = gate_scales + (runs * G // RUNS)[:, None]
        at = x + runs[:, None] * 4 + lanes[None, :]
        gate_codes, up_codes = tl.load(codes), tl.load(codes + F * RUNS * 4)
        acc_gate += _scaled_sums(gate_codes, tl.load(scales, mask=inside, other=0), at, D // 8, sixteen)
        acc_up += _scaled_sums(up_codes, tl.load(scales + F * G, mask=inside, other=0), at, D // 8, sixteen)
    inverse = tl.load(scale)
    value = silu(tl.sum(acc_gate, axis=0) * inverse) * tl.sum(acc_up, axis=0) * (inverse * weight * scaling)
    order = code_place(channels, TOP_K * F) + rank * (F // 8)
    tl.store(inner + order, value.to(inner.dtype.element_ty), mask=channels < F)


def gate_up(
    logits: Tensor, scale: Tensor, x: Tensor, words: Tensor, packed_scales: Tensor, inner: Tensor, chosen: Tensor,
    history: Tensor, counts: Tensor, step: Tensor, scaling: float, launch: Launch, pdl: bool,
) -> None:  # fmt: skip
    """Routes, and runs gate and up of the chosen experts; `launch.block_k` counts channels.

    Args:
        logits: fp32 [E]. scale: fp32 [1], multiplies x. x: [D] in code order.
        words, packed_scales: of one layer, [E, 2F, …].
        inner: [k * F] out, times the router's weights and `scaling`, in code order over k * F / 8 words per slot.
        chosen: int32 [k] out. history: [steps, k], gets them at row `step` (int32 [1]). counts: int32 [E], + 1 each.
    """
    num_experts, wide, num_words = words.shape
    inter, top_k, num_in = wide // 2, chosen.shape[-1], num_words * _WORD
    _gate_up[(triton.cdiv(inter, launch.block_n), top_k)](
        logits, scale, x, words, packed_scales, inner, chosen, history, counts, step, scaling, _SIXTEEN, F=inter,
        D=num_in, E=num_experts, TOP_K=top_k, G=packed_scales.shape[-1], STEP_STRIDE=history.stride(0), BLOCK_E=pow2(num_experts),
        BLOCK_N=launch.block_n, BLOCK_R=min(launch.block_k, pow2(num_in)) // _RUN, PDL=pdl,
        num_warps=launch.num_warps, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["sixteen"])
def _down(
    shared, shared_w, inner, words, packed_scales, chosen, x, gain, scaled, squares, sixteen, N: tl.constexpr,
    S: tl.constexpr, F: tl.constexpr, TOP_K: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    RUNS: tl.constexpr = F // 32  # per expert
    ALL_RUNS: tl.constexpr = TOP_K * RUNS
    channels = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(channels, N - 1)
    ks = tl.arange(0, BLOCK_K)
    lanes = tl.arange(0, 4)
    if S > 0:
        first = load_chunk(shared_w, rows, ks, 0, S, BLOCK_K)
    wait_previous(PDL)
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for r in tl.static_range(0, ALL_RUNS, BLOCK_R):
        runs = r + tl.arange(0, BLOCK_R)
        inside = (runs < ALL_RUNS)[:, None]
        runs = tl.minimum(runs, ALL_RUNS - 1)
        expert = tl.load(chosen + runs // RUNS)
        codes = words + (expert * (N * RUNS * 4) + runs % RUNS * 4)[:, None] + rows[None, :] * (RUNS * 4)
        scales = packed_scales + (expert * (N * G) + runs % RUNS * G // RUNS)[:, None] + rows[None, :] * G
        at = inner + runs[:, None] * 4 + lanes[None, :]
        tile = tl.load(codes[:, :, None] + lanes[None, None, :])
        acc += _scaled_sums(tile, tl.load(scales, mask=inside, other=0), at, ALL_RUNS * 4, sixteen)
    result = tl.sum(acc, axis=0)
    if S > 0:
        dense = tl.zeros((BLOCK_N, BLOCK_K // VECTOR), tl.float32)
        for k in tl.static_range(0, S, BLOCK_K):
            tile = first if k == 0 else load_chunk(shared_w, rows, ks, k, S, BLOCK_K)
            dense += fold(tile, load_vector(shared, ks, k, S, BLOCK_K), BLOCK_N, BLOCK_K, VECTOR)
        result += tl.sum(dense, axis=1)
    add_to_stream(result, x, gain, scaled, scaled, squares, channels, N, False)


def down(
    shared: Tensor, shared_w: Tensor, inner: Tensor, words: Tensor, packed_scales: Tensor, chosen: Tensor,
    stream: Stream, gain: Tensor, launch: Launch, block_codes: int, pdl: bool,
) -> None:  # fmt: skip
    """stream += W_shared · shared + the chosen experts' down projections of `inner` (see `gate_up`).

    Args:
        shared: [S], shared_w: [D, S]; S is 0 to run the routed experts alone.
        words, packed_scales: of one layer, [E, D, …]. gain: [D], of the next norm.
        block_codes: channels of codes per step.
    """
    _, hidden, num_words = words.shape
    top_k, num_in, num_shared = chosen.shape[-1], num_words * _WORD, shared_w.shape[-1]
    _down[(triton.cdiv(hidden, launch.block_n),)](
        shared, shared_w, inner, words, packed_scales, chosen, stream.x, gain, stream.scaled, stream.squares, _SIXTEEN,
        N=hidden, S=num_shared, F=num_in, TOP_K=top_k, G=packed_scales.shape[-1], BLOCK_N=launch.block_n,
        BLOCK_K=min(launch.block_k, pow2(num_shared)) if num_shared else VECTOR,
        BLOCK_R=min(block_codes, pow2(top_k * num_in)) // _RUN, VECTOR=VECTOR, PDL=pdl,
        num_warps=launch.num_warps, launch_pdl=pdl,
    )  # fmt: skip
