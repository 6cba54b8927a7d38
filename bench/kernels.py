"""`python -m bench kernels model=...`: kernels, steps and passes of one model on this GPU, beside their floors.

The full-size model is an inflated stand-in (see `tools.standin`): its bytes and flops are the real model's, its text
and routing are the stand-in's. Sections run in order, and the file is written after each.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from bench.agreement import load_prompts
from bench.report import Report, run_section
from bench.resident import PROMPT_TOKENS, ResidentBench, unfused_row
from bench.streaming import StreamingBench, link_rows
from specter import provenance
from specter.config import ModelConfig
from specter.files import files_digest
from specter.models.cuda.loaded_model import LoadedModel, load_model
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.store import as_pin
from specter.models.full_size import FULL_SIZE
from specter.typed import load_typed

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
CONF = Path("conf/model")


@dataclass(frozen=True)
class Options:
    """Kernels, steps and passes of one full-size model on this GPU."""

    model: str = "deepseek_v2_lite"  # a file of conf/model whose checkpoint is a stand-in
    quantized: Path | None = None  # INT4 experts of its checkpoint; by default the model's
    out: Path | None = None  # by default results/bench/kernels_MODEL.json
    prompts: Path = Path("data/prompts")
    num_prompts: int = 20  # of the comparisons
    cap_gb: int = 40  # device budget of the sections that stream experts
    commit: str = ""  # of the code, where there is no git
    pin: str = "require"  # or prefer, off: see specter/models/cuda/store.py


def run(options: Options, console: Console) -> Report:
    """Runs all sections; a section that fails is named in the report, and the others continue.
    Raises SpecterError: no device or faulty input, before large work."""
    start = time.perf_counter()
    pin, config = as_pin(options.pin), load_typed(ModelConfig, CONF / f"{options.model}.yaml")
    budget = DeviceBudget("cuda", options.cap_gb * 10**9)
    files = [path for path in options.prompts.glob("*.jsonl") if path.stem != "heldout"]
    prompts = load_prompts(files, Path(config.tokenizer), options.num_prompts, PROMPT_TOKENS)
    quantized = options.quantized or Path(config.quantized)
    model = load_model(Path(config.checkpoint), quantized, FULL_SIZE[config.charged_as], budget, console, pin=pin)
    out = options.out or Path("results/bench") / f"kernels_{options.model}.json"
    report = Report(out, provenance_of(options, model, quantized, budget))
    report.summary |= dict.fromkeys(SUMMARY_KEYS)
    report.facts["seconds: loading everything"] = round(time.perf_counter() - start, 1)
    section = partial(run_section, report=report, console=console)
    _stream_and_decode(model, budget, report, prompts, section)
    gc.collect()
    torch.cuda.empty_cache()  # Phi's unpacked codes do not fit beside all experts in 16 bits
    section("draft step, unfused", lambda: report.add(unfused_row(model, DeviceBudget("cuda"), prompts[0])))
    report.facts["clocks after"] = provenance.of_device(budget.device, options.commit).get("clocks.sm", "unknown")
    report.facts["seconds: all"] = round(time.perf_counter() - start, 1)
    report.write()
    return report


def _stream_and_decode(
    model: LoadedModel,
    budget: DeviceBudget,
    report: Report,
    prompts: list[list[int]],
    section: Callable[[str, Callable[[], object]], None],
) -> None:
    """The sections under the cap, and those with every expert in a slot; their memory is free afterwards."""
    streaming = StreamingBench(model, budget, report, prompts)
    section("loading", streaming.loading)
    section("rates", streaming.rates)
    section("link", lambda: report.rows.extend(link_rows(model, budget)))
    section("prefill", streaming.prefill)
    section("cap", streaming.cap)
    torch.cuda.empty_cache()
    begin = time.perf_counter()
    resident = ResidentBench(model, DeviceBudget("cuda"), report, prompts)
    report.facts["seconds: compiling and capturing"] = round(time.perf_counter() - begin, 1)
    section("resident passes", resident.resident_passes)
    section("draft step", resident.draft_step)
    section("prefill equality", lambda: resident.prefill_equality(streaming.short_logits))
    section("bit equality", resident.bit_equality)
    section("peak", resident.peak)
    section("INT4 backends", resident.int4_layer)
    section("INT4 prefill", resident.int4_prefill)
    section("transformers eager", resident.eager)
    section("agreement with the narrow model", resident.narrow_agreement)


def provenance_of(options: Options, model: LoadedModel, quantized: Path, budget: DeviceBudget) -> dict[str, str]:
    return provenance.of_device(
        budget.device,
        options.commit,
        model=f"{model.spec.name}, inflated from {model.checkpoint.spec.name} (tiled, BF16)",
        checkpoint_sha256=model.checkpoint.digest(),
        int4=f"{model.codes.method}, tiled",
        int4_sha256=files_digest(quantized, "*.safetensors", "*config.json"),
        pin=options.pin,
    )


def main(options: Options) -> None:
    """Raises SpecterError for bad input; exits with 1 if a section failed."""
    console = Console(width=180)
    report = run(options, console)
    report.show(console)
    if any(reason.startswith("FAILED") for reason in report.skipped.values()):
        sys.exit(1)
