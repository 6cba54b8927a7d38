"""Passes of the target on the device: any number of rows, in tiles of 16; a row has the same bits in every pass.

In waves: `attend_and_route`, `run_experts` and `combine`, layer by layer, while the engine loads experts. Resident:
`run` launches a whole pass, since every expert has a slot; the same kernels on the same buffers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.kernels import grouped_mlp, select, tiles
from specter.kernels.device import Launch, Stream
from specter.kernels.grouped_mlp import Routing
from specter.kernels.routing import Rule
from specter.models.cuda.attention import MAX_ROWS, build_attention
from specter.models.cuda.weights import GpuKVCache, GpuWeights, Norm

OUTPUT_ROWS = 64  # most rows of a pass that can choose a token
_POSITION_STRIDE = 4  # 16 bytes: the positions of all parts have the same alignment


@dataclass(frozen=True, slots=True)
class TargetTuning:
    """Launches of tiles of 16 rows, found like `DraftTuning`. `block_k` is a multiple of 16 * num_warps."""

    qkv: Launch = Launch(16, 512, 4, 4)
    out: Launch = Launch(16, 512, 4, 4)
    wide: Launch = Launch(16, 256, 4, 4)
    down: Launch = Launch(16, 512, 4, 4)
    head: Launch = Launch(64, 256, 4, 4)
    experts_up: Launch = Launch(32, 128, 4, 4)
    experts_down: Launch = Launch(64, 128, 4, 4)


TARGET = TargetTuning()


class Target:
    """The target over a shared KV cache.

    Args:
        arena: [num_slots, stride] in the model's dtype (see `specter.kernels.grouped_mlp`).
        slot_table: int32 [MoE layers, E] on the device, for resident passes.
        feed: int32 [max_rows] on the device or page-locked, the tokens of a pass; by default on the device.
        max_rows: of the longest pass. sampling, pdl: as in `specter.models.cuda.draft.Draft`.
    Attributes:
        tokens: int32 [64], the chosen tokens of the last pass. logits: fp32 [64, V].
        routing: of the last MoE layer. predicted: of the layer after it (see `predict_next`).
    Raises SpecterError: the slots are too short for an expert, or of another dtype.
    """

    def __init__(
        self,
        weights: GpuWeights,
        arena: Tensor,
        cache: GpuKVCache,
        max_rows: int,
        *,
        slot_table: Tensor | None = None,
        feed: Tensor | None = None,
        sampling: select.SamplingParams | None = None,
        pdl: bool = True,
        tuning: TargetTuning = TARGET,
    ) -> None:
        spec, device, dtype = weights.spec, weights.device, weights.dtype
        if arena.dtype != dtype or arena.shape[1] < spec.expert_params:
            raise SpecterError(
                f"slots hold {arena.shape[1]} values of {arena.dtype}, an expert of {spec.name} needs "
                f"{spec.expert_params} of {dtype}",
                "allocate the arena for this model's payload",
            )
        self.weights, self.arena, self.cache, self.slot_table = weights, arena, cache, slot_table
        self.max_rows, self.pdl, self.tuning = max_rows, pdl, tuning
        self.rule = Rule.of(spec)
        self._attention = build_attention(weights, cache, min(max_rows, MAX_ROWS), pdl)

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        parts = -(-max_rows // MAX_ROWS)
        self.feed = zeros(max_rows, dtype=torch.int32) if feed is None else feed
        self.positions = zeros(parts + 1, _POSITION_STRIDE, dtype=torch.int32)  # of the parts, then of the outputs
        self._part_starts = torch.arange(parts, dtype=torch.int32, device=device) * MAX_ROWS
        self.tokens = zeros(OUTPUT_ROWS, dtype=torch.int32)
        self.logits = zeros(OUTPUT_ROWS, spec.vocab, dtype=torch.float32)
        self.x = zeros(max_rows, spec.hidden, dtype=torch.float32)
        self.scaled = zeros(max_rows, spec.hidden)

        def squares(block: int) -> Tensor:
            return zeros(max_rows, -(-spec.hidden // block), dtype=torch.float32)

        self._squares_embedded, self._squares_attended, self._squares_done = (
            squares(block) for block in (select.BLOCK_D, tuning.out.block_n, tuning.down.block_n)
        )
        self.qkv = zeros(max_rows, weights.layers[0].qkv.shape[0])
        self.values = zeros(max_rows, spec.num_heads * spec.v_dim)
        self.router = zeros(max_rows, spec.num_router_out, dtype=torch.float32)
        self.scales = zeros(max_rows, dtype=torch.float32)
        self.dense = zeros(max_rows, spec.dense_inter)
        self.shared = zeros(max_rows, spec.shared_inter)
        self.routing = Routing.empty(max_rows, spec.top_k, spec.num_experts, device)
        self.inner = zeros(max_rows * spec.top_k, spec.expert_inter)
        self.results = zeros(max_rows, spec.top_k, spec.hidden, dtype=torch.float32)
        self.predicted = Routing.empty(max_rows, spec.top_k, spec.num_experts, device)
        self._predict_scaled = zeros(max_rows, spec.hidden)
        self._predict_logits = zeros(max_rows, spec.num_experts, dtype=torch.float32)
        self._select = select.Selection.empty(
            OUTPUT_ROWS, weights.num_tokens, sampling or select.SamplingParams.greedy(device)
        )

    def begin(self, tokens: Tensor, position: int, num_outputs: int) -> None:
        """`place`, with tokens int32 [T] on any device. Asynchronous if they are page-locked."""
        self.place(tokens.shape[0], position, num_outputs)
        self.feed[: tokens.shape[0]].copy_(tokens, non_blocking=True)

    def place(self, num_rows: int, position: int, num_outputs: int) -> None:
        """Sets the positions of the next pass, whose tokens are in `feed`. Asynchronous.
        Raises SpecterError: more rows, outputs or positions than the buffers and the KV cache hold."""
        if not 0 < num_rows <= self.max_rows or not 0 <= num_outputs <= min(num_rows, OUTPUT_ROWS):
            raise SpecterError(
                f"a pass of {num_rows} rows with {num_outputs} outputs, where {self.max_rows} and {OUTPUT_ROWS} fit",
                "raise max_rows, or split the pass",
            )
        if position + num_rows > self.cache.capacity:
            raise SpecterError(
                f"{position + num_rows} positions do not fit the KV cache of {self.cache.capacity}",
                "shorten the prompt, generate fewer tokens or raise the KV capacity",
            )
        torch.add(self._part_starts, position, out=self.positions[:-1, 0])
        self.positions[-1, 0].fill_(position + num_rows - num_outputs)

    def run(self, num_rows: int, num_outputs: int | None = None) -> None:
        """Launches one resident pass over the first `num_rows` rows of `feed`; by default all are outputs.
        Raises SpecterError: there is no slot table."""
        if self.slot_table is None:
            raise SpecterError("a resident pass without a slot table", "load every expert, or run in waves")
        spec = self.weights.spec
        self.embed(num_rows)
        for index in range(spec.num_layers):
            self.attend_and_route(index, num_rows)
            if index >= spec.num_dense_layers:
                self.run_experts(self.slot_table[index - spec.num_dense_layers], num_rows)
                self.combine(index, num_rows)
        self.choose(num_rows, num_rows if num_outputs is None else num_outputs)

    # -- parts of a pass -------------------------------------------------------------------------

    def embed(self, num_rows: int) -> None:
        """Embeds the first `num_rows` tokens of `feed`."""
        # Without early launch: later kernels then find all work before this pass complete.
        stream, norm = self._stream(self._squares_embedded, num_rows), self.weights.layers[0].norm
        select.embed(self.feed, self.weights.embedding, stream, norm.gain, pdl=False)
        norm.finish(stream, self.weights.spec.norm_eps, self.pdl)

    def attend_and_route(self, index: int, num_rows: int) -> None:
        """Attention, router, tiles and the inner activations of the shared experts; a dense layer runs whole."""
        layer, spec, tuning, pdl = self.weights.layers[index], self.weights.spec, self.tuning, self.pdl
        before = self._stream(self._squares_done if index else self._squares_embedded, num_rows)
        attended = self._stream(self._squares_attended, num_rows)
        tiles.norm_linear(before, layer.qkv, self.qkv[:num_rows], spec.norm_eps, tuning.qkv, pdl, layer.qkv_bias)
        for part, begin in enumerate(range(0, num_rows, MAX_ROWS)):
            rows = slice(begin, min(begin + MAX_ROWS, num_rows))
            self._attention.rows(index, self.qkv[rows], self.positions[part], self.values[rows])
        values, norm = self.values[:num_rows], layer.mlp_norm
        tiles.linear_residual(values, layer.o, attended, norm.gain, tuning.out, pdl, layer.o_bias)
        norm.finish(attended, self.weights.spec.norm_eps, self.pdl)
        is_moe = index >= spec.num_dense_layers
        inner = self.shared[:num_rows] if is_moe else self.dense[:num_rows]
        router = self.router[:num_rows] if is_moe else self.router[:num_rows, :0]
        tiles.norm_gated(attended, layer.wide, inner, router, self.scales[:num_rows], spec.norm_eps, tuning.wide, pdl)
        if is_moe:
            grouped_mlp.route(router[:, : spec.num_experts], _first_rows(self.routing, num_rows), self.rule, pdl)
        else:
            done, norm = self._stream(self._squares_done, num_rows), self._next_norm(index)
            tiles.linear_residual(inner, layer.down, done, norm.gain, tuning.down, pdl)
            norm.finish(done, self.weights.spec.norm_eps, self.pdl)

    def run_experts(self, slots: Tensor, num_rows: int) -> None:
        """One wave of the layer last routed: slots int32 [E] on the device, -1 for experts that are not in it."""
        grouped_mlp.run_experts(
            self.scaled[:num_rows], self.scales[:num_rows], self.arena, slots, _first_rows(self.routing, num_rows),
            self.inner[: num_rows * self.weights.spec.top_k], self.results[:num_rows], self.tuning.experts_up,
            self.tuning.experts_down, self.pdl,
        )  # fmt: skip

    def combine(self, index: int, num_rows: int) -> None:
        """Adds the shared and routed experts of layer `index` to the residual stream, in rank order."""
        done, norm = self._stream(self._squares_done, num_rows), self._next_norm(index)
        spec = self.weights.spec
        tiles.linear_residual(
            self.shared[:num_rows], self.weights.layers[index].down, done, norm.gain, self.tuning.down, self.pdl,
            experts=(self.results[:num_rows], self.routing.weights[:num_rows]),
            gates=self.router[:num_rows, spec.num_experts] if spec.shared_gate else None,
        )  # fmt: skip
        norm.finish(done, self.weights.spec.norm_eps, self.pdl)

    def choose(self, num_rows: int, num_outputs: int) -> None:
        """Logits and tokens of the last `num_outputs` rows."""
        weights, logits = self.weights, self.logits[:num_outputs]
        stream = self._stream(self._squares_done, num_rows, num_rows - num_outputs)
        eps, launch = weights.spec.norm_eps, self.tuning.head
        tiles.norm_linear(stream, weights.head, logits, eps, launch, self.pdl, weights.head_bias)
        self._select.choose(logits, self.positions[-1], self.tokens[:num_outputs], self.pdl)

    def predict_next(self, index: int, num_rows: int) -> None:
        """Routes layer `index` + 1 on the state after layer `index`'s attention, into `predicted`.

        Called between `attend_and_route` and `combine` of a MoE layer, whose buffers it leaves as they are.
        """
        spec, following, rows = self.weights.spec, self.weights.layers[index + 1], slice(num_rows)
        attended, norm = self._stream(self._squares_attended, num_rows), following.mlp_norm
        stream = dataclasses.replace(attended, scaled=self._predict_scaled[rows])  # same sums of squares, another gain
        if norm.bias is None:
            torch.mul(stream.x, norm.gain, out=stream.scaled)
        else:
            norm.finish(stream, spec.norm_eps, self.pdl)
        router, logits = following.wide[: spec.num_experts], self._predict_logits[rows]
        tiles.norm_linear(stream, router, logits, spec.norm_eps, self.tuning.qkv, self.pdl)
        grouped_mlp.route(logits, _first_rows(self.predicted, num_rows), self.rule, self.pdl)

    def _next_norm(self, index: int) -> Norm:
        layers = self.weights.layers
        return layers[index + 1].norm if index + 1 < len(layers) else self.weights.norm

    def _stream(self, squares: Tensor, num_rows: int, begin: int = 0) -> Stream:
        rows = slice(begin, num_rows)
        return Stream(self.x[rows], self.scaled[rows], squares[rows], self.weights.spec.layer_norm)


def _first_rows(routing: Routing, num_rows: int) -> Routing:
    return dataclasses.replace(routing, chosen=routing.chosen[:num_rows], weights=routing.weights[:num_rows])
