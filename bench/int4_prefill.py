"""Several rows of a layer's routed experts through the INT4 backends. Ours run row by row: the draft never prefills.

The torch reference rebuilds every chosen expert once, and multiplies its rows together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from bench import int4
from bench.floors import ms_at
from bench.measure import Sample, device_ms
from bench.report import Row
from specter.models.cuda.arena import DeviceArena
from specter.models.cuda.graphs import Graph
from specter.models.cuda.loaded_model import DTYPE, Int4Layer, LoadedModel
from specter.quantize.int4 import Int4Matrices

ROWS, LAYERS = 16, 4


def prefill_rows(model: LoadedModel, arena: DeviceArena, slot_table: Tensor) -> list[Row]:
    """The time of every backend for `ROWS` rows of a layer, over the first `LAYERS` MoE layers.

    Args:
        arena, slot_table: hold every expert of these layers.
    """
    model = model.first_layers(model.spec.num_dense_layers + LAYERS)
    spec, device = model.spec, model.weights.device
    many = dataclasses.replace(spec, num_layers=spec.num_dense_layers + LAYERS * ROWS)
    drawn = int4.Rows.random(many, DTYPE, device)
    parts = (part.split(LAYERS) for part in (drawn.x, drawn.logits, drawn.chosen, drawn.weights))
    rows = [int4.Rows(*row) for row in zip(*parts, strict=True)]
    backends = [int4.Backends(spec, row, model.int4, arena, slot_table) for row in rows]
    layers = [model.int4_layer(layer) for layer in range(LAYERS)]
    out = torch.zeros(LAYERS, ROWS, spec.hidden, device=device)
    num_experts = sum(reference_prefill(layer, rows, layers[layer], out[layer]) for layer in range(LAYERS))
    expert_bytes = int4.int4_expert_bytes(model.int4)
    floor = ms_at(num_experts * expert_bytes) * 1e3 / LAYERS

    def fused() -> None:
        for one in backends:
            one.fused()

    def per_expert() -> None:
        for one in backends:
            one.per_expert()

    def reference() -> None:
        for layer in range(LAYERS):
            reference_prefill(layer, rows, layers[layer], out[layer])

    runs: dict[str, tuple[Callable[[], None], bool]] = {
        "INT4 fused, 2 launches": (fused, True),
        "INT4 fused, one expert at a time": (per_expert, True),
        "INT4 reference (torch: dequantise, multiply)": (reference, False),  # no graph: it groups rows on the host
    }
    expected, measured = out.clone(), []
    for name, (run, is_graphed) in runs.items():
        run()
        ours = torch.stack([one.out for one in backends], 1) if is_graphed else out
        error = float((ours - expected).norm() / expected.norm())
        replay = Graph(run).replay if is_graphed else run
        sample = device_ms(partial(_call, replay), per_repeat=2)
        per_layer = Sample(tuple(ms * 1e3 / LAYERS for ms in sample.values))
        note = f"{num_experts / LAYERS:.1f} distinct experts a layer; relative difference {error:.1e}"
        measured.append(Row(f"prefill of {ROWS} rows, a layer: {name}", "us", per_layer, floor, note=note))
    return measured


def _call(run: Callable[[], None], index: int) -> None:
    run()


def reference_prefill(layer: int, rows: list[int4.Rows], parts: Int4Layer, out: Tensor) -> int:
    """out [rows, D] of one layer in plain torch; returns the number of experts it rebuilt."""
    x = torch.stack([row.x[layer] for row in rows])
    chosen = torch.stack([row.chosen[layer] for row in rows])
    weights = torch.stack([row.weights[layer] for row in rows])
    out.zero_()
    experts = chosen.unique().tolist()
    for expert in experts:
        mine, rank = (chosen == expert).nonzero(as_tuple=True)
        gate, up, down = (
            Int4Matrices(part.codes[expert], part.scales[expert], part.zeros[expert], part.group).dequantize(DTYPE)
            for part in parts
        )
        inner = torch.nn.functional.silu(x[mine] @ gate.T) * (x[mine] @ up.T)
        out[mine] += (inner @ down.T).float() * weights[mine, rank, None]
    return len(experts)
