"""`python -m bench families`: one family's full-size model on this machine, in a minute or two.

As `kernels` and `rounds` together, in short, and for any model of conf/model whose checkpoint is a stand-in: draft
step, plain decoding and verification with everything resident, the INT4 backends, then plain decoding and speculation
in the published budget, with the fused INT4 kernels and without. The stand-in is inflated: every byte and flop is the
real model's, text and routing are not.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import torch
from rich.console import Console

from bench import int4
from bench.cells import NO_FUSED_KERNEL, Cell, load_group, mean, measure, run_cell
from bench.inputs import Inputs, run_section
from bench.int4_prefill import prefill_rows
from bench.report import Report
from bench.resident import CAPACITY, DRAFT_STEPS, PROMPT_TOKENS, ResidentBench, draft_row
from bench.streaming import StreamingBench
from bench.unfused import UnfusedDraft
from specter.arguments import parse_arguments
from specter.config import ModelConfig
from specter.models.cuda.bed import Bed
from specter.models.cuda.draft import Draft
from specter.models.cuda.full_size import DTYPE, FullSize, load_full_size
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.store import Pin
from specter.models.cuda.weights import GpuKVCache
from specter.models.full_size import FULL_SIZE
from specter.timeline.cuda import CudaTimeline
from specter.timeline.hardware import Hardware, load_hardware

NUM_PROMPTS = 4  # the first of them generate
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


@dataclass(slots=True)
class Systems:
    """Plain decoding through the cache and speculation, on the same slots, against plain decoding all resident."""

    options: Options
    config: ModelConfig
    full: FullSize
    budget: DeviceBudget
    report: Report
    prompts: list[list[int]]
    hardware: Hardware
    expected: list[list[int]] = field(default_factory=list)  # tokens of every text
    unpacked: list[int4.Int4Layer] = field(default_factory=list)

    @property
    def texts(self) -> list[list[int]]:
        return self.prompts[: self.options.num_texts]

    def decode_resident(self, resident: ResidentBench) -> None:
        """What every system's tokens have to be."""
        self.expected = [resident.continue_plain(prompt, self.options.num_tokens) for prompt in self.texts]

    def fused(self) -> None:
        """Both systems as they are."""
        bed, k = self._bed(Draft), self.config.published_k
        for system, depth in ((PLAIN, 0), (OURS, k)):
            self._measure(Cell(system, TIER, "greedy", depth, model=self.options.model), bed, system)
        summary = self.report.summary
        summary[f"speedup_over_{PLAIN}"] = summary[f"tpot_ms.{PLAIN}"] / summary[f"tpot_ms.{OURS}"]
        per_layer = self.config.residents[TIER]
        self.report.facts["slots"] = f"{self._num_slots}, {per_layer} a MoE layer; K {k}"

    def unfused_step(self) -> None:
        """The draft step without INT4 kernels."""
        self.unpacked = self.full.int4_layers()
        cache = GpuKVCache(self.full.spec, CAPACITY, DTYPE, self.budget.device)
        draft = UnfusedDraft(self.unpacked, self.full.weights, self.full.int4, cache, DRAFT_STEPS + 4)
        draft.capture()
        self.report.add(draft_row("draft step, graph, 1 row, INT4 unfused", draft, self.full, self.prompts[0]))

    def unfused(self) -> None:
        """Speculation with that draft."""
        cell = Cell(OURS, TIER, "greedy", self.config.published_k, NO_FUSED_KERNEL, self.options.model)
        self._measure(cell, self._bed(partial(UnfusedDraft, self.unpacked)), f"{OURS}.unfused")

    @property
    def _num_slots(self) -> int:
        return round(self.config.residents[TIER] * self.full.spec.num_moe_layers)

    def _bed(self, make_draft: Callable[..., Draft]) -> Bed:
        k = self.config.published_k
        max_rows = max(PROMPT_TOKENS, k + 1)
        bed = Bed(self.full, self._num_slots, self.budget, CAPACITY, max_rows, k, make_draft=make_draft)
        bed.capture({1, k + 1, PROMPT_TOKENS})
        return bed

    def _measure(self, cell: Cell, bed: Bed, name: str) -> None:
        """Adds the cell to the record and its means, as `<metric>.<name>`, to the summary."""
        options, facts, summary = self.options, self.report.facts, self.report.summary
        timeline = partial(CudaTimeline, self.budget.device)
        warmup, num_tokens = self.prompts[-1], options.num_tokens
        generations = run_cell(cell, bed, self.texts, warmup, timeline, num_tokens, options.num_warmup)
        result = measure(generations, self.hardware)
        is_equal = result.tokens == self.expected
        facts.setdefault("cells", {})[name] = result.as_json() | {"equals_resident": is_equal}
        summary["bit_equal.texts"] = summary.get("bit_equal.texts", True) and is_equal
        tpot_ms = mean(result.values("tpot_ms"))
        summary |= {f"tpot_ms.{name}": tpot_ms, f"tok_per_s.{name}": 1e3 / tpot_ms}
        summary |= {f"{key}.{name}": mean(values) for key in SYSTEM_KEYS if (values := result.values(key))}


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
    systems = Systems(options, config, full, budget, report, prompts, hardware)
    section("resident passes", resident.resident_passes)
    section("draft step", resident.draft_step)
    section("bit equality", resident.bit_equality)
    section("plain texts", partial(systems.decode_resident, resident))
    section("systems", systems.fused)
    section("peak", resident.peak)
    section("INT4 backends", resident.int4_layer)
    section("INT4 prefill", partial(_add_prefill, report, full, resident))
    section("agreement with the narrow model", resident.narrow_agreement)
    # Phi's unpacked codes do not fit beside all experts in 16 bits.
    del streaming, resident
    gc.collect()
    torch.cuda.empty_cache()
    section("draft step, unfused", systems.unfused_step)
    section("systems, unfused", systems.unfused)
    report.facts["seconds: all"] = round(time.perf_counter() - start, 1)
    report.write()
    return report


def _add_prefill(report: Report, full: FullSize, resident: ResidentBench) -> None:
    for row in prefill_rows(full, resident.arena, resident.table):
        report.add(row)


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises SpecterError for bad input; exits with 1 if a section failed."""
    console = Console(width=180)
    report = run(parse_arguments(Options, sys.argv[1:] if arguments is None else arguments), console)
    shown = {name: fact for name, fact in report.facts.items() if name != "cells"}  # some hundred numbers each
    dataclasses.replace(report, facts=shown).show(console)
    if any(reason.startswith("FAILED") for reason in report.skipped.values()):
        sys.exit(1)
