"""What each operation of the engine moves and computes, in bytes, flops, kernels and launches.

The spec is that of the full-size model charged for, whatever model runs. Formulas (docs/decisions/0001):
a product [rows, n] x [n, m] reads its weights once and moves its input and output rows once,
  bytes = n*m*weight_bytes + rows*(n + m)*ACTIVATION_BYTES,   flops = 2*rows*n*m,
whatever the number of tiles, which are stacked in one launch. Rows are padded to whole tiles, and the key
length is the cache's capacity, because that is what a fixed-tile pass computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from specter.errors import SpecterError
from specter.models.spec import ModelSpec
from specter.timeline.base import Work
from specter.timeline.hardware import ceil_div

ACTIVATION_BYTES = 2  # BF16
INT4_BITS = 4.125  # per weight, scales included: GPTQ symmetric, group 128
WAVE_ROW_BYTES = 4  # rows of [T, k, D] are kept in fp32 until they are reduced

# Kernels per operation: assumptions on a runtime with the usual fusions, one kernel each.
LATENT_ATTENTION_KERNELS = (
    8  # norm · q · kv_a · kv norm + rope + append · absorb q · attention · expand v · o + residual
)
ATTENTION_KERNELS = 5  # norm · q, k and v · rope + append · attention · o + residual
DENSE_KERNELS = 4  # norm · gate and up · silu · down + residual
ROUTE_KERNELS = 3  # norm · router · softmax + top-k, or sparsemixer
SHARED_KERNELS = 3  # shared gate and up · silu · shared down, with the sigmoid where there is one
EXPERT_KERNELS = 2  # grouped gate and up + silu · grouped down
COMBINE_KERNELS = 1
HEAD_KERNELS = 3  # norm · lm_head · sampling
EMBED_KERNELS = 1
PREDICT_KERNELS = 2  # norm and router · top-k


@dataclass(frozen=True, slots=True)
class _Cost:
    """Bytes and flops that add up."""

    num_bytes: int = 0
    flops: int = 0

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(self.num_bytes + other.num_bytes, self.flops + other.flops)


@dataclass(frozen=True)
class CostModel:
    """Charges the engine's operations for `spec`.

    Args:
        spec: the full-size model charged.
        tile_rows: rows of one target tile; a target pass computes whole tiles.
        kv_capacity: positions of the KV cache; every pass attends over all of them.
        weight_bytes: per weight of the target (2: BF16).
        int4_bits: per weight of the draft's routed experts.
        draft_shared_bits: per non-expert weight of a draft that has its own; None where it reads the target's.
        graphed_draft: the draft step is one captured graph; False charges one launch per kernel.
    """

    spec: ModelSpec
    tile_rows: int
    kv_capacity: int
    weight_bytes: int = 2
    int4_bits: float = INT4_BITS
    graphed_draft: bool = True
    draft_shared_bits: float | None = None
    _works: dict[tuple[str, int, int], Work] = field(default_factory=dict, init=False, repr=False, compare=False)
    _pass_bytes: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)  # by tiles

    def __post_init__(self) -> None:
        for name in ("tile_rows", "kv_capacity", "weight_bytes", "int4_bits"):
            if getattr(self, name) <= 0:
                raise SpecterError(f"{name} is {getattr(self, name)}", f"give a {name} above 0")

    # -- operations -------------------------------------------------------------------------

    def draft_step(self, rows: int = 1) -> Work:
        """One draft token: one row through all layers, top_k INT4 experts per MoE layer, lm_head, sampling.

        More rows: a draft with a KV of its own reads what it has missed; all of their experts may be distinct.
        """
        return self._cached(("draft_step", rows, 0), lambda: self._draft_step(rows))

    def predict_next(self, tiles: int = 1) -> Work:
        """The next layer's norm and router on this layer's hidden state."""
        return self._cached(("foresee", 0, tiles), lambda: self._predict_next(tiles))

    def attend_and_route(self, layer: int, tiles: int = 1) -> Work:
        """Attention, norms, router and shared experts of one layer; a dense layer whole. Layer 0 also embeds.

        `layer` counts all layers, dense ones included.
        """
        return self._cached(
            ("mix", min(layer, self.spec.num_dense_layers + 1), tiles), lambda: self._attend_and_route(layer, tiles)
        )

    def experts(self, num_experts: int, tiles: int = 1) -> Work:
        """One wave: the 16-bit weights of `num_experts` experts in one grouped launch.

        Moves the weights and reads the tiles' rows once; the rows that it writes are charged in `combine`,
        so that the bytes of a layer grow with the number of waves only by that read. Computes whole tiles of
        rows per expert: at most all rows, or all routed rows and one tile of padding per expert.
        """
        return self._cached(("experts", num_experts, tiles), lambda: self._experts(num_experts, tiles))

    def combine(self, tiles: int = 1) -> Work:
        """Writes and reads rows [T, top_k, D] in fp32, reads the shared experts' and residual rows, writes rows."""
        return self._cached(("combine", 0, tiles), lambda: self._combine(tiles))

    def head(self, rows: int) -> Work:
        """Final norm, lm_head and sampling of `rows` rows, padded to whole tiles."""
        tiles = self.num_tiles(rows)
        return self._cached(("head", 0, tiles), lambda: self._head(tiles))

    # -- totals -----------------------------------------------------------------------------

    @property
    def payload_bytes(self) -> int:
        """Bytes of one 16-bit expert on the link."""
        return self.spec.expert_params * self.weight_bytes

    def num_tiles(self, rows: int) -> int:
        return ceil_div(rows, self.tile_rows)

    def draft_step_bytes(self) -> int:
        """Device-memory bytes of one draft step (DeepSeek-V2-Lite: 2.2 GB shared + 0.70 GB INT4 experts)."""
        return self.draft_step().hbm_bytes

    def verification_bytes(self, num_experts: int, rows: int) -> int:
        """The least device-memory bytes of one target pass over `rows` rows: one wave per layer.

        `num_experts`: distinct experts, summed over the MoE layers.
        """
        tiles = self.num_tiles(rows)
        if tiles not in self._pass_bytes:  # floors ask for every round
            spec = self.spec
            mixes = sum(self.attend_and_route(layer, tiles).hbm_bytes for layer in range(spec.num_layers))
            reads = spec.num_moe_layers * self._rows_bytes(tiles * self.tile_rows)
            combines = spec.num_moe_layers * self.combine(tiles).hbm_bytes
            self._pass_bytes[tiles] = mixes + reads + combines + self.head(rows).hbm_bytes
        return num_experts * self.payload_bytes + self._pass_bytes[tiles]

    # -- formulas ---------------------------------------------------------------------------

    def _cached(self, key: tuple[str, int, int], build: Callable[[], Work]) -> Work:
        work = self._works.get(key)
        if work is None:
            work = self._works[key] = build()
        return work

    def _rows_bytes(self, rows: int) -> int:
        """Bytes of activations [rows, D]."""
        return rows * self.spec.hidden * ACTIVATION_BYTES

    def _product(self, rows: int, num_in: int, num_out: int) -> _Cost:
        moved = num_in * num_out * self.weight_bytes + rows * (num_in + num_out) * ACTIVATION_BYTES
        return _Cost(moved, 2 * rows * num_in * num_out)

    def _mlp(self, rows: int, inter: int) -> _Cost:
        return self._product(rows, self.spec.hidden, 2 * inter) + self._product(rows, inter, self.spec.hidden)

    def _attention(self, rows: int, tiles: int) -> _Cost:
        """Every head attends over all cached positions; latents in absorbed form (latents [capacity, kv_lora + rope]).

        Each tile reads the cache once; scores and weighted sums cost 2*key_width and 2*value_width flops per row, head
        and position. Biases are left out.
        """
        spec = self.spec
        heads = spec.num_heads
        products = self._product(rows, spec.hidden, heads * spec.qk_dim)
        products += self._product(rows, heads * spec.v_dim, spec.hidden)
        products += self._product(rows, spec.hidden, spec.kv_width)
        if spec.is_latent:
            products += self._product(rows, spec.kv_lora, heads * (spec.nope_dim + spec.v_dim))
        cache_bytes = (tiles * self.kv_capacity + rows) * spec.kv_width * ACTIVATION_BYTES
        flops = 2 * rows * heads * self.kv_capacity * (spec.key_width + spec.value_width)
        return products + _Cost(cache_bytes, flops)

    def _layer(self, layer: int, rows: int, tiles: int) -> tuple[_Cost, int]:
        """Everything of a layer but its routed experts, and its kernels."""
        cost = self._attention(rows, tiles)
        kernels = LATENT_ATTENTION_KERNELS if self.spec.is_latent else ATTENTION_KERNELS
        if layer == 0:
            cost, kernels = cost + _Cost(2 * self._rows_bytes(rows)), kernels + EMBED_KERNELS
        if layer < self.spec.num_dense_layers:
            return cost + self._mlp(rows, self.spec.dense_inter), kernels + DENSE_KERNELS
        cost, kernels = cost + self._product(rows, self.spec.hidden, self.spec.num_router_out), kernels + ROUTE_KERNELS
        if not self.spec.shared_inter:
            return cost, kernels
        return cost + self._mlp(rows, self.spec.shared_inter), kernels + SHARED_KERNELS

    def _head_cost(self, rows: int) -> _Cost:
        return self._product(rows, self.spec.hidden, self.spec.vocab)

    def _combine_cost(self, rows: int) -> _Cost:
        wave_rows = rows * self.spec.top_k * self.spec.hidden
        return _Cost(2 * wave_rows * WAVE_ROW_BYTES + 3 * self._rows_bytes(rows), 2 * wave_rows)

    def _predict_next(self, tiles: int) -> Work:
        cost = self._product(tiles * self.tile_rows, self.spec.hidden, self.spec.num_experts)
        return Work("foresee", cost.num_bytes, cost.flops, PREDICT_KERNELS, PREDICT_KERNELS)

    def _draft_step(self, rows: int) -> Work:
        spec = self.spec
        cost, kernels = self._head_cost(rows=1), HEAD_KERNELS
        for layer in range(spec.num_layers):
            layer_cost, layer_kernels = self._layer(layer, rows, tiles=1)
            cost, kernels = cost + layer_cost, kernels + layer_kernels
        if self.draft_shared_bits is not None:
            read = spec.non_expert_params - spec.vocab * spec.hidden  # of the embedding, rows only
            cost = cost + _Cost(-math.floor(read * (self.weight_bytes - self.draft_shared_bits / 8)))
        num_experts = min(rows * spec.top_k, spec.num_experts)
        weights = math.ceil(num_experts * spec.expert_params * self.int4_bits / 8)
        experts = _Cost(weights + self._rows_bytes(rows), 2 * rows * spec.top_k * spec.expert_params)
        for _ in range(spec.num_moe_layers):
            cost = cost + experts + self._combine_cost(rows)
            kernels += EXPERT_KERNELS + COMBINE_KERNELS  # the lookahead's k counters ride in combine
        return Work("draft_step", cost.num_bytes, cost.flops, kernels, 1 if self.graphed_draft else kernels)

    def _attend_and_route(self, layer: int, tiles: int) -> Work:
        cost, kernels = self._layer(layer, tiles * self.tile_rows, tiles)
        return Work("mix", cost.num_bytes, cost.flops, kernels, kernels)

    def _experts(self, num_experts: int, tiles: int) -> Work:
        rows = tiles * self.tile_rows
        moved = num_experts * self.payload_bytes + self._rows_bytes(rows)
        expert_rows = min(num_experts * rows, rows * self.spec.top_k + num_experts * self.tile_rows)
        flops = 2 * self.spec.expert_params * expert_rows
        return Work("experts", moved, flops, EXPERT_KERNELS, EXPERT_KERNELS)

    def _combine(self, tiles: int) -> Work:
        cost = self._combine_cost(tiles * self.tile_rows)
        return Work("combine", cost.num_bytes, cost.flops, COMBINE_KERNELS, COMBINE_KERNELS)

    def _head(self, tiles: int) -> Work:
        cost = self._head_cost(tiles * self.tile_rows)
        return Work("head", cost.num_bytes, cost.flops, HEAD_KERNELS, HEAD_KERNELS)
