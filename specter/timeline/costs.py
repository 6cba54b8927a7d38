"""The cost of each operation of the engine: bytes, flops, kernels and launches of the full-size model charged.

A product [rows, n] x [n, m] reads its weights once and moves its input and output rows once (docs/decisions/0001):
  bytes = n*m*weight_bytes + rows*(n + m)*ACTIVATION_BYTES,   flops = 2*rows*n*m,
whatever the number of tiles, which are stacked in one launch. Rows are padded to whole tiles and attention covers the
capacity of the KV cache, as a fixed-tile pass computes them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec

from specter.errors import SpecterError
from specter.models.spec import ModelSpec
from specter.timeline.base import Work
from specter.timeline.hardware import ceil_div

P = ParamSpec("P")
ACTIVATION_BYTES = 2  # BF16
INT4_BITS = 4.125  # per weight, scales included: GPTQ symmetric, group 128
WAVE_ROW_BYTES = 4  # rows of [T, k, D] are kept in fp32 until they are reduced

# Kernels per operation, assuming a runtime with the usual fusions.
# Latents: norm · q · kv_a · kv norm + rope + append · absorb q · attention · expand v · o + residual
LATENT_ATTENTION_KERNELS = 8
ATTENTION_KERNELS = 5  # norm · q, k and v · rope + append · attention · o + residual
DENSE_KERNELS = 4  # norm · gate and up · silu · down + residual
ROUTE_KERNELS = 3  # norm · router · softmax + top-k, or sparsemixer
SHARED_KERNELS = 3  # shared gate and up · silu · shared down, with the sigmoid where there is one
EXPERT_KERNELS = 2  # grouped gate and up + silu · grouped down
COMBINE_KERNELS = 1
# Residual experts, measured on an H200 (docs/decisions/0016): n experts of DeepSeek-V2-Lite take 7.2 + 19.0 n us, of
# Phi-3.5-MoE 8 + 169.5 n us, bound by integer work: in units of the datasheet's int32 rate, 73 operations a weight.
DECODE_INT_OPS = 73  # per weight
DECODE_KERNELS = 5  # the constant part, in kernels of 1.5 us
STAGING_BYTES = 320 * 2**20  # of decoded experts
MOST_STAGED, LEAST_STAGED = 16, 2
HEAD_KERNELS = 3  # norm · lm_head · sampling
EMBED_KERNELS = 1
PREDICT_KERNELS = 2  # norm and router · top-k


@dataclass(frozen=True, slots=True)
class _Cost:
    """Bytes, flops and kernels, which add up."""

    num_bytes: int = 0
    flops: int = 0
    kernels: int = 0
    int_ops: int = 0

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(
            self.num_bytes + other.num_bytes,
            self.flops + other.flops,
            self.kernels + other.kernels,
            self.int_ops + other.int_ops,
        )

    def work(self, name: str, launches: int | None = None, waves: int = 0) -> Work:
        """As one operation; by default every kernel is a launch."""
        launches = self.kernels if launches is None else launches
        return Work(name, self.num_bytes, self.flops, self.kernels, launches, self.int_ops, waves)


def _cached(build: Callable[Concatenate[CostModel, P], Work]) -> Callable[Concatenate[CostModel, P], Work]:
    """Keeps the `Work` of each combination of arguments: the virtual clock looks up its charge by identity."""

    @functools.wraps(build)
    def look_up(self: CostModel, /, *arguments: P.args, **named: P.kwargs) -> Work:
        key = (build, arguments, *named.items())
        work = self._works.get(key)
        if work is None:
            work = self._works[key] = build(self, *arguments, **named)
        return work

    return look_up


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
        coded_bytes: of one expert on the link, in the mean, under a codec that decodes; None: its 16-bit weights.
        draft_by_expert: a draft step launches its kernels once per chosen expert, instead of once per layer.
        one_graph: a target pass is one captured graph, whose routing the host does not read: all experts are resident.
    """

    spec: ModelSpec
    tile_rows: int
    kv_capacity: int
    weight_bytes: int = 2
    int4_bits: float = INT4_BITS
    draft_shared_bits: float | None = None
    coded_bytes: int | None = None
    draft_by_expert: bool = False
    one_graph: bool = False
    _works: dict[Any, Work] = field(default_factory=dict, init=False, repr=False, compare=False)
    _pass_bytes: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)  # by tiles

    def __post_init__(self) -> None:
        for name in ("tile_rows", "kv_capacity", "weight_bytes", "int4_bits"):
            if getattr(self, name) <= 0:
                raise SpecterError(f"{name} is {getattr(self, name)}", f"give a {name} above 0")

    # -- operations -------------------------------------------------------------------------

    @_cached
    def draft_step(self, rows: int = 1) -> Work:
        """One draft token: one row through all layers, top_k INT4 experts per MoE layer, lm_head, sampling.

        DeepSeek-V2-Lite reads 2.2 GB of shared weights and 0.70 GB of INT4 experts. More rows: a draft with its own KV
        processes the tokens that it lacks; all their experts may be distinct.
        """
        spec = self.spec
        cost = sum((self._layer(layer, rows, tiles=1) for layer in range(spec.num_layers)), self._head(rows=1))
        if self.draft_shared_bits is not None:
            read = spec.non_expert_params - spec.vocab * spec.hidden  # of the embedding, rows only
            cost += _Cost(-math.floor(read * (self.weight_bytes - self.draft_shared_bits / 8)))
        num_experts = min(rows * spec.top_k, spec.num_experts)
        weights = math.ceil(num_experts * spec.expert_params * self.int4_bits / 8)
        kernels = EXPERT_KERNELS * (num_experts if self.draft_by_expert else 1)
        experts = _Cost(weights + self._rows_bytes(rows), 2 * rows * spec.top_k * spec.expert_params, kernels)
        for _ in range(spec.num_moe_layers):
            cost += experts + self._combine(rows)  # the lookahead's k counters ride in combine
        return cost.work("draft_step", launches=1)  # one captured graph

    @_cached
    def copy_kv(self, num_positions: int) -> Work:
        """Copies the KV of a prefix on the device: reads and writes it, one kernel per layer."""
        num_bytes = self.spec.num_layers * num_positions * self.spec.kv_width * self.weight_bytes
        return _Cost(2 * num_bytes, kernels=self.spec.num_layers).work("copy_kv")

    @_cached
    def predict_next(self, tiles: int = 1) -> Work:
        """The next layer's norm and router on this layer's hidden state."""
        cost = self._product(tiles * self.tile_rows, self.spec.hidden, self.spec.num_experts)
        return (cost + _Cost(kernels=PREDICT_KERNELS)).work("predict_next")

    @_cached
    def attend_and_route(self, layer: int, tiles: int = 1) -> Work:
        """Attention, norms, router and shared experts of one layer (of all); a dense layer whole. Layer 0 embeds."""
        cost = self._layer(layer, tiles * self.tile_rows, tiles)
        return cost.work("attend_and_route", launches=int(layer == 0) if self.one_graph else None)

    @_cached
    def experts(self, num_experts: int, tiles: int = 1) -> Work:
        """One wave: the 16-bit weights of `num_experts` experts in one grouped launch.

        Moves the weights and reads the tiles' rows once; `combine` charges the rows that it writes, so that the bytes
        of a layer grow with the number of waves only by that read. Computes whole tiles of rows per expert: at most all
        rows, or all routed rows and one tile of padding per expert.
        """
        rows = tiles * self.tile_rows
        moved = num_experts * self.expert_bytes + self._rows_bytes(rows)
        expert_rows = min(num_experts * rows, rows * self.spec.top_k + num_experts * self.tile_rows)
        return _Cost(moved, 2 * self.spec.expert_params * expert_rows, EXPERT_KERNELS).work(
            "experts", self._launches, waves=1
        )

    @_cached
    def decode(self, num_experts: int) -> Work:
        """Decodes `num_experts` experts into the staging area: reads blobs and INT4 codes, writes 16-bit weights."""
        moved = self.payload_bytes + self.expert_bytes + math.ceil(self.spec.expert_params * self.int4_bits / 8)
        int_ops = num_experts * self.spec.expert_params * DECODE_INT_OPS
        return _Cost(num_experts * moved, 0, DECODE_KERNELS, int_ops).work("decode", launches=1)

    @_cached
    def combine(self, tiles: int = 1) -> Work:
        """Writes and reads rows [T, top_k, D] in fp32, reads the shared experts' and residual rows, writes rows."""
        return self._combine(tiles * self.tile_rows).work("combine", self._launches)

    def head(self, rows: int) -> Work:
        """Final norm, lm_head and sampling of `rows` rows, padded to whole tiles."""
        return self._tiled_head(self.num_tiles(rows))

    @_cached
    def _tiled_head(self, tiles: int) -> Work:
        return self._head(tiles * self.tile_rows).work("head", self._launches)

    # -- totals -----------------------------------------------------------------------------

    @property
    def expert_bytes(self) -> int:
        """The 16-bit weights of one expert."""
        return self.spec.expert_params * self.weight_bytes

    @property
    def payload_bytes(self) -> int:
        """Bytes of one expert on the link, in the mean."""
        return self.expert_bytes if self.coded_bytes is None else self.coded_bytes

    @property
    def decodes(self) -> bool:
        """Whether payloads must be decoded before use, which needs the INT4 codes and a staging area."""
        return self.coded_bytes is not None

    @property
    def num_staged(self) -> int:
        """Experts that the staging area of decoded weights holds: the most of a wave; 0 without one."""
        return max(LEAST_STAGED, min(MOST_STAGED, STAGING_BYTES // self.expert_bytes)) if self.decodes else 0

    def num_tiles(self, rows: int) -> int:
        return ceil_div(rows, self.tile_rows)

    def verification_bytes(self, num_experts: int, rows: int) -> int:
        """The least device-memory bytes of one target pass over `rows` rows: one wave per layer.

        `num_experts`: distinct experts, summed over the MoE layers.
        """
        tiles = self.num_tiles(rows)
        if tiles not in self._pass_bytes:
            spec = self.spec
            layers = sum(self.attend_and_route(layer, tiles).hbm_bytes for layer in range(spec.num_layers))
            waves = spec.num_moe_layers * (self._rows_bytes(tiles * self.tile_rows) + self.combine(tiles).hbm_bytes)
            self._pass_bytes[tiles] = layers + waves + self.head(rows).hbm_bytes
        return num_experts * self.expert_bytes + self._pass_bytes[tiles]

    @property
    def _launches(self) -> int | None:
        """Of an operation behind the first of a pass; None: one per kernel."""
        return 0 if self.one_graph else None

    # -- formulas ---------------------------------------------------------------------------

    def _rows_bytes(self, rows: int) -> int:
        """Bytes of activations [rows, D]."""
        return rows * self.spec.hidden * ACTIVATION_BYTES

    def _product(self, rows: int, num_in: int, num_out: int) -> _Cost:
        moved = num_in * num_out * self.weight_bytes + rows * (num_in + num_out) * ACTIVATION_BYTES
        return _Cost(moved, 2 * rows * num_in * num_out)

    def _mlp(self, rows: int, inter: int, kernels: int) -> _Cost:
        up, down = self._product(rows, self.spec.hidden, 2 * inter), self._product(rows, inter, self.spec.hidden)
        return up + down + _Cost(kernels=kernels)

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
        return products + _Cost(cache_bytes, flops, LATENT_ATTENTION_KERNELS if spec.is_latent else ATTENTION_KERNELS)

    def _layer(self, layer: int, rows: int, tiles: int) -> _Cost:
        """Everything of a layer but its routed experts."""
        spec, cost = self.spec, self._attention(rows, tiles)
        if layer == 0:
            cost += _Cost(2 * self._rows_bytes(rows), kernels=EMBED_KERNELS)
        if layer < spec.num_dense_layers:
            return cost + self._mlp(rows, spec.dense_inter, DENSE_KERNELS)
        cost += self._product(rows, spec.hidden, spec.num_router_out) + _Cost(kernels=ROUTE_KERNELS)
        return cost + self._mlp(rows, spec.shared_inter, SHARED_KERNELS) if spec.shared_inter else cost

    def _head(self, rows: int) -> _Cost:
        return self._product(rows, self.spec.hidden, self.spec.vocab) + _Cost(kernels=HEAD_KERNELS)

    def _combine(self, rows: int) -> _Cost:
        values = rows * self.spec.top_k * self.spec.hidden
        return _Cost(2 * values * WAVE_ROW_BYTES + 3 * self._rows_bytes(rows), 2 * values, COMBINE_KERNELS)
