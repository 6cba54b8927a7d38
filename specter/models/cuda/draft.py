"""The draft step: one row, INT4 routed experts, eight kernels a layer (ten with LayerNorm).

Token, position and step number are on the device: a step embeds the token that the step before it chose, so K steps
run in a row without the host.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.codecs.int4 import Int4Matrices
from specter.kernels import int4_moe, select, skinny
from specter.kernels.device import Launch, Stream
from specter.kernels.octets import Octets
from specter.kernels.routing import RowRouting, Rule
from specter.models.cuda.attention import build_attention
from specter.models.cuda.loaded_model import Int4Layer
from specter.models.cuda.weights import GpuKVCache, GpuWeights


@dataclass(frozen=True, slots=True)
class DraftTuning:
    """Launches of one row, found by measurement on an NVIDIA H200 (docs/LOG.md); correct on any GPU."""

    qkv: Launch = Launch(4, 1024, num_warps=2)
    out: Launch = Launch(8, 1024, num_warps=8)
    wide: Launch = Launch(2, 2048, num_warps=2)
    dense_down: Launch = Launch(4, 1024)
    gate_up: Launch = Launch(8, 2048, num_warps=2)
    down: Launch = Launch(2, 1024, num_warps=2)
    head: Launch = Launch(2, 1024, num_warps=2)


DRAFT = DraftTuning()


class Draft:
    """The draft over a KV cache.

    Args:
        max_steps: most steps between two calls of `begin`.
        sampling: how tokens are selected; greedily by default.
        pdl: programmatic dependent launch.
    Attributes, all on the device:
        tokens: int32 [max_steps], routing: int16 [max_steps, MoE layers, k], counts: int32 [MoE layers, E]: of the
            steps since `begin`.
        logits: fp32 [1, V] of the last step.
    """

    def __init__(
        self,
        weights: GpuWeights,
        experts: int4_moe.PackedExperts,
        cache: GpuKVCache,
        max_steps: int,
        *,
        sampling: select.SamplingParams | None = None,
        pdl: bool = True,
        tuning: DraftTuning = DRAFT,
    ) -> None:
        spec, device, dtype = weights.spec, weights.device, weights.dtype
        self.weights, self.experts, self.cache, self.pdl, self.tuning = weights, experts, cache, pdl, tuning
        self._attention = build_attention(weights, cache, 1, pdl)

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.feed, self.position, self.step_index = (zeros(1, dtype=torch.int32) for _ in range(3))
        self.tokens = zeros(max_steps, dtype=torch.int32)
        self.routing = zeros(max_steps, spec.num_moe_layers, spec.top_k, dtype=torch.int16)
        self.counts = zeros(spec.num_moe_layers, spec.num_experts, dtype=torch.int32)
        self.logits = zeros(1, spec.vocab, dtype=torch.float32)
        self.x = zeros(1, spec.hidden, dtype=torch.float32)
        self._scaled = zeros(1, spec.hidden)
        self._octets = Octets.empty(spec.hidden, device)

        def stream(block: int) -> Stream:
            squares = zeros(1, -(-spec.hidden // block), dtype=torch.float32)
            return Stream(self.x, self._scaled, squares, spec.layer_norm)

        self._embedded = stream(select.BLOCK_D)
        self._attended = stream(tuning.out.block_n)
        self._dense_done = stream(tuning.dense_down.block_n)
        self._moe_done = stream(tuning.down.block_n)
        self._qkv = zeros(1, weights.layers[0].qkv.shape[0])
        self._values = zeros(1, spec.num_heads * spec.v_dim)
        scratch = RowRouting.empty(self.routing[:, 0], self.counts[0], self.step_index, Rule.of(spec), spec.shared_gate)
        self._routings = [
            dataclasses.replace(scratch, history=self.routing[:, moe], counts=self.counts[moe])
            for moe in range(spec.num_moe_layers)
        ]
        self._dense = zeros(spec.dense_inter)
        self._shared = zeros(spec.shared_inter)
        self._inner = Octets.empty(spec.top_k * spec.expert_inter, device)
        self._select = select.Selection.empty(1, weights.num_tokens, sampling or select.SamplingParams.greedy(device))

    def begin(self, token: int, position: int) -> None:
        """Starts a draft: the next step appends KV of `token` at `position`. Clears steps and counts. Asynchronous."""
        self.feed.fill_(token)
        self.position.fill_(position)
        self.step_index.zero_()
        self.counts.zero_()

    def step(self) -> None:
        """Launches the kernels of one step."""
        weights, spec, tuning, pdl = self.weights, self.weights.spec, self.tuning, self.pdl
        stream = self._embedded
        # Without early launch: later kernels then find all work before this step complete.
        select.embed(self.feed, weights.embedding, stream, weights.layers[0].norm.gain, pdl=False)
        weights.layers[0].norm.finish(stream, spec.norm_eps, pdl)
        for index, layer in enumerate(weights.layers):
            last = index + 1 == spec.num_layers
            next_norm = weights.norm if last else weights.layers[index + 1].norm
            self.attend(index, stream)
            moe = index - spec.num_dense_layers
            if moe < 0:
                skinny.norm_gated(self._attended, layer.wide, self._dense, None, spec.norm_eps, tuning.wide, pdl)
                stream = self._dense_done
                skinny.linear_residual(self._dense, layer.down, stream, next_norm.gain, None, tuning.dense_down, pdl)
            else:
                stream = self._moe_done
                self.run_moe(index, moe, next_norm.gain)
            next_norm.finish(stream, spec.norm_eps, pdl)
        skinny.norm_linear(stream, weights.head, self.logits[0], spec.norm_eps, tuning.head, pdl, weights.head_bias)
        self._select.advance(self.logits, self.tokens, self.feed, self.position, self.step_index, pdl)

    def attend(self, index: int, stream: Stream) -> None:
        """Attention of layer `index`, added to the residual stream."""
        layer, spec, tuning, pdl = self.weights.layers[index], self.weights.spec, self.tuning, self.pdl
        skinny.norm_linear(stream, layer.qkv, self._qkv[0], spec.norm_eps, tuning.qkv, pdl, layer.qkv_bias)
        self._attention.row(index, self._qkv, self.position, self._values)
        octets = None if spec.layer_norm else self._octets
        skinny.linear_residual(
            self._values[0], layer.o, self._attended, layer.mlp_norm.gain, octets, tuning.out, pdl, layer.o_bias
        )
        layer.mlp_norm.finish(self._attended, spec.norm_eps, pdl, self._octets)

    def run_moe(self, index: int, moe: int, next_gain: Tensor) -> None:
        """Router, shared and routed experts of layer `index`, MoE layer `moe`, added to the residual stream."""
        layer, experts, tuning, pdl = self.weights.layers[index], self.experts, self.tuning, self.pdl
        routing = self._routings[moe]
        skinny.norm_gated(
            self._attended, layer.wide, self._shared, routing, self.weights.spec.norm_eps, tuning.wide, pdl
        )
        int4_moe.gate_up(
            self._octets, experts.gate_up[moe], experts.gate_up_params[moe], routing, self._inner, tuning.gate_up,
            pdl,
        )  # fmt: skip
        int4_moe.down(
            self._shared, layer.down, self._inner, experts.down[moe], experts.down_params[moe], routing,
            self._moe_done, next_gain, tuning.down, pdl,
        )  # fmt: skip


class ByExpertDraft(Draft):
    """A `Draft` that launches its INT4 kernels once per chosen expert: the ablation of their fusion over experts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        spec, device = self.weights.spec, self.weights.device
        self._lone_inner = Octets.empty(spec.expert_inter, device)
        self._nothing = self._shared[:0]
        self._no_weight = torch.zeros(spec.hidden, 0, dtype=self.weights.dtype, device=device)

    def run_moe(self, index: int, moe: int, next_gain: Tensor) -> None:
        layer, experts, tuning, pdl = self.weights.layers[index], self.experts, self.tuning, self.pdl
        routing = self._routings[moe]
        skinny.norm_gated(
            self._attended, layer.wide, self._shared, routing, self.weights.spec.norm_eps, tuning.wide, pdl
        )
        last = routing.weights.shape[0] - 1  # the shared expert is added once
        for rank in range(last + 1):
            lone = dataclasses.replace(
                routing, weights=routing.weights[rank : rank + 1], history=routing.history[:, rank : rank + 1]
            )
            int4_moe.gate_up(
                self._octets, experts.gate_up[moe], experts.gate_up_params[moe], lone, self._lone_inner,
                tuning.gate_up, pdl,
            )  # fmt: skip
            shared, weight = (self._shared, layer.down) if rank == last else (self._nothing, self._no_weight)
            int4_moe.down(
                shared, weight, self._lone_inner, experts.down[moe], experts.down_params[moe], lone, self._moe_done,
                next_gain, tuning.down, pdl,
            )  # fmt: skip


class UnfusedDraft(Draft):
    """A `Draft` that runs the chosen experts one by one in plain torch: the ablation of the INT4 kernels.

    `layers` are the unpacked codes of every MoE layer, [E, out, in], on the device.
    """

    def __init__(self, layers: list[Int4Layer], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._layers = layers

    def run_moe(self, index: int, moe: int, next_gain: Tensor) -> None:
        layer, tuning, routing = self.weights.layers[index], self.tuning, self._routings[moe]
        skinny.norm_gated(
            self._attended, layer.wide, self._shared, routing, self.weights.spec.norm_eps, tuning.wide, self.pdl
        )
        chosen = routing.history.index_select(0, routing.step)[0].long()
        x = (self._octets.decode() * routing.scale).to(self.weights.dtype)
        for rank, weight in enumerate(routing.weights.split(1)):
            gate, up, down = (_one(part, chosen[rank : rank + 1], self.weights.dtype) for part in self._layers[moe])
            inner = F.silu(F.linear(x, gate)) * F.linear(x, up)
            self.x[0] += F.linear(inner, down).float() * weight
        if routing.is_gated:
            self._shared *= torch.sigmoid(routing.logits[-1:]).to(self._shared.dtype)
        if len(self._shared):  # otherwise the experts' sums are all, and LayerNorm reads nothing else
            skinny.linear_residual(self._shared, layer.down, self._moe_done, next_gain, None, tuning.down, self.pdl)


def _one(matrices: Int4Matrices, expert: Tensor, dtype: torch.dtype) -> Tensor:
    """One expert's matrix [out, in]; `expert` int64 [1] stays on the device."""
    codes, scales, zeros = (
        part.index_select(0, expert)[0] for part in (matrices.codes, matrices.scales, matrices.zeros)
    )
    return Int4Matrices(codes, scales, zeros, matrices.group).dequantize(dtype)
