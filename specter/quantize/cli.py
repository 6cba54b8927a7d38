"""`python -m specter.quantize checkpoint=DIR out=DIR method=gptq group=128`: INT4 experts for a draft."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from specter.arguments import parse_arguments
from specter.errors import SpecterError
from specter.model.checkpoint import Checkpoint
from specter.model.spec import ModelSpec
from specter.quantize.activations import walk_moe_layers
from specter.quantize.calibration import CALIBRATION, CalibrationText, load_calibration
from specter.quantize.gptq_format import stack, write_directory
from specter.quantize.int4 import Int4Experts
from specter.quantize.layer import (
    METHODS,
    LayerInputs,
    QuantizedLayer,
    default_min_tokens,
    output_error,
    quantize_layer,
)
from specter.quantize.rtn import group_of

REPORT_FILE = "quantization.json"


@dataclass(frozen=True)
class Options:
    checkpoint: Path  # hub directory of the target
    out: Path  # directory to make
    method: str = "gptq"
    group: int = 128  # input channels per group, or the row where it is shorter
    calibration: Path = CALIBRATION
    min_tokens: int = 0  # calibration tokens below which an expert is rounded to nearest; 0: twice the hidden size
    device: str = "cpu"  # or cuda
    threads: int = 1

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Options:
        """Reads `key=value` arguments.

        Raises:
            SpecterError: naming the argument that is unknown, missing or malformed.
        """
        options = parse_arguments(cls, arguments)
        if options.method not in METHODS:
            raise SpecterError(f"method={options.method} is unknown", f"use method={' or method='.join(METHODS)}")
        if options.min_tokens < 0 or options.threads < 1:
            raise SpecterError("min_tokens below 0 or threads below 1", "leave them out for their defaults")
        return options


@dataclass
class Measurements:
    """What the report says about quality, gathered layer by layer."""

    tokens: list[int] = field(default_factory=list)  # calibration tokens of every expert
    num_fallback: int = 0
    errors: dict[str, list[float]] = field(default_factory=dict)  # method -> relative output error per layer

    def add(self, layer: QuantizedLayer, errors: dict[str, float]) -> None:
        self.tokens += layer.tokens.tolist()
        self.num_fallback += int(layer.fallback.sum())
        for method, error in errors.items():
            self.errors.setdefault(method, []).append(error)

    def summary(self) -> dict[str, Any]:
        return {
            "num_experts": len(self.tokens),
            "num_fallback": self.num_fallback,
            "tokens_per_expert": {
                "min": min(self.tokens),
                "median": statistics.median(self.tokens),
                "max": max(self.tokens),
            },
            "relative_output_error": {
                method: {"mean": statistics.fmean(errors), "worst_layer": max(errors), "per_layer": errors}
                for method, errors in self.errors.items()
            },
        }


def quantize_model(
    checkpoint: Checkpoint, text: CalibrationText, options: Options, console: Console
) -> tuple[Int4Experts, Measurements]:
    """Quantises every routed expert; errors are measured on the calibration text's held-out sequences."""
    spec = checkpoint.spec
    num_rows = (len(text.tokens) - text.num_held_out) * text.tokens.shape[1]
    min_tokens = options.min_tokens or default_min_tokens(spec)
    measurements = Measurements()
    layers: list[QuantizedLayer] = []
    walk = walk_moe_layers(checkpoint, text.tokens, options.device)
    label = f"{options.method} {spec.name}"
    for experts, inputs in track(walk, label, total=spec.num_moe_layers, console=console):
        seen = LayerInputs(inputs.hidden[:num_rows], inputs.routing[:num_rows])
        held_out = LayerInputs(inputs.hidden[num_rows:], inputs.routing[num_rows:])
        by_method = {
            method: quantize_layer(experts, seen, method, options.group, min_tokens)
            for method in dict.fromkeys((options.method, "rtn"))
        }
        errors = {method: output_error(experts, layer.dequantize(), held_out) for method, layer in by_method.items()}
        measurements.add(by_method[options.method], errors)
        layers.append(by_method[options.method].to("cpu"))
    quantised = Int4Experts(
        gate=stack([layer.gate for layer in layers]),
        up=stack([layer.up for layer in layers]),
        down=stack([layer.down for layer in layers]),
        method=options.method,
        num_fallback=measurements.num_fallback,
    )
    return quantised, measurements


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """A directory to fill that becomes `out` at the end, or leaves no trace.

    Raises:
        SpecterError: `out` holds something already, or cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SpecterError(f"{out} exists already", "remove it or give another out=DIR")
    partial = out.parent / f".{out.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        partial.mkdir(parents=True)
    except OSError as error:
        raise SpecterError(f"{out} cannot be written ({error.strerror})", "give an out=DIR that is writable") from None
    try:
        yield partial
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def run(options: Options, console: Console) -> None:
    """Quantises, and writes the directory with its report.

    Raises:
        SpecterError: anything wrong with the input, before large work.
    """
    start = time.perf_counter()
    torch.set_num_threads(options.threads)
    if options.device not in ("cpu", "cuda") or (options.device == "cuda" and not torch.cuda.is_available()):
        raise SpecterError(
            f"device={options.device} is not available", "use device=cpu, or device=cuda on a GPU machine"
        )
    checkpoint = Checkpoint.open(options.checkpoint)
    _check_groups(checkpoint.spec, options.group)
    text = load_calibration(options.calibration, checkpoint.spec)
    with atomic_directory(options.out) as directory:
        experts, measurements = quantize_model(checkpoint, text, options, console)
        write_directory(directory, experts, checkpoint.spec, options.group)
        report = {
            "method": options.method,
            "group": options.group,
            "sym": True,
            "min_tokens": options.min_tokens or default_min_tokens(checkpoint.spec),
            "calibration": {
                "num_tokens": text.tokens.numel(),
                "num_held_out_tokens": text.num_held_out * text.tokens.shape[1],
                "sha256": text.sha256,
            },
            **measurements.summary(),
            "checkpoint": {"name": checkpoint.spec.name, "sha256": checkpoint.digest()},
            "seconds": round(time.perf_counter() - start, 2),
        }
        (directory / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")
    console.print(_one_line(report))


def _check_groups(spec: ModelSpec, group: int) -> None:
    for row in (spec.hidden, spec.expert_inter):
        group_of(row, group)


def _one_line(report: dict[str, Any]) -> str:
    errors = ", ".join(f"{name} {value['mean']:.4f}" for name, value in report["relative_output_error"].items())
    return (
        f"{report['num_experts']} experts in {report['seconds']} s, {report['num_fallback']} rounded to nearest "
        f"for want of calibration tokens; relative output error, held out: {errors}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    console = Console(stderr=True)
    try:
        run(Options.parse(sys.argv[1:] if arguments is None else arguments), console)
    except SpecterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
