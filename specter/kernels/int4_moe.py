"""The draft's routed experts on one row: INT4 codes, all chosen experts of a layer in two launches.

    words  int32 [E, N, K / 8]: code c of input channel 32 v + 4 j + i is slot j of word 4 v + i
    params int32 [E, N, K / group]: fp16 scale in the low half, zero point above it
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
from specter.kernels.device import Launch, pow2, silu, wait_previous
from specter.kernels.skinny import _VECTOR, _fold, _load_chunk, _load_vector
from specter.model.spec import ModelSpec
from specter.quantize.int4 import Int4Matrices

_WORD = 8  # codes
_RUN = 32  # channels in 16 bytes of codes


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
def choose(logits, rank, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Expert of rank `rank` by softmax weight (ties: the lower index), and its weight."""
    experts = tl.arange(0, BLOCK_E)
    scores = tl.load(logits + experts, mask=experts < E, other=float("-inf"))
    probs = tl.exp(scores - tl.max(scores, axis=0))
    probs = probs / tl.sum(probs, axis=0)
    for _ in range(rank):
        probs = tl.where(experts == tl.argmax(probs, axis=0), -1.0, probs)
    return tl.argmax(probs, axis=0), tl.max(probs, axis=0)


@triton.jit
def _slot(words, j: tl.constexpr):
    """Float of slot j (0…7): its code plus `_bias(j)`."""
    turned = words
    if j < 2:
        turned = (words << 12) | (words >> 20)
    if j >= 5:
        turned = (words >> 12) | (words << 20)
    place: tl.constexpr = (j + 1) % 3  # bits 11, 15, 19
    mask: tl.constexpr = 15 << (11 + 4 * place)
    exponent: tl.constexpr = (127 + 12 - 4 * place) << 23
    return ((turned & mask) | exponent).to(tl.float32, bitcast=True)


@triton.jit
def _code_sums(words, x, plane, KW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sums over 32 channels for codes [BLOCK_N, KW]: f x [BLOCK_N, KW / 4]; (f - c) x and x [KW / 4].

    x: pointers [KW] to slot 0 of an activation in code order; `plane`: distance to the next slot.
    """
    words = words.to(tl.uint32, bitcast=True)
    total = tl.zeros(words.shape, tl.float32)
    plain = tl.zeros((KW,), tl.float32)
    biased = tl.zeros((KW,), tl.float32)
    for j in tl.static_range(8):
        values = tl.load(x + j * plane).to(tl.float32)
        total += _slot(words, j) * values[None, :]
        plain += values
        biased += values * (4096 >> (4 * ((j + 1) % 3)))
    total = tl.sum(tl.reshape(total, (BLOCK_N, KW // 4, 4)), axis=2)
    biased = tl.sum(tl.reshape(biased, (KW // 4, 4)), axis=1)
    plain = tl.sum(tl.reshape(plain, (KW // 4, 4)), axis=1)
    return total, biased, plain


@triton.jit
def _scaled(packed_scales, total, biased, plain):
    scale = (packed_scales & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = (packed_scales >> 16).to(tl.float32)
    return scale * (total - biased[None, :] - zero * plain[None, :])


@triton.jit
def _gate_up(
    logits, x, words, packed_scales, inner, chosen, weights, counts, step, scaling, F: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, TOP_K: tl.constexpr, G: tl.constexpr, STEP_STRIDE: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    KW: tl.constexpr = D // 8
    rank = tl.program_id(1)
    channels = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(channels, F - 1)
    wait_previous(PDL)
    expert, weight = choose(logits, rank, E, BLOCK_E)
    if tl.program_id(0) == 0:
        tl.store(chosen + tl.load(step) * STEP_STRIDE + rank, expert.to(chosen.dtype.element_ty))
        tl.store(weights + rank, weight)
        tl.store(counts + expert, tl.load(counts + expert) + 1)  # ranks hold different experts
    gate = words + (expert * 2 * F + rows[:, None]) * KW
    gate_params = packed_scales + (expert * 2 * F + rows[:, None]) * G
    acc_gate = tl.zeros((BLOCK_N, BLOCK_W // 4), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_W // 4), tl.float32)
    for w in tl.static_range(0, KW, BLOCK_W):
        at = w + tl.arange(0, BLOCK_W)
        runs = w // 4 + tl.arange(0, BLOCK_W // 4)
        if w + BLOCK_W > KW:  # what lies beyond is cut off by its scale
            at = tl.minimum(at, KW - 4 + at % 4)
        groups = tl.minimum(runs * G // (KW // 4), G - 1)
        inside = (runs < KW // 4)[None, :]
        gate_total, biased, plain = _code_sums(tl.load(gate + at[None, :]), x + at, KW, BLOCK_W, BLOCK_N)
        up_total, _, _ = _code_sums(tl.load(gate + F * KW + at[None, :]), x + at, KW, BLOCK_W, BLOCK_N)
        acc_gate += _scaled(tl.load(gate_params + groups[None, :], mask=inside, other=0), gate_total, biased, plain)
        acc_up += _scaled(tl.load(gate_params + F * G + groups[None, :], mask=inside, other=0), up_total, biased, plain)
    value = silu(tl.sum(acc_gate, axis=1)) * tl.sum(acc_up, axis=1) * (weight * scaling)
    order = (channels % 32 // 4) * (TOP_K * F // 8) + rank * (F // 8) + channels // 32 * 4 + channels % 4
    tl.store(inner + order, value.to(inner.dtype.element_ty), mask=channels < F)


def gate_up(
    logits: Tensor, x: Tensor, words: Tensor, packed_scales: Tensor, inner: Tensor, chosen: Tensor, weights: Tensor,
    counts: Tensor, step: Tensor, scaling: float, launch: Launch, pdl: bool,
) -> None:  # fmt: skip
    """Routes, and runs gate and up of the chosen experts.

    Args:
        logits: fp32 [E]. x: [D] in code order. words, packed_scales: of one layer, [E, 2F, …].
        inner: [k * F] out, weighted, in code order over k * F / 8 words per slot.
        chosen: [steps, k] out (any strides by step), row `step`. weights: fp32 [k] out. counts: int32 [E], + 1 each.
    """
    num_experts, wide, num_words = words.shape
    inter, top_k = wide // 2, chosen.shape[-1]
    _gate_up[(triton.cdiv(inter, launch.block_n), top_k)](
        logits, x, words, packed_scales, inner, chosen, weights, counts, step, scaling, F=inter, D=num_words * _WORD,
        E=num_experts, TOP_K=top_k, G=packed_scales.shape[-1], STEP_STRIDE=chosen.stride(0), BLOCK_E=pow2(num_experts),
        BLOCK_N=launch.block_n, BLOCK_W=min(launch.block_k, pow2(num_words)), PDL=pdl,
        num_warps=launch.num_warps, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _down(
    shared, shared_w, inner, words, packed_scales, chosen, step, out, N: tl.constexpr, S: tl.constexpr, F: tl.constexpr,
    TOP_K: tl.constexpr, G: tl.constexpr, STEP_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    KW: tl.constexpr = F // 8
    TOTAL: tl.constexpr = TOP_K * KW
    channels = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(channels, N - 1)
    result = tl.zeros((BLOCK_N,), tl.float32)
    ks = tl.arange(0, BLOCK_K)
    if S > 0:
        first = _load_chunk(shared_w, rows, ks, 0, S, BLOCK_K)
    wait_previous(PDL)
    chosen += tl.load(step) * STEP_STRIDE
    acc = tl.zeros((BLOCK_N, BLOCK_W // 4), tl.float32)
    for w in tl.static_range(0, TOTAL, BLOCK_W):
        at = w + tl.arange(0, BLOCK_W)
        if w + BLOCK_W > TOTAL:
            at = tl.minimum(at, TOTAL - 4 + at % 4)
        runs = w // 4 + tl.arange(0, BLOCK_W // 4)
        safe_runs = tl.minimum(runs, TOTAL // 4 - 1)
        expert = tl.load(chosen + at // KW).to(tl.int32)
        offset = expert[None, :] * (N * KW) + rows[:, None] * KW + (at % KW)[None, :]
        offset = tl.max_contiguous(tl.multiple_of(offset, (1, 4)), (1, 4))
        run_expert = tl.load(chosen + safe_runs // (KW // 4)).to(tl.int32)
        group = safe_runs % (KW // 4) * G // (KW // 4)
        param_offset = run_expert[None, :] * (N * G) + rows[:, None] * G + group[None, :]
        total, biased, plain = _code_sums(tl.load(words + offset), inner + at, TOTAL, BLOCK_W, BLOCK_N)
        inside = (runs < TOTAL // 4)[None, :]
        acc += _scaled(tl.load(packed_scales + param_offset, mask=inside, other=0), total, biased, plain)
    result += tl.sum(acc, axis=1)
    if S > 0:
        dense = tl.zeros((BLOCK_N, BLOCK_K // VECTOR), tl.float32)
        for k in tl.static_range(0, S, BLOCK_K):
            tile = first if k == 0 else _load_chunk(shared_w, rows, ks, k, S, BLOCK_K)
            dense += _fold(tile, _load_vector(shared, ks, k, S, BLOCK_K), BLOCK_N, BLOCK_K, VECTOR)
        result += tl.sum(dense, axis=1)
    tl.store(out + channels, tl.load(out + rows) + result, mask=channels < N)


def down(
    shared: Tensor, shared_w: Tensor, inner: Tensor, words: Tensor, packed_scales: Tensor, chosen: Tensor, step: Tensor,
    out: Tensor, launch: Launch, block_words: int, pdl: bool,
) -> None:  # fmt: skip
    """out fp32 [D] += W_shared · shared + the chosen experts' down projections of `inner` (see `gate_up`).

    Args:
        shared: [S], shared_w: [D, S]; S is 0 to run the routed experts alone.
        words, packed_scales: of one layer, [E, D, …].
    """
    _, hidden, num_words = words.shape
    top_k = chosen.shape[-1]
    num_shared = shared_w.shape[-1]
    _down[(triton.cdiv(hidden, launch.block_n),)](
        shared, shared_w, inner, words, packed_scales, chosen, step, out, N=hidden, S=num_shared, F=num_words * _WORD,
        TOP_K=top_k, G=packed_scales.shape[-1], STEP_STRIDE=chosen.stride(0), BLOCK_N=launch.block_n,
        BLOCK_K=min(launch.block_k, pow2(num_shared)) if num_shared else _VECTOR,
        BLOCK_W=min(block_words, pow2(top_k * num_words)), VECTOR=_VECTOR, PDL=pdl,
        num_warps=launch.num_warps, launch_pdl=pdl,
    )  # fmt: skip
