"""`python -m specter.quantize checkpoint=DIR out=DIR method=gptq group=128`: INT4 experts for a draft."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from specter.arguments import run_command
from specter.errors import SpecterError
from specter.files import write_json
from specter.hub import find_checkpoint, is_hub_id
from specter.models.checkpoint import Checkpoint
from specter.models.layerwise import Source
from specter.models.spec import ModelSpec
from specter.progress import make_progress
from specter.quantize.activations import walk_moe_layers
from specter.quantize.calibration import CALIBRATION, CalibrationText, load_calibration
from specter.quantize.gptq_format import REPORT_FILE
from specter.quantize.gptq_writer import layer_tensors, shard_name, write_config, write_index
from specter.quantize.layer import LayerInputs, output_error
from specter.quantize.quantizers import build_int4, default_min_tokens
from specter.quantize.rtn import group_of
from specter.quantize.workspace import Workspace
from specter.sources import code_digest


@dataclass(frozen=True)
class Options:
    """Quantizes a checkpoint's routed experts, layer by layer; a killed run resumes after its last finished layer."""

    checkpoint: Path  # hub directory of the target, or its hub id ORG/NAME
    out: Path  # directory to make
    method: str = "gptq"
    group: int = 128  # input channels per group; the whole row where it is shorter
    calibration: Path = CALIBRATION  # tokens, or a text (.txt)
    sequences: int = 0  # of the calibration text, spread over it; 0: all
    tokenizer: str = ""  # the model's tokenizer.json; empty: the one in its checkpoint, if there is one
    min_tokens: int = 0  # calibration tokens below which an expert is rounded to nearest; 0: twice the hidden size
    device: str = "cpu"  # or cuda
    threads: int = 1

    def check(self) -> None:
        """Raises SpecterError for a method, device or number that is not supported."""
        build_int4(self.method, self.group, self.min_tokens)
        if self.min_tokens < 0 or self.threads < 1:
            raise SpecterError("min_tokens below 0 or threads below 1", "leave them out for their defaults")
        if self.device not in ("cpu", "cuda") or (self.device == "cuda" and not torch.cuda.is_available()):
            raise SpecterError(
                f"device={self.device} is not available", "use device=cpu, or device=cuda on a GPU machine"
            )

    def min_tokens_of(self, spec: ModelSpec) -> int:
        return self.min_tokens or default_min_tokens(spec)


def quantize_model(
    source: Source, text: CalibrationText, options: Options, work: Workspace, console: Console,
    num_layers: int | None = None,
) -> None:  # fmt: skip
    """Quantizes the routed experts of the first `num_layers` MoE layers (None: all) that `work` lacks.

    Errors are measured on the text's held-out sequences.
    """
    spec = source.spec
    num_rows = (len(text.tokens) - text.num_held_out) * text.tokens.shape[1]
    quantizers = {
        method: build_int4(method, options.group, options.min_tokens_of(spec))
        for method in dict.fromkeys((options.method, "rtn"))
    }
    walk = walk_moe_layers(source, text.tokens, options.device, work.start(options.device))
    with make_progress(console) as progress:
        task = progress.add_task(f"{options.method} {spec.name}", total=spec.num_moe_layers, completed=len(work.layers))
        for step in walk:
            if step.layer < len(work.layers):
                continue  # the killed run finished this layer, but did not save the states after it
            start = time.perf_counter()
            seen = LayerInputs(step.inputs.hidden[:num_rows], step.inputs.routing[:num_rows])
            held_out = LayerInputs(step.inputs.hidden[num_rows:], step.inputs.routing[num_rows:])
            layers = {method: quantize(step.experts, seen) for method, quantize in quantizers.items()}
            chosen = layers[options.method]
            tensors = layer_tensors(spec, step.layer, chosen)
            report = {
                "tokens": chosen.tokens.tolist(),
                "num_fallback": int(chosen.fallback.sum()),
                "errors": {
                    method: output_error(step.experts, layer.dequantize(), held_out) for method, layer in layers.items()
                },
                "names": list(tensors),
                "num_bytes": sum(tensor.nbytes for tensor in tensors.values()),
                "seconds": round(time.perf_counter() - start, 3),
            }
            work.add(shard_name(step.layer, spec.num_moe_layers), tensors, report, step.after)
            progress.advance(task)
            if len(work.layers) == num_layers:
                break


def summary(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Quality over all layers, from their reports."""
    tokens = [count for layer in layers for count in layer["tokens"]]
    errors = {method: [layer["errors"][method] for layer in layers] for method in layers[0]["errors"]}
    return {
        "num_experts": len(tokens),
        "num_fallback": sum(layer["num_fallback"] for layer in layers),
        "tokens_per_expert": {
            "min": min(tokens),
            "median": statistics.median(tokens),
            "max": max(tokens),
            "per_layer": [layer["tokens"] for layer in layers],
        },
        "relative_output_error": {
            method: {"mean": statistics.fmean(values), "worst_layer": max(values), "per_layer": values}
            for method, values in errors.items()
        },
    }


def _origin(options: Options, checkpoint: Checkpoint, text: CalibrationText) -> str:
    """Everything that decides the result of a quantization, as text."""
    parts = {
        "checkpoint": checkpoint.digest(),
        "method": options.method,
        "group": options.group,
        "min_tokens": options.min_tokens_of(checkpoint.spec),
        "device": options.device,
        "calibration": text.sha256,
        "tokens": hashlib.sha256(text.tokens.numpy().tobytes()).hexdigest(),
        "code": code_digest("specter.quantize.cli"),
    }
    return json.dumps(parts, indent=1)


def run(options: Options) -> None:
    """Quantizes, and writes the directory with its report.

    Raises SpecterError: anything wrong with the input, before large work.
    """
    start = time.perf_counter()
    options.check()
    console = Console(stderr=True)
    torch.set_num_threads(options.threads)
    directory = str(options.checkpoint)
    checkpoint = Checkpoint.open(find_checkpoint(directory, console) if is_hub_id(directory) else directory)
    spec = checkpoint.spec
    for row in (spec.hidden, spec.expert_inter):
        group_of(row, options.group)
    own = Path(options.tokenizer) if options.tokenizer else checkpoint.directory / "tokenizer.json"
    tokenizer = own if options.tokenizer or own.is_file() else None
    text = load_calibration(options.calibration, spec, options.sequences, tokenizer)
    work = Workspace(options.out, _origin(options, checkpoint, text))
    num_resumed = len(work.layers)
    if num_resumed:
        console.print(f"resuming after {num_resumed} of {spec.num_moe_layers} layers, finished by an earlier run")
    try:
        quantize_model(checkpoint, text, options, work, console)
    finally:
        work.discard_if_empty()
    report = {
        "method": options.method,
        "group": options.group,
        "sym": True,
        "min_tokens": options.min_tokens_of(spec),
        "calibration": {
            "num_tokens": text.tokens.numel(),
            "num_held_out_tokens": text.num_held_out * text.tokens.shape[1],
            "sha256": text.sha256,
        },
        **summary(work.layers),
        "checkpoint": {"name": spec.name, "sha256": checkpoint.digest()},
        "num_resumed_layers": num_resumed,
        "seconds": round(time.perf_counter() - start, 2),
    }
    write_config(work.directory, spec, options.group, method=options.method, num_fallback=report["num_fallback"])
    weight_map = {
        name: shard_name(number, spec.num_moe_layers) for number, one in enumerate(work.layers) for name in one["names"]
    }
    write_index(work.directory, weight_map, sum(one["num_bytes"] for one in work.layers))
    write_json(work.directory / REPORT_FILE, report)
    work.publish()
    errors = ", ".join(f"{name} {value['mean']:.4f}" for name, value in report["relative_output_error"].items())
    console.print(
        f"{report['num_experts']} experts in {report['seconds']} s, {report['num_fallback']} rounded to nearest "
        f"for lack of calibration tokens; relative output error, held out: {errors}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    run_command(run, Options, arguments)
