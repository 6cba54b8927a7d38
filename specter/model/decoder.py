"""The live decoder of all families: a target on fixed tiles and its INT4 draft over one KV cache.

Bit for bit the same row comes out whatever runs beside it: every product has the shape of one tile, attention
runs over one fixed key length, every expert's rows are padded to tiles, and one reduction over k in rank order
joins them. `specter.model.invariance` checks that this machine's BLAS keeps the promise.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specter.errors import SpecterError
from specter.experts.slots import SlotArena
from specter.kernels import Product, expert_tiles, gated, product, tiled_product
from specter.model.attention import RotaryPairs, Span, attend
from specter.model.base import Choose, FinishedStep, Output, Routing
from specter.model.elementwise import add_bias, norm
from specter.model.kv_cache import KVCache
from specter.model.rope import check_prompt
from specter.model.routing import route
from specter.model.spec import ModelSpec
from specter.model.weights import DecoderWeights, DraftExperts
from specter.quantize.int4 import Int4Experts


@dataclass(slots=True)
class _Rows:
    """Rows that go through the layers together, whole tiles of them (R with padding, n real, k = top_k)."""

    x: Tensor  # residual stream [R, D]
    span: Span
    normed: Tensor = field(init=False)  # [R, D], what the experts read
    hidden: Tensor = field(init=False)  # residual stream between attention and experts [R, D]
    base: Tensor = field(init=False)  # residual + shared experts [R, D]
    weights: Tensor = field(init=False)  # of the router, scaled [R, k, 1]
    experts: Tensor = field(init=False)  # int64 [R, k]
    by_expert: NDArray[np.int64] = field(init=False)  # row * k + rank of real rows, sorted by expert
    starts: NDArray[np.int64] = field(init=False)  # where each expert's part of `by_expert` begins [E + 1]
    expert_rows: Tensor = field(init=False)  # [R * k + 1, D]; the last row takes what padding computes
    num_pending: int = 0  # (row, rank) pairs whose expert has not run

    def group(self, routing: Routing, num_experts: int) -> None:
        """Sorts the real rows by expert and makes room for their results."""
        flat = routing.ravel()
        self.by_expert = np.argsort(flat, kind="stable")
        self.starts = np.searchsorted(flat[self.by_expert], np.arange(num_experts + 1))
        self.expert_rows = self.x.new_zeros(self.experts.numel() + 1, self.x.shape[1])
        self.num_pending = flat.size


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What the draft makes of one token: logits [V] for the next position, and routing [MoE layers, top_k]."""

    output: Tensor
    routing: NDArray[np.int16]


class Decoder:
    """Implements `specter.model.base.Model` for a live model.

    Args:
        arena: the slots that `run_experts` reads.
        draft: the INT4 experts; None for a target alone.
        tile: rows per product; a pass takes as many tiles as it needs.
        capacity: positions of the KV cache; attention always runs over all of it.
        mm: the matrix product under every layer.

    Attributes:
        rowwise: every row of a target pass alone, in tiles of one row (see `invariance_check`).
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
        self.spec = spec
        self.num_layers = spec.num_layers
        self.num_dense_layers = spec.num_dense_layers
        self.num_experts = spec.num_experts
        self.top_k = spec.top_k
        self.tile = tile
        self.rowwise = False
        self.mm = mm
        self.arena = arena
        self.cache = KVCache(spec, capacity, dtype, device)
        self._weights = weights
        self._rotary = RotaryPairs(spec, capacity, dtype, device)
        self._draft = None if draft is None else DraftExperts(draft, dtype, device)

    def twin(self) -> Decoder:
        """A decoder of equal weights, of which it shares only the experts, with a KV cache of its own."""
        twin = copy.copy(self)
        twin._weights = copy.deepcopy(self._weights)
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
        """The draft on a given token: appends temporary KV at `position`."""
        if self._draft is None:
            raise SpecterError("this decoder has no draft", "build it with INT4 experts")
        self.cache.extend(position, 1)
        rows = self._embed([token], position, tile=1)
        chosen = []
        for layer in range(self.num_layers):
            if self._mix(layer, rows):
                chosen.append(rows.experts[0])
                results = self._draft.run(layer - self.num_dense_layers, chosen[-1], rows.normed)
                rows.x = self._reduce(rows, results[None])
        routing = torch.stack(chosen).to(torch.int16).cpu().numpy()
        return DraftRow(self._logits(rows.x, tile=1)[0], routing)

    def target_pass(self, tokens: Sequence[int], position: int, num_outputs: int) -> DecoderPass:
        """See `Model`; outputs are logits [V].

        Raises:
            SpecterError: no tokens, more than the KV cache holds, or a prompt that LongRoPE's switch forbids.
        """
        if not 0 <= num_outputs <= len(tokens) or not tokens:
            raise SpecterError(
                f"a pass over {len(tokens)} tokens with {num_outputs} outputs", "ask for at least one token"
            )
        if position == 0:
            check_prompt(self.spec, self.cache.capacity, len(tokens))
        self.cache.extend(position, len(tokens))
        with torch.inference_mode():
            if not self.rowwise:
                return DecoderPass(self, [self._embed(tokens, position, self.tile)], num_outputs)
            rows = [self._embed([token], position + i, tile=1) for i, token in enumerate(tokens)]
            return DecoderPass(self, rows, num_outputs)

    # -- the layers, on one block of rows ---------------------------------------------------------

    def _embed(self, tokens: Sequence[int], position: int, tile: int) -> _Rows:
        span = Span(self._rotary, self.cache, self.spec, position, len(tokens), tile)
        embedding = self._weights.embedding
        x = embedding.new_zeros(span.padded_rows, self.spec.hidden)
        torch.index_select(embedding, 0, torch.tensor(tokens, device=x.device), out=x[: len(tokens)])
        return _Rows(x, span)

    def _mix(self, layer: int, rows: _Rows) -> bool:
        """Attention, router and shared experts; a dense layer is run whole. Returns whether experts must follow."""
        spec, weights, tile = self.spec, self._weights.layers[layer], rows.span.tile
        rows.x = rows.x + attend(self.mm, weights.attention, norm(spec, rows.x), rows.span, self.cache, layer)
        rows.normed = norm(spec, rows.x, weights.norm, weights.norm_bias)
        wide = tiled_product(self.mm, rows.normed, weights.wide, tile)
        is_moe = layer >= self.num_dense_layers
        rows.hidden = rows.x
        num_router = self.num_experts if is_moe else 0
        num_gates = int(is_moe and spec.shared_gate)
        rows.base = rows.x
        if weights.down.shape[0]:
            shared = tiled_product(self.mm, gated(wide[:, num_router + num_gates :]), weights.down, tile)
            if num_gates:
                shared *= torch.sigmoid(wide[:, num_router, None])
            rows.base = rows.x + shared
        if is_moe:
            router, rows.experts = route(spec, wide[:, :num_router])
            rows.weights = router.unsqueeze(-1)
        else:
            rows.x = rows.base
        return is_moe

    def _foresee(self, layer: int, rows: _Rows) -> Tensor:
        """Expert ids int64 [R, k] of the next layer's norm and router on this layer's hidden state."""
        weights = self._weights.layers[layer + 1]
        x = norm(self.spec, rows.hidden, weights.norm, weights.norm_bias)
        logits = tiled_product(self.mm, x, weights.wide[:, : self.num_experts], rows.span.tile)
        return route(self.spec, logits)[1]

    def _run_experts(self, rows: _Rows, experts: Sequence[int], slots: Sequence[int]) -> None:
        tile, dump = rows.span.tile, rows.expert_rows.shape[0] - 1
        parts = [rows.by_expert[rows.starts[expert] : rows.starts[expert + 1]] for expert in experts]
        num_tiles = [-(-part.size // tile) for part in parts]
        tile_slots = [slot for slot, num in zip(slots, num_tiles, strict=True) for _ in range(num)]
        if not tile_slots:
            return
        target = np.full(len(tile_slots) * tile, dump)
        begin = 0
        for part, num in zip(parts, num_tiles, strict=True):
            target[begin : begin + part.size] = part
            begin += num * tile
            rows.num_pending -= part.size
        source = np.where(target == dump, 0, target // self.top_k)
        x = rows.normed.index_select(0, torch.from_numpy(source).to(rows.x.device))
        results = expert_tiles(
            self.mm,
            x.view(len(tile_slots), tile, -1),
            [self.arena.gate_up_t[slot] for slot in tile_slots],
            [self.arena.down_t[slot] for slot in tile_slots],
        )
        rows.expert_rows.index_copy_(0, torch.from_numpy(target).to(rows.x.device), results.flatten(0, 1))

    def _reduce(self, rows: _Rows, results: Tensor) -> Tensor:
        """The layer's output [R, D] of expert results [R, k, D]: one reduction over k, in rank order."""
        return rows.base + (results * rows.weights).sum(1)

    def _logits(self, x: Tensor, tile: int) -> Tensor:
        logits = tiled_product(self.mm, norm(self.spec, x), self._weights.head, tile)
        return add_bias(logits, self._weights.head_bias)


class DecoderPass:
    """A target pass in progress; see `specter.model.base.TargetPass`."""

    def __init__(self, decoder: Decoder, blocks: list[_Rows], num_outputs: int) -> None:
        self._decoder = decoder
        self._blocks = blocks
        self._num_outputs = num_outputs

    @torch.inference_mode()
    def mix(self, layer: int) -> Routing | None:
        parts = []
        for rows in self._blocks:
            if self._decoder._mix(layer, rows):
                routing = rows.experts[: rows.span.num_rows].to(torch.int16).cpu().numpy()
                rows.group(routing, self._decoder.num_experts)
                parts.append(routing)
        return np.concatenate(parts) if parts else None

    @torch.inference_mode()
    def foresee(self, layer: int) -> Routing:
        """See `ForeseeingPass`."""
        parts = [self._decoder._foresee(layer, rows)[: rows.span.num_rows] for rows in self._blocks]
        return torch.cat(parts).to(torch.int16).cpu().numpy()

    @torch.inference_mode()
    def run_experts(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        for rows in self._blocks:
            self._decoder._run_experts(rows, experts, slots)

    @torch.inference_mode()
    def combine(self, layer: int) -> None:
        for rows in self._blocks:
            assert rows.num_pending == 0, f"layer {layer}: {rows.num_pending} results of experts are missing"
            rows.x = self._decoder._reduce(rows, rows.expert_rows[:-1].view(*rows.experts.shape, -1))

    @torch.inference_mode()
    def outputs(self) -> list[Output]:
        outputs: list[Output] = []
        for rows in reversed(self._blocks):
            tile, num_rows = rows.span.tile, rows.span.num_rows
            wanted = min(self._num_outputs - len(outputs), num_rows)
            if wanted > 0:
                first = (num_rows - wanted) // tile * tile  # tiles without a wanted row are left out
                logits = self._decoder._logits(rows.x[first:], tile)
                outputs = [*logits[num_rows - wanted - first : num_rows - first].unbind(0), *outputs]
        return outputs
