"""`python -m bench kernels`: the GPU runtime on this machine, one table and one JSON file.

The full-size model is an inflated stand-in (see `tools.standin`): every byte and flop is the real model's, its
text and routing are the stand-in's. Sections run one after the other, and the file is written after each.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from bench.inputs import Inputs, run_section
from bench.report import Report
from bench.resident import NUM_PROMPTS, PROMPT_TOKENS, ResidentBench
from bench.streaming import StreamingBench
from specter import provenance
from specter.arguments import parse_arguments
from specter.models.cuda.memory import DeviceBudget

SUMMARY_KEYS = (
    "draft_step_ms",
    "plain_decode_ms",
    "verify17_over_floor",
    "int4_layer_over_floor",
    "prefill16_over_floor",
    "prefill2000_over_floor",
    "store_load_gb_per_s",
    "peak_device_gb",
    "bit_equal",
)


@dataclass(frozen=True)
class Options(Inputs):
    """The command line."""

    out: Path = Path("data/reference/h200/kernels.json")
    cap_gb: int = 40  # device budget of the sections that stream experts


def run(options: Options, console: Console) -> Report:
    """Everything; sections that fail are named in the report, and the others go on.

    Raises:
        SpecterError: no device, or anything wrong with the input, before large work.
    """
    start = time.perf_counter()
    budget = DeviceBudget("cuda", options.cap_gb * 10**9)
    options.check()
    prompts = options.load_prompts(NUM_PROMPTS, PROMPT_TOKENS)
    model = options.load(budget, console)
    report = options.report(options.out, model, budget)
    report.summary |= dict.fromkeys(SUMMARY_KEYS)
    section = partial(run_section, report=report, console=console)
    streaming = StreamingBench(model, budget, report, prompts)
    section("loading", streaming.loading)
    section("rates", streaming.rates)
    section("prefill", streaming.prefill)
    section("cap", streaming.cap)
    torch.cuda.empty_cache()
    resident = ResidentBench(model, DeviceBudget("cuda"), report, prompts)
    section("resident passes", resident.resident_passes)
    section("draft step", resident.draft_step)
    section("prefill equality", lambda: resident.prefill_equality(streaming.short_logits))
    section("bit equality", resident.bit_equality)
    section("peak", resident.peak)
    section("INT4 backends", resident.int4_layer)
    section("transformers eager", resident.eager)
    section("agreement with the narrow model", resident.narrow_agreement)
    report.facts["clocks after"] = provenance.of_device(budget.device, options.commit).get("clocks.sm", "unknown")
    report.facts["seconds: all"] = round(time.perf_counter() - start, 1)
    report.skipped["humming backend"] = "optional, not among the dependencies"
    report.write()
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises SpecterError for bad input; exits with 1 if a section failed."""
    console = Console(width=180)
    report = run(parse_arguments(Options, sys.argv[1:] if arguments is None else arguments), console)
    report.show(console)
    if any(reason.startswith("FAILED") for reason in report.skipped.values()):
        sys.exit(1)
