"""`python -m specter.bench families`: one family's full-size model on this machine, in a minute or two.

As `kernels` and `rounds` together, in short, and for any model of conf/model whose checkpoint is a stand-in: draft
step, plain decoding and verification with everything resident, the INT4 backends, then plain decoding and speculation
in the published budget. The stand-in is inflated: every byte and flop is the real model's, text and routing are not.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from rich.console import Console

from specter.arguments import parse_arguments
from specter.bench import int4
from specter.bench.cells import Cell, CellResult, load_group, mean, measure, run_cell
from specter.bench.floors import ms_at
from specter.bench.inputs import Inputs, run_section
from specter.bench.measure import Sample, device_ms
from specter.bench.report import Report, Row
from specter.bench.resident import CAPACITY, PROMPT_TOKENS, ResidentBench
from specter.bench.streaming import StreamingBench
from specter.config import ModelConfig, RunConfig
from specter.gpu.bed import Bed
from specter.gpu.full_size import DTYPE, FullSize, load_full_size
from specter.gpu.graphs import Graph
from specter.gpu.memory import DeviceBudget
from specter.gpu.store import Pin
from specter.model.spec import FULL_SIZE
from specter.timeline.cuda import CudaTimeline
from specter.timeline.hardware import Hardware, load_hardware

NUM_PROMPTS = 4  # the first of them generate
PREFILL_ROWS, PREFILL_LAYERS = 16, 4  # of the INT4 backends
TIER = "high"
PLAIN, OURS = "lru", "specter_deadline"
SYSTEM_KEYS = ("acceptance", "union_mean", "hit_rate", "link_busy_in_need_frac", "over_floor_trace", "bytes_per_token")


@dataclass(frozen=True)
class Options:
    """The command line."""

    model: str  # a file of conf/model
    quantized: Path  # INT4 experts of its checkpoint
    out: Path
    hardware: Path = Path("conf/hardware/h200_pcie5.yaml")  # for the floors, but for the link, which is measured
    prompts: Path = Path("data/prompts")
    commit: str = ""
    pin: str = "require"
    num_texts: int = 2
    num_tokens: int = 64
    num_warmup: int = 16  # tokens before the first text


@dataclass(frozen=True, slots=True)
class FamilyCell(Cell):
    """A cell of another model."""

    model: str = ""

    def config(self) -> RunConfig:
        return dataclasses.replace(Cell.config(self), model=ModelConfig(**load_group("model", self.model)))


@dataclass(slots=True)
class FamilyBench:
    """What all sections share."""

    options: Options
    config: ModelConfig
    full: FullSize
    budget: DeviceBudget
    report: Report
    prompts: list[list[int]]
    hardware: Hardware
    resident: ResidentBench

    def int4_prefill(self) -> None:
        """Several rows through the INT4 backends: ours row by row, since our draft never prefills.

        Plain torch rebuilds every expert that any row chose once, and multiplies its rows together.
        """
        full = self.full.first_layers(self.full.spec.num_dense_layers + PREFILL_LAYERS)
        spec, device, bench = full.spec, self.budget.device, self.resident
        many = dataclasses.replace(spec, num_layers=spec.num_dense_layers + PREFILL_LAYERS * PREFILL_ROWS)
        drawn = int4.Rows.random(many, DTYPE, device)
        parts = (part.split(PREFILL_LAYERS) for part in (drawn.x, drawn.logits, drawn.chosen, drawn.weights))
        rows = [int4.Rows(*row) for row in zip(*parts, strict=True)]
        backends = [int4.Backends(spec, row, full.int4, bench.arena, bench.table) for row in rows]
        layers = [full.int4_layer(layer) for layer in range(PREFILL_LAYERS)]
        out = torch.zeros(PREFILL_LAYERS, PREFILL_ROWS, spec.hidden, device=device)
        num_experts = sum(_reference_prefill(layer, rows, layers[layer], out[layer]) for layer in range(PREFILL_LAYERS))
        expert_bytes = int4.int4_expert_bytes(full.int4)
        floor = ms_at(num_experts * expert_bytes) * 1e3 / PREFILL_LAYERS

        def fused() -> None:
            for one in backends:
                one.fused()

        def per_expert() -> None:
            for one in backends:
                one.per_expert()

        def reference() -> None:
            for layer in range(PREFILL_LAYERS):
                _reference_prefill(layer, rows, layers[layer], out[layer])

        runs: dict[str, tuple[Callable[[], None], bool]] = {
            "INT4 fused, 2 launches": (fused, True),
            "INT4 fused, one expert at a time": (per_expert, True),
            "INT4 reference (torch: dequantise, multiply)": (reference, False),  # chooses on the host: no graph
        }
        expected = out.clone()
        for name, (run, is_graphed) in runs.items():
            run()
            ours = torch.stack([one.out for one in backends], 1) if is_graphed else out
            error = float((ours - expected).norm() / expected.norm())
            replay = Graph(run).replay if is_graphed else run
            sample = device_ms(partial(_call, replay), per_repeat=2)
            per_layer = Sample(tuple(ms * 1e3 / PREFILL_LAYERS for ms in sample.values))
            note = f"{num_experts / PREFILL_LAYERS:.1f} distinct experts a layer; relative difference {error:.1e}"
            self.report.add(Row(f"prefill of {PREFILL_ROWS} rows, a layer: {name}", "us", per_layer, floor, note=note))

    def systems(self) -> None:
        """Plain decoding through the cache and speculation, on the same slots, against plain decoding all resident."""
        options, summary = self.options, self.report.summary
        texts = self.prompts[: options.num_texts]
        expected = [self.resident.continue_plain(prompt, options.num_tokens) for prompt in texts]
        k, num_slots = self.config.published_k, round(self.config.residents[TIER] * self.full.spec.num_moe_layers)
        bed = Bed(self.full, num_slots, self.budget, CAPACITY, max(PROMPT_TOKENS, k + 1), k)
        bed.capture({1, k + 1, PROMPT_TOKENS})
        cells, equal = {}, True
        for system, depth in ((PLAIN, 0), (OURS, k)):
            result = self._cell(FamilyCell(system, TIER, "greedy", depth, model=options.model), bed, texts)
            cells[system] = result.as_json() | {"equals_resident": result.tokens == expected}
            equal &= result.tokens == expected
            tpot_ms = mean(result.values("tpot_ms"))
            summary |= {f"tpot_ms.{system}": tpot_ms, f"tok_per_s.{system}": 1e3 / tpot_ms}
            summary |= {f"{key}.{system}": mean(values) for key in SYSTEM_KEYS if (values := result.values(key))}
        summary[f"speedup_over_{PLAIN}"] = summary[f"tpot_ms.{PLAIN}"] / summary[f"tpot_ms.{OURS}"]
        summary["bit_equal.texts"] = equal
        self.report.facts["cells"] = cells
        self.report.facts["slots"] = f"{num_slots}, {self.config.residents[TIER]} a MoE layer; K {k}"

    def _cell(self, cell: Cell, bed: Bed, texts: list[list[int]]) -> CellResult:
        options = self.options
        bed.poison()
        timeline = partial(CudaTimeline, self.budget.device)
        generations = run_cell(cell, bed, texts, self.prompts[-1], timeline, options.num_tokens, options.num_warmup)
        return measure(generations, self.hardware)


def _call(run: Callable[[], None], index: int) -> None:
    run()


def _reference_prefill(layer: int, rows: list[int4.Rows], parts: int4.Int4Layer, out: torch.Tensor) -> int:
    """out [rows, D] of one layer in plain torch; returns how many experts it rebuilt."""
    x = torch.stack([row.x[layer] for row in rows])
    chosen = torch.stack([row.chosen[layer] for row in rows])
    weights = torch.stack([row.weights[layer] for row in rows])
    out.zero_()
    experts = chosen.unique().tolist()
    for expert in experts:
        mine, rank = (chosen == expert).nonzero(as_tuple=True)
        gate, up, down = (
            int4.Int4Matrices(part.codes[expert], part.scales[expert], part.zeros[expert], part.group).dequantize(DTYPE)
            for part in parts
        )
        inner = torch.nn.functional.silu(x[mine] @ gate.T) * (x[mine] @ up.T)
        out[mine] += (inner @ down.T).float() * weights[mine, rank, None]
    return len(experts)


def run(options: Options, console: Console) -> Report:
    """Everything; sections that fail are named in the report, and the others go on.

    Raises:
        SpecterError: no device, or anything wrong with the input, before large work.
    """
    start = time.perf_counter()
    config = ModelConfig(**load_group("model", options.model))
    inputs = Inputs(
        Path(config.checkpoint), options.quantized, Path(config.tokenizer), options.prompts, options.commit, options.pin
    )
    inputs.check()
    prompts = inputs.load_prompts(NUM_PROMPTS, PROMPT_TOKENS)
    hardware = load_hardware(options.hardware)
    budget = DeviceBudget("cuda")
    full = load_full_size(
        inputs.checkpoint, inputs.quantized, FULL_SIZE[config.charged_as], budget, cast(Pin, options.pin), console
    )
    report = inputs.report(options.out, full, budget)
    report.facts["seconds: loading everything"] = round(time.perf_counter() - start, 1)
    section = partial(run_section, report=report, console=console)
    streaming = StreamingBench(full, budget, report, prompts)
    section("loading", streaming.loading)
    section("rates", streaming.rates)
    begin = time.perf_counter()
    resident = ResidentBench(full, budget, report, prompts)
    report.facts["seconds: compiling and capturing"] = round(time.perf_counter() - begin, 1)
    hardware = dataclasses.replace(
        hardware, link_bytes_per_s=round(streaming.link_bytes_per_s) or hardware.link_bytes_per_s, link_latency_ns=0
    )
    bench = FamilyBench(options, config, full, budget, report, prompts, hardware, resident)
    section("resident passes", resident.resident_passes)
    section("draft step", resident.draft_step)
    section("bit equality", resident.bit_equality)
    section("systems", bench.systems)
    section("peak", resident.peak)
    section("INT4 backends", resident.int4_layer)
    section("INT4 prefill", bench.int4_prefill)
    section("agreement with the narrow model", resident.narrow_agreement)
    report.facts["seconds: all"] = round(time.perf_counter() - start, 1)
    report.write()
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises SpecterError for bad input; exits with 1 if a section failed."""
    console = Console(width=180)
    report = run(parse_arguments(Options, sys.argv[1:] if arguments is None else arguments), console)
    shown = {name: fact for name, fact in report.facts.items() if name != "cells"}  # some hundred numbers each
    dataclasses.replace(report, facts=shown).show(console)
    if any(reason.startswith("FAILED") for reason in report.skipped.values()):
        sys.exit(1)
