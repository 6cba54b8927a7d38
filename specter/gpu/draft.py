"""The draft step: one row, INT4 routed experts, eight kernels a layer, captured as one CUDA graph.

Token, position and step number live on the device, so that K replays in a row need no host: the token that a
step chooses is the one that the next step embeds. Routing and counters reach the host by asynchronous copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specter.gpu.graphs import Graph
from specter.gpu.tuning import DRAFT, DraftTuning
from specter.gpu.weights import GpuKVCache, GpuWeights
from specter.kernels import int4_moe, mla, select, skinny
from specter.model.rope import softmax_scale


@dataclass(frozen=True, slots=True)
class DraftSnapshot:
    """What the host may read once `done` has happened; all pinned host memory."""

    tokens: Tensor  # int32 [steps]
    routing: Tensor  # int16 [steps, MoE layers, k]
    counts: Tensor  # int32 [MoE layers, E]
    done: torch.cuda.Event


class Draft:
    """The draft over a shared KV cache.

    Args:
        max_steps: steps between two calls of `begin`.
        temperature: None drafts greedily; otherwise tokens are argmax(logits / temperature + Gumbel(seed, position)).
        pdl: programmatic dependent launch.

    Attributes:
        tokens: int32 [max_steps], routing: int16 [max_steps, MoE layers, k], counts: int32 [MoE layers, E]: what
            the steps since `begin` chose, on the device.
        logits: fp32 [1, V] of the last step.
    """

    def __init__(
        self,
        weights: GpuWeights,
        experts: int4_moe.PackedExperts,
        cache: GpuKVCache,
        max_steps: int,
        seed: int = 0,
        temperature: float | None = None,
        pdl: bool = True,
        tuning: DraftTuning = DRAFT,
    ) -> None:
        spec, device, dtype = weights.spec, weights.device, weights.dtype
        self.weights, self.experts, self.cache, self.pdl, self.tuning = weights, experts, cache, pdl, tuning
        self._heads = mla.Heads.of(spec, softmax_scale(spec))

        def room(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.feed, self.position, self.step_index = (room(1, dtype=torch.int32) for _ in range(3))
        self.tokens = room(max_steps, dtype=torch.int32)
        self.routing = room(max_steps, spec.num_moe_layers, spec.top_k, dtype=torch.int16)
        self.counts = room(spec.num_moe_layers, spec.num_experts, dtype=torch.int32)
        self.logits = room(1, spec.vocab, dtype=torch.float32)
        self._x = room(1, spec.hidden, dtype=torch.float32)
        self._qkv = room(1, weights.layers[0].qkv.shape[0])
        self._queries = room(1, spec.num_heads, spec.kv_lora + spec.rope_dim)
        self._partials = mla.Partials.empty(self._heads, 1, cache.capacity, device)
        self._values = room(spec.num_heads * spec.v_dim)
        self._router = room(spec.num_experts, dtype=torch.float32)
        self._normed = room(spec.hidden)
        self._dense = room(spec.dense_inter)
        self._shared = room(spec.shared_inter)
        self._inner = room(spec.top_k * spec.expert_inter)
        self._select = select.Selection.empty(1, spec.vocab, device, seed, temperature)
        self._graph: Graph | None = None

    def capture(self) -> None:
        """Captures the step; it writes KV at the first positions, so call it before the first prompt."""
        self.begin(0, 0)
        self._graph = Graph(self.run)

    def begin(self, token: int, position: int) -> None:
        """The next step appends KV of `token` at `position`; steps and counts start anew. Asynchronous."""
        self.feed.fill_(token)
        self.position.fill_(position)
        self.step_index.zero_()
        self.counts.zero_()

    def step(self) -> None:
        """One draft step on the current stream, by graph replay if it was captured."""
        if self._graph is None:
            self.run()
        else:
            self._graph.replay()

    def snapshot(self, num_steps: int) -> DraftSnapshot:
        """Starts copies of the first `num_steps` steps' tokens and routing, and of the counters, to the host."""
        parts = []
        for part in (self.tokens[:num_steps], self.routing[:num_steps], self.counts):
            host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
            parts.append(host.copy_(part, non_blocking=True))
        done = torch.cuda.Event(enable_timing=True)
        done.record()
        return DraftSnapshot(*parts, done)

    def run(self) -> None:
        """The kernels of one step, launched one by one."""
        weights, spec, tuning, pdl = self.weights, self.weights.spec, self.tuning, self.pdl
        x = self._x[0]
        select.embed(self.feed, weights.embedding, self._x, pdl)
        for index, layer in enumerate(weights.layers):
            self.attend(index)
            moe = index - spec.num_dense_layers
            if moe < 0:
                skinny.norm_gated(
                    x, layer.mlp_norm, layer.wide, self._dense, self._router[:0], self._normed, spec.norm_eps,
                    tuning.wide, pdl,
                )  # fmt: skip
                skinny.linear_residual(self._dense, layer.down, x, tuning.dense_down, pdl)
            else:
                self.run_moe(index, moe)
        skinny.norm_linear(x, weights.norm, weights.head, self.logits[0], spec.norm_eps, tuning.head, pdl)
        self._select.advance(self.logits, self.tokens, self.feed, self.position, self.step_index, pdl)

    def attend(self, index: int) -> None:
        """Attention of layer `index`, added to the residual stream."""
        layer, spec, heads, pdl = self.weights.layers[index], self.weights.spec, self._heads, self.pdl
        x, cache = self._x[0], self.cache.latents[index]
        skinny.norm_linear(x, layer.norm, layer.qkv, self._qkv[0], spec.norm_eps, self.tuning.qkv, pdl)
        mla.absorb(
            heads, self._qkv, layer.kv_b, layer.kv_norm, self.cache.rotary, self.position, self._queries, cache, pdl
        )
        mla.attend(heads, self._queries, cache, self.position, self._partials, pdl)
        mla.values(heads, self._partials, layer.kv_b, self.position, self._values, pdl)
        skinny.linear_residual(self._values, layer.o, x, self.tuning.out, pdl)

    def run_moe(self, index: int, moe: int) -> None:
        """Router, shared and routed experts of layer `index`, MoE layer `moe`, added to the residual stream."""
        layer, spec, tuning, pdl = self.weights.layers[index], self.weights.spec, self.tuning, self.pdl
        experts = self.experts
        x, chosen = self._x[0], self.routing[:, moe]
        skinny.norm_gated(
            x, layer.mlp_norm, layer.wide, self._shared, self._router, self._normed, spec.norm_eps, tuning.wide, pdl
        )
        int4_moe.gate_up(
            self._router, self._normed, experts.gate_up[moe], experts.gate_up_params[moe], self._inner, chosen,
            self.counts[moe], self.step_index, spec.routed_scaling, tuning.gate_up, pdl,
        )  # fmt: skip
        int4_moe.down(
            self._shared, layer.down, self._inner, experts.down[moe], experts.down_params[moe], chosen,
            self.step_index, x, tuning.down, tuning.down_codes, pdl,
        )  # fmt: skip
