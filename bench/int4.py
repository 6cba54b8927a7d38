"""One layer's routed experts on one row, by several backends, all on the same weights, rows and experts.

A backend runs every MoE layer once, with other experts in each, so nothing stays in the cache from run to run. It is
captured as a CUDA graph, so the comparison excludes the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.report import Row, ms_at
from specter.codecs.int4 import Int4Matrices
from specter.kernels import grouped_mlp, int4_moe
from specter.kernels.device import Stream
from specter.kernels.octets import Octets
from specter.kernels.routing import RowRouting, Rule
from specter.models.cuda.arena import DeviceArena
from specter.models.cuda.draft import DRAFT
from specter.models.cuda.graph import Graph
from specter.models.cuda.loaded_model import DTYPE, Int4Layer, LoadedModel
from specter.models.cuda.target import TARGET
from specter.models.routing import top_k
from specter.models.spec import ModelSpec
from specter.sample import Sample, device_ms

PREFILL_ROWS, PREFILL_LAYERS = 16, 4
REFERENCE = "INT4 reference (torch: dequantise, multiply)"


@dataclass(frozen=True, slots=True)
class Rows:
    """The inputs of every layer."""

    x: Tensor  # [layers, D]
    logits: Tensor  # fp32 [layers, E]
    chosen: Tensor  # int64 [layers, k]
    weights: Tensor  # fp32 [layers, k]

    @classmethod
    def random(cls, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> Rows:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(spec.num_moe_layers, spec.hidden, generator=generator)
        logits = 2 * torch.randn(spec.num_moe_layers, spec.num_experts, generator=generator)
        weights, chosen = top_k(logits, spec.top_k)
        return cls(x.to(device, dtype), logits.to(device), chosen.to(device), weights.to(device))


class Backends:
    """Each backend writes the layers' outputs, fp32 [layers, D], weighted by the router, to `out`."""

    def __init__(
        self, spec: ModelSpec, rows: Rows, packed: int4_moe.PackedExperts, arena: DeviceArena, slot_table: Tensor
    ) -> None:
        device, dtype = rows.x.device, rows.x.dtype
        self.spec, self.rows, self.packed = spec, rows, packed
        self.arena, self.slot_table = arena.flat.view(dtype), slot_table
        self._matrices = arena.gate_up, arena.down
        self._pdl = device.type == "cuda"
        self.out = torch.zeros(spec.num_moe_layers, spec.hidden, device=device)
        self._step = torch.zeros(1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, device=device)
        self._gain = torch.ones(spec.hidden, dtype=dtype, device=device)
        scaled = torch.zeros(1, spec.hidden, dtype=dtype, device=device)
        squares = torch.zeros(1, -(-spec.hidden // DRAFT.down.block_n), device=device)
        self._streams = [Stream(out[None], scaled, squares) for out in self.out]
        self._inner = {count: Octets.empty(count * spec.expert_inter, device) for count in (1, spec.top_k)}
        self._nothing = torch.zeros(0, dtype=dtype, device=device)
        self._no_weight = torch.zeros(spec.hidden, 0, dtype=dtype, device=device)
        self._octets = [Octets.of(x) for x in rows.x]
        self._host_chosen = rows.chosen.tolist()
        self._lone_weights = [list(weights.split(1)) for weights in rows.weights]
        self._row_routings = [self._given(c, w) for c, w in zip(rows.chosen, rows.weights, strict=True)]
        self._lone = self._given(torch.zeros(1, dtype=torch.int64, device=device), self._one)
        self._routings = [self._route(layer) for layer in range(spec.num_moe_layers)]
        self._results = torch.zeros(spec.num_moe_layers, 1, spec.top_k, spec.hidden, device=device)
        self._rows_inner = torch.zeros(spec.top_k, spec.expert_inter, dtype=dtype, device=device)

    def all(self, layers: list[Int4Layer]) -> dict[str, Callable[[], None]]:
        """Backends by name. `layers`: codes of the chosen experts by layer, [k, out, in] each, for the reference."""
        return {
            "INT4 fused, 2 launches": self.fused,
            "INT4 fused, one expert at a time": self.per_expert,
            REFERENCE: lambda: self.reference(layers),
            "BF16 grouped, 2 launches": self.bf16_grouped,
            "BF16 torch (gather, bmm)": self.bf16_bmm,
        }

    def fused(self) -> None:
        """The draft step's kernels."""
        self.out.zero_()
        for layer, routing in enumerate(self._row_routings):
            self._fused(layer, routing, slice(None))

    def per_expert(self) -> None:
        """The same kernels, launched once per chosen expert."""
        self.out.zero_()
        for layer in range(self.spec.num_moe_layers):
            for expert, weight in zip(self._host_chosen[layer], self._lone_weights[layer], strict=True):
                lone = dataclasses.replace(self._lone, weights=weight)
                self._fused(layer, lone, slice(expert, expert + 1))

    def _fused(self, layer: int, routing: RowRouting, experts: slice) -> None:
        packed, inner = self.packed, self._inner[routing.weights.shape[0]]
        int4_moe.gate_up(
            self._octets[layer], packed.gate_up[layer, experts], packed.gate_up_params[layer, experts], routing,
            inner, DRAFT.gate_up, self._pdl,
        )  # fmt: skip
        int4_moe.down(
            self._nothing, self._no_weight, inner, packed.down[layer, experts], packed.down_params[layer, experts],
            routing, self._streams[layer], self._gain, DRAFT.down, self._pdl,
        )  # fmt: skip

    def reference(self, layers: list[Int4Layer]) -> None:
        """Plain torch: rebuilds every weight in memory, then multiplies."""
        for layer, parts in enumerate(layers):
            gate, up, down = (part.dequantize(self.rows.x.dtype) for part in parts)
            x = self.rows.x[layer]
            inner = F.silu(gate @ x) * (up @ x)  # [k, F]
            results = torch.bmm(down, inner[..., None])[..., 0].float()
            self.out[layer] = (results * self.rows.weights[layer][:, None]).sum(0)

    def bf16_grouped(self) -> None:
        """The target's kernels on the target's weights, with given routing."""
        for layer, routing in enumerate(self._routings):
            grouped_mlp.run_experts(
                self.rows.x[layer : layer + 1], self._one, self.arena, self.slot_table[layer], routing,
                self._rows_inner, self._results[layer], TARGET.experts_up, TARGET.experts_down, self._pdl,
            )  # fmt: skip
        torch.sum(self._results[:, 0] * self.rows.weights[..., None], dim=1, out=self.out)

    def bf16_bmm(self) -> None:
        """Plain torch on the target's weights."""
        gate_up, down = self._matrices
        for layer in range(self.spec.num_moe_layers):
            slots = self.slot_table[layer][self.rows.chosen[layer]]
            wide = torch.bmm(gate_up[slots], self.rows.x[layer].expand(len(slots), -1)[..., None])[..., 0]
            gate, up = wide.chunk(2, dim=-1)
            results = torch.bmm(down[slots], (F.silu(gate) * up)[..., None])[..., 0].float()
            self.out[layer] = (results * self.rows.weights[layer][:, None]).sum(0)

    def _given(self, chosen: Tensor, weights: Tensor) -> RowRouting:
        """Given routing in the form that the draft's expert kernels read: chosen [k], weights [k]."""
        nothing = torch.zeros(0, dtype=torch.int32, device=chosen.device)
        history = chosen[None].to(torch.int16)
        return RowRouting(self._one, self._one, weights, history, nothing, self._step, nothing, Rule())

    def _route(self, layer: int) -> grouped_mlp.Routing:
        routing = grouped_mlp.Routing.empty(1, self.spec.top_k, self.spec.num_experts, self.rows.x.device)
        grouped_mlp.route(self.rows.logits[layer : layer + 1], routing, Rule(), self._pdl)
        return routing


def chosen_codes(layer: Int4Layer, chosen: Tensor) -> Int4Layer:
    """The chosen experts' codes of one layer, [k, out, in]."""
    gate, up, down = (
        Int4Matrices(part.codes[chosen], part.scales[chosen], part.zeros[chosen], part.group) for part in layer
    )
    return gate, up, down


def int4_expert_bytes(packed: int4_moe.PackedExperts) -> float:
    """Device bytes of one INT4 expert, scales and zeros included."""
    layers, experts = packed.gate_up.shape[:2]
    parts = packed.gate_up, packed.gate_up_params, packed.down, packed.down_params
    return sum(part.nbytes for part in parts) / (layers * experts)


def us_per_layer(run: Callable[[], None], num_layers: int, per_repeat: int) -> Sample:
    """Device time of one of the layers that `run` launches, µs."""
    return device_ms(lambda _: run(), per_repeat=per_repeat).scaled(1e3 / num_layers)


# -- several rows: ours run row by row, since the draft never prefills -------------------------------


def prefill_rows(model: LoadedModel, arena: DeviceArena, slot_table: Tensor) -> list[Row]:
    """The time of every backend for `PREFILL_ROWS` rows of a layer, over the first `PREFILL_LAYERS` MoE layers, whose
    experts are all in `arena`."""
    model = model.first_layers(model.spec.num_dense_layers + PREFILL_LAYERS)
    spec, device = model.spec, model.weights.device
    many = dataclasses.replace(spec, num_layers=spec.num_dense_layers + PREFILL_LAYERS * PREFILL_ROWS)
    drawn = Rows.random(many, DTYPE, device)
    parts = (part.split(PREFILL_LAYERS) for part in (drawn.x, drawn.logits, drawn.chosen, drawn.weights))
    rows = [Rows(*row) for row in zip(*parts, strict=True)]
    backends = [Backends(spec, row, model.int4, arena, slot_table) for row in rows]
    layers = [model.int4_layer(layer) for layer in range(PREFILL_LAYERS)]
    out = torch.zeros(PREFILL_LAYERS, PREFILL_ROWS, spec.hidden, device=device)
    num_experts = sum(reference_prefill(layer, rows, layers[layer], out[layer]) for layer in range(PREFILL_LAYERS))
    expert_bytes = int4_expert_bytes(model.int4)
    floor = ms_at(num_experts * expert_bytes) * 1e3 / PREFILL_LAYERS

    def each_row(run: Callable[[Backends], None]) -> None:
        for one in backends:
            run(one)

    def reference() -> None:
        for layer in range(PREFILL_LAYERS):
            reference_prefill(layer, rows, layers[layer], out[layer])

    runs: dict[str, Callable[[], None]] = {
        "INT4 fused, 2 launches": partial(each_row, Backends.fused),
        "INT4 fused, one expert at a time": partial(each_row, Backends.per_expert),
        REFERENCE: reference,
    }
    expected, measured = out.clone(), []
    for name, run in runs.items():
        run()
        is_graphed = name != REFERENCE  # it groups rows on the host
        ours = torch.stack([one.out for one in backends], 1) if is_graphed else out
        error = float((ours - expected).norm() / expected.norm())
        replay = Graph(run).replay if is_graphed else run
        per_layer = us_per_layer(replay, PREFILL_LAYERS, per_repeat=2)
        note = f"{num_experts / PREFILL_LAYERS:.1f} distinct experts a layer; relative difference {error:.1e}"
        measured.append(Row(f"prefill of {PREFILL_ROWS} rows, a layer: {name}", "us", per_layer, floor, note=note))
    return measured


def reference_prefill(layer: int, rows: list[Rows], parts: Int4Layer, out: Tensor) -> int:
    """out [rows, D] of one layer in plain torch; returns the number of experts it rebuilt."""
    x = torch.stack([row.x[layer] for row in rows])
    chosen = torch.stack([row.chosen[layer] for row in rows])
    weights = torch.stack([row.weights[layer] for row in rows])
    out.zero_()
    experts = chosen.unique().tolist()
    for expert in experts:
        mine, rank = (chosen == expert).nonzero(as_tuple=True)
        gate, up, down = (part.layer(expert).dequantize(DTYPE) for part in parts)
        inner = F.silu(x[mine] @ gate.T) * (x[mine] @ up.T)
        out[mine] += (inner @ down.T).float() * weights[mine, rank, None]
    return len(experts)
