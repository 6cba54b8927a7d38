"""`python -m bench quantize`: the time to quantise the experts of a full-size model on this machine.

The model is an inflated stand-in, so bytes and flops are the real model's. Runs all of `python -m specter.quantize`,
with calibration, errors and files, except reading the full-size checkpoint from disk.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from specter import provenance
from specter.errors import SpecterError
from specter.files import write_json
from specter.models.checkpoint import Checkpoint
from specter.models.full_size import FULL_SIZE
from specter.models.inflation.inflated import InflatedCheckpoint
from specter.quantize.calibration import CALIBRATION, TOKENIZER, load_calibration
from specter.quantize.cli import Options as QuantizeOptions
from specter.quantize.cli import quantize_model, summary
from specter.quantize.quantizers import default_min_tokens
from specter.quantize.workspace import Workspace

GOAL_S = 360.0  # DeepSeek-V2-Lite by GPTQ on an H200


@dataclass(frozen=True)
class Options:
    """The time to quantise the experts of a full-size model."""

    checkpoint: Path = Path("data/standins/deepseek_v2_lite")  # the narrow stand-in
    model: str = "deepseek_v2_lite"  # the full-size model that it becomes
    method: str = "gptq"
    group: int = 128
    layers: int = 0  # MoE layers to quantise, extrapolated to all; 0: all
    sequences: int = 0  # of the calibration text; 0: all
    device: str = "cuda"
    scratch: Path = Path("results")  # for the temporary output
    out: Path = Path("results/bench/quantize.json")
    commit: str = ""  # of the code, where there is no git


def run(options: Options, console: Console) -> dict[str, Any]:
    """Raises SpecterError for bad input, before large work."""
    spec = FULL_SIZE.get(options.model)
    if spec is None:
        raise SpecterError(f"model={options.model} is unknown", f"use one of: {', '.join(FULL_SIZE)}")
    if options.device not in ("cpu", "cuda") or (options.device == "cuda" and not torch.cuda.is_available()):
        raise SpecterError(f"device={options.device} is not available", "use a machine with a CUDA GPU, or device=cpu")
    if not 0 <= options.layers <= spec.num_moe_layers:
        raise SpecterError(f"layers={options.layers} is outside 0..{spec.num_moe_layers}", "use layers=0 for all")
    narrow = Checkpoint.open(options.checkpoint)
    wide = InflatedCheckpoint(narrow, spec, device=options.device)
    text = load_calibration(CALIBRATION, spec, options.sequences, TOKENIZER)
    num_layers = options.layers or spec.num_moe_layers
    options.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        min_tokens = default_min_tokens(narrow.spec)  # the inflated inputs have only that many dimensions
        out, method, group, device = Path(scratch) / "int4", options.method, options.group, options.device
        quantize = QuantizeOptions(options.checkpoint, out, method, group, min_tokens=min_tokens, device=device)
        work = Workspace(quantize.out, "bench")
        start = time.perf_counter()
        quantize_model(wide, text, quantize, work, console, num_layers)
        seconds = time.perf_counter() - start
    layer_s = [one["seconds"] for one in work.layers]
    report = {
        "clock": "device" if options.device == "cuda" else "host",
        "model": f"{spec.name}, inflated from {narrow.spec.name} (tiled, BF16)",
        "method": options.method,
        "group": options.group,
        "num_calibration_tokens": text.tokens.numel(),
        "num_layers": num_layers,
        "num_moe_layers": spec.num_moe_layers,
        "seconds": round(seconds, 2),
        "seconds_per_layer": round(seconds / num_layers, 3),
        "median_quantize_s_per_layer": statistics.median(layer_s),  # without calibration pass and files
        "all_layers_s": round(seconds / num_layers * spec.num_moe_layers, 1),
        "is_extrapolated": num_layers < spec.num_moe_layers,
        "goal_s": GOAL_S,
        "gb_written": round(sum(one["num_bytes"] for one in work.layers) / 1e9, 2),
        **{key: value for key, value in summary(work.layers).items() if key != "tokens_per_expert"},
    }
    if options.device == "cuda":
        gpu = torch.device("cuda")
        report["peak_device_gb"] = round(torch.cuda.max_memory_allocated(gpu) / 1e9, 2)
        report["provenance"] = provenance.of_device(gpu, options.commit, checkpoint_sha256=narrow.digest())
    write_json(options.out, report)
    return report


def show(report: dict[str, Any], console: Console) -> None:
    total = f"{report['all_layers_s']} s" + (
        f" (EXTRAPOLATED from {report['num_layers']} layers)" if report["is_extrapolated"] else " (all measured)"
    )
    table = Table(title=f"{report['method']} of {report['model']}", show_header=False, title_justify="left")
    table.add_row("one MoE layer", f"{report['seconds_per_layer']} s, of it quantising and errors "
                  f"{report['median_quantize_s_per_layer']} s")  # fmt: skip
    table.add_row(f"{report['num_moe_layers']} MoE layers", f"{total}; goal on an H200 {report['goal_s']:.0f} s")
    table.add_row("calibration", f"{report['num_calibration_tokens']} tokens")
    table.add_row("fallbacks", f"{report['num_fallback']} of {report['num_experts']} experts")
    errors = ", ".join(f"{name} {value['mean']:.4f}" for name, value in report["relative_output_error"].items())
    table.add_row("relative output error", errors)
    table.add_row("peak device memory", f"{report.get('peak_device_gb', '–')} GB")
    console.print(table)


def main(options: Options) -> None:
    """Raises SpecterError for bad input."""
    console = Console(width=120)
    show(run(options, console), console)
