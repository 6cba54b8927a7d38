"""The live decoder of all families: a target on fixed tiles and its INT4 draft over one KV cache.

A row's bits do not depend on the other rows: every product has the shape of one tile, attention runs over one fixed key
length, every expert's rows are padded to tiles, and one reduction over k in rank order combines them.
`specter.models.cpu.invariance` checks this on the machine's BLAS.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specter.codecs.int4 import Int4Experts
from specter.errors import SpecterError
from specter.experts.slots import SlotArena
from specter.kernels.reference import Product, gated_, product, tiled_product
from specter.models.base import Choose, FinishedStep, Output, Routing
from specter.models.cpu.attention import Span, attend
from specter.models.cpu.buffers import ExpertScratch, KVCache, Scratch
from specter.models.elementwise import add_bias, affine, norm
from specter.models.rope import check_prompt
from specter.models.routing import choose, route
from specter.models.spec import ModelSpec
from specter.models.weights import DecoderWeights, DraftExperts, RotaryPairs

Unpack = Callable[[int, Sequence[int], Sequence[int]], None]  # MoE layer, experts, slots


@dataclass(slots=True)
class _Rows:
    """Whole tiles of rows that go through the layers together: R with padding, n real, k = top_k."""

    x: Tensor  # residual stream [R, D]
    span: Span
    router: Tensor  # a MoE layer's logits of the real rows [n, E]
    unit: Tensor = field(init=False)  # residual stream after attention, normalised without gain [R, D]
    normed: Tensor = field(init=False)  # the same with gain [R, D], the experts' input
    base: Tensor = field(init=False)  # residual + shared experts [R, D]
    weights: Tensor = field(init=False)  # of the router, scaled [n, k]
    experts: Tensor = field(init=False)  # int64 [n, k]
    by_expert: dict[int, list[int]] = field(init=False)  # row * k + rank, of experts that have not run
    expert_rows: Tensor = field(init=False)  # [n * k + 1, D]; the last row receives results of padding
    results: Tensor = field(init=False)  # a view of it: [n, k, D]

    def group(self, routing: Routing) -> None:
        """Groups (row, rank) by expert."""
        self.by_expert = {}
        for place, expert in enumerate(routing.ravel().tolist()):
            self.by_expert.setdefault(expert, []).append(place)


@dataclass(frozen=True, slots=True)
class DraftRow:
    """The draft's output for one token: logits [V] for the next position, and routing [MoE layers, top_k]."""

    output: Tensor
    routing: NDArray[np.int16]


class Decoder:
    """Implements `specter.models.base.Model` for a live model.

    Args:
        arena: the slots that `run_experts` reads.
        draft: the INT4 experts; None for a target alone.
        tile: rows per product. mm: the product of all layers.
        capacity: positions of the KV cache; attention always runs over all of it.
    Attributes:
        unpack: decodes a wave of a MoE layer into `arena`, for payloads that are not 16-bit weights.
        rowwise: whether each row of a target pass runs alone, in a tile of one row (see `invariance_check`).
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        arena: SlotArena,
        draft: Int4Experts | None,
        tile: int = 16,
        capacity: int = 256,
        mm: Product = product,
    ) -> None:
        dtype, device = weights.embedding.dtype, weights.embedding.device
        if dtype not in (torch.float32, torch.float64):
            raise SpecterError(f"compute in {dtype} is not implemented", "load the weights as torch.float32")
        if arena.codec.dtype != dtype:
            raise SpecterError(
                f"slots hold {arena.codec.dtype}, the decoder computes in {dtype}", f"use RawCodec({dtype}, ...)"
            )
        self.num_layers, self.num_dense_layers = spec.num_layers, spec.num_dense_layers
        self.num_experts, self.top_k = spec.num_experts, spec.top_k
        self.spec, self.arena, self.tile, self.mm = spec, arena, tile, mm
        self.rowwise = False
        self.unpack: Unpack | None = None
        self.cache = KVCache(spec, capacity, dtype, device)
        self._weights = weights
        self._rotary = RotaryPairs(spec, capacity, dtype, device)
        self._scratch: dict[tuple[int, int], Scratch] = {}  # by tiles and rows of a tile
        self._experts: dict[int, ExpertScratch] = {}  # by rows of a tile
        self._draft = None if draft is None else DraftExperts(draft, dtype, device)

    def twin(self) -> Decoder:
        """A decoder with equal weights and its own KV cache; only the experts are shared."""
        twin = copy.copy(self)
        twin._weights = copy.deepcopy(self._weights)
        twin._scratch, twin._experts = {}, {}
        entries = self.cache.entries
        twin.cache = KVCache(self.spec, self.cache.capacity, entries.dtype, entries.device)
        return twin

    def reset(self) -> None:
        self.cache.reset()

    def crop(self, length: int) -> None:
        self.cache.crop(length)

    def begin_draft(self, token: int, position: int, choose: Choose) -> None:
        self._draft_token, self._draft_position, self._choose = token, position, choose

    def draft_step(self) -> FinishedStep:
        """See `Model`."""
        row = self.draft_row(self._draft_token, self._draft_position)
        self._draft_position += 1
        proposal = self._choose(row.output, self._draft_position)
        self._draft_token = proposal.token
        return FinishedStep(proposal, row.routing)

    @torch.inference_mode()
    def draft_row(self, token: int, position: int) -> DraftRow:
        """Runs the draft on a given token; appends temporary KV at `position`."""
        if self._draft is None:
            raise SpecterError("this decoder has no draft", "build it with INT4 experts")
        self.cache.extend(position, 1)
        rows = self._embed([token], position, tile=1)
        chosen = []
        for layer in range(self.num_layers):
            if self._attend_and_route(layer, rows):
                chosen.append(rows.experts)
                moe_layer = layer - self.num_dense_layers
                rows.x = self._draft.add(rows.base, moe_layer, rows.experts[0], rows.weights, rows.normed)
        return DraftRow(self._logits(rows.x, tile=1)[0], _routing(torch.cat(chosen)))

    def target_pass(self, tokens: Sequence[int], position: int, num_outputs: int) -> DecoderPass:
        """See `Model`; outputs are logits [V].
        Raises SpecterError: no tokens, more than the KV cache holds, or a prompt that LongRoPE's switch forbids."""
        if not 0 <= num_outputs <= len(tokens) or not tokens:
            raise SpecterError(
                f"a pass over {len(tokens)} tokens with {num_outputs} outputs", "give at least one token"
            )
        if position == 0:
            check_prompt(self.spec, self.cache.capacity, len(tokens))
        self.cache.extend(position, len(tokens))
        if not self.rowwise:
            blocks = [self._embed(tokens, position, self.tile)]
        else:
            blocks = [self._embed([token], position + i, tile=1) for i, token in enumerate(tokens)]
        for rows in blocks:
            num_results = rows.span.num_rows * self.top_k
            rows.expert_rows = rows.x.new_empty(num_results + 1, self.spec.hidden)
            rows.results = rows.expert_rows[:-1].view(-1, self.top_k, self.spec.hidden)
        return DecoderPass(self, blocks, num_outputs)

    # -- layers, on one block of rows ---

    def _embed(self, tokens: Sequence[int], position: int, tile: int) -> _Rows:
        num_tiles, num_rows = -(-len(tokens) // tile), len(tokens)
        if (num_tiles, tile) not in self._scratch:
            with torch.inference_mode(False):  # it outlives the pass
                self._scratch[num_tiles, tile] = Scratch(self.spec, num_tiles, tile, self.cache)
        scratch = self._scratch[num_tiles, tile]
        embedding = self._weights.embedding
        x = embedding.new_zeros(num_tiles * tile, self.spec.hidden)
        torch.index_select(embedding, 0, torch.tensor(tokens, device=x.device), out=x[:num_rows])
        span = Span(self._rotary, self.cache, scratch, position, num_rows)
        return _Rows(x, span, scratch.moe.router[:num_rows])

    def _attend_and_route(self, layer: int, rows: _Rows) -> bool:
        """Attention, router and shared experts, or a whole dense layer. Returns whether the layer has experts."""
        spec, weights, tile = self.spec, self._weights.layers[layer], rows.span.tile
        is_moe = layer >= self.num_dense_layers
        scratch = rows.span.scratch.moe if is_moe else rows.span.scratch.dense
        rows.x = rows.x + attend(self.mm, weights.attention, norm(spec, rows.x), rows.span, self.cache, layer)
        rows.unit = norm(spec, rows.x)
        rows.normed = affine(rows.unit, weights.norm, weights.norm_bias)
        tiled_product(self.mm, rows.normed, weights.wide, tile, out=scratch.wide)
        rows.base = rows.x
        if weights.down.shape[0]:
            shared = tiled_product(self.mm, gated_(scratch.gate, scratch.up), weights.down, tile)
            if is_moe and spec.shared_gate:
                shared.mul_(torch.sigmoid(scratch.shared_gate))
            rows.base = shared.add_(rows.x)
        if is_moe:
            rows.weights, rows.experts = route(spec, rows.router)
        else:
            rows.x = rows.base
        return is_moe

    def _predict_next(self, layer: int, rows: _Rows) -> Tensor:
        """The next layer's norm and router on this layer's hidden state: expert ids int64 [n, k]."""
        weights = self._weights.layers[layer + 1]
        x = affine(rows.unit, weights.norm, weights.norm_bias)
        logits = tiled_product(self.mm, x, weights.router, rows.span.tile)
        return choose(self.spec, logits[: rows.span.num_rows])

    def _run_experts(self, rows: _Rows, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Every product has the shape of one tile, so the bits do not depend on the wave's composition."""
        tile, dump = rows.span.tile, rows.expert_rows.shape[0] - 1
        places: list[int] = []
        tile_slots: list[int] = []
        for expert, slot in zip(experts, slots, strict=True):
            part = rows.by_expert.pop(expert, [])
            num_tiles = -(-len(part) // tile)
            places += part + [dump] * (num_tiles * tile - len(part))
            tile_slots += [slot] * num_tiles
        if not places:
            return
        scratch = self._expert_scratch(len(tile_slots), tile)
        x, gate, up, results = scratch.rows(len(places))
        target = np.array(places)
        source = np.minimum(target // self.top_k, rows.span.num_rows - 1)
        torch.index_select(rows.normed, 0, torch.from_numpy(source).to(x.device), out=x)
        arena = self.arena
        for slot, (one, wide, _, _) in zip(tile_slots, scratch.tiles, strict=False):
            self.mm(one, arena.gate_up_t[slot], wide)
        gated_(gate, up)
        for slot, (_, _, inner, result) in zip(tile_slots, scratch.tiles, strict=False):
            self.mm(inner, arena.down_t[slot], result)
        rows.expert_rows.index_copy_(0, torch.from_numpy(target).to(x.device), results)

    def _expert_scratch(self, num_tiles: int, tile: int) -> ExpertScratch:
        found = self._experts.get(tile)
        if found is None or found.num_tiles < num_tiles:
            with torch.inference_mode(False):  # it outlives the pass
                found = self._experts[tile] = ExpertScratch(self.spec, num_tiles, tile, self.cache.entries)
        return found

    def _combine(self, rows: _Rows) -> None:
        """One reduction over k, in rank order."""
        rows.base[: rows.span.num_rows].add_(rows.results.mul_(rows.weights.unsqueeze(-1)).sum(1))
        rows.x = rows.base

    def _logits(self, x: Tensor, tile: int) -> Tensor:
        logits = tiled_product(self.mm, norm(self.spec, x), self._weights.head, tile)
        return add_bias(logits, self._weights.head_bias)


class DecoderPass:
    """A target pass in progress; see `specter.models.base.TargetPass`.

    Callers enter `torch.inference_mode`: entering it here, five times per layer, would cost as much as it saves.
    """

    def __init__(self, decoder: Decoder, blocks: list[_Rows], num_outputs: int) -> None:
        self._decoder = decoder
        self._blocks = blocks
        self._num_outputs = num_outputs

    def attend_and_route(self, layer: int) -> Routing | None:
        parts = []
        for rows in self._blocks:
            if self._decoder._attend_and_route(layer, rows):
                parts.append(_routing(rows.experts))
                rows.group(parts[-1])
        return np.concatenate(parts) if parts else None

    def predict_next(self, layer: int) -> Routing:
        return _routing(torch.cat([self._decoder._predict_next(layer, rows) for rows in self._blocks]))

    def decode(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        assert self._decoder.unpack is not None, "no codec"
        self._decoder.unpack(layer - self._decoder.num_dense_layers, experts, slots)

    def run_experts(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        for rows in self._blocks:
            self._decoder._run_experts(rows, experts, slots)

    def combine(self, layer: int) -> None:
        for rows in self._blocks:
            num_pending = sum(map(len, rows.by_expert.values()))
            assert num_pending == 0, f"layer {layer}: {num_pending} results of experts are missing"
            self._decoder._combine(rows)

    def outputs(self) -> list[Output]:
        outputs: list[Output] = []
        for rows in reversed(self._blocks):
            tile, num_rows = rows.span.tile, rows.span.num_rows
            wanted = min(self._num_outputs - len(outputs), num_rows)
            if wanted > 0:
                first = (num_rows - wanted) // tile * tile  # tiles without a requested row are skipped
                logits = self._decoder._logits(rows.x[first:], tile)
                outputs = [*logits[num_rows - wanted - first : num_rows - first].unbind(0), *outputs]
        return outputs


def _routing(experts: Tensor) -> Routing:
    return experts.cpu().numpy().astype(np.int16)
