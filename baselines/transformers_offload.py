"""`transformers_offload`: the real transformers library with accelerate's offload, run as a user would.

Faithful to: what a user would try first. Greedy decoding with a KV cache, eager, the weights of every module brought
to the execution device by accelerate's hooks just before the module runs, and dropped after it: from host memory
(`cpu_offload`) or from disk (`disk_offload`); also with everything resident.
Departing where: nowhere in the library; but it is *not* on the engine, and the workflow runs it on the CPU, which is
then the execution device too. What is measured there is wall time of the narrow stand-in: the overhead of hooks and
Python per module, not of a link. It stands in a table of its own, beside our own decoder's wall time, and beside no
charged time. On a GPU (`device=cuda`) the narrow stand-in is what runs as well; a directory in hub format may be given
instead, in `dtype=bfloat16`.

    python -m baselines.transformers_offload checkpoint=data/standins/deepseek_v2_lite out=offload.json
    python -m baselines.transformers_offload checkpoint=DIR out=offload.json device=cuda dtype=bfloat16
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.eager import load_eager
from specter.arguments import parse_arguments
from specter.errors import SpecterError
from specter.models.checkpoint import Checkpoint

KINDS = ("resident", "cpu_offload", "disk_offload")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Options:
    checkpoint: Path
    out: Path
    device: str = "cpu"  # where modules run, or cuda
    num_tokens: int = 8
    threads: int = 1
    dtype: str = "float32"  # or bfloat16

    def check(self) -> None:
        """Raises SpecterError for a device or a type that there is not."""
        if self.dtype not in DTYPES:
            raise SpecterError(f"dtype={self.dtype} is unknown", f"use one of: {', '.join(DTYPES)}")
        kind = self.device.partition(":")[0]
        if kind != "cpu" and not (kind == "cuda" and torch.cuda.is_available()):
            what = f"device={self.device} is not available"
            raise SpecterError(what, "use device=cpu, or a machine with a CUDA device")


def offload(model: Any, kind: str, device: str, scratch: Path) -> Any:
    """Puts the library's offload hooks on the model. Raises SpecterError for an unknown kind."""
    from accelerate import cpu_offload, disk_offload

    if kind == "resident":
        return model.to(device)
    if kind == "cpu_offload":
        return cpu_offload(model, execution_device=torch.device(device))
    if kind == "disk_offload":
        return disk_offload(model, str(scratch), execution_device=torch.device(device))
    raise SpecterError(f"offload {kind!r} is unknown", f"use one of: {', '.join(KINDS)}")


@torch.inference_mode()
def generate(model: Any, prompt: list[int], num_tokens: int, device: str) -> tuple[list[int], list[float]]:
    """Greedy tokens, and the time of each, ms; the first is the prompt's pass."""
    tokens: list[int] = []
    times: list[float] = []
    cache, inputs = None, torch.tensor([prompt], device=device)
    for _ in range(num_tokens):
        begin = time.perf_counter()
        output = model(inputs, past_key_values=cache, use_cache=True)
        tokens.append(int(output.logits[0, -1].argmax()))
        times.append((time.perf_counter() - begin) * 1e3)
        cache, inputs = output.past_key_values, torch.tensor([[tokens[-1]]], device=device)
    return tokens, times


def measure(options: Options, prompt: list[int], report: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One row per kind of offload: tokens, time to the first one, median time of the others.

    Raises:
        SpecterError: no such device or type, before anything is loaded.
    """
    options.check()
    rows = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as scratch:
            model = load_eager(Checkpoint.open(options.checkpoint), "cpu", DTYPES[options.dtype])
            model = offload(model, kind, options.device, Path(scratch))
            tokens, times = generate(model, prompt, options.num_tokens, options.device)
        rows.append(
            {"system": f"transformers, {kind}", "tokens": tokens, "ttft_ms": times[0],
             "tpot_ms": statistics.median(times[1:])}
        )  # fmt: skip
        report(f"{kind}: {rows[-1]['tpot_ms']:.1f} ms per token")
    return rows


def main() -> None:
    try:
        options = parse_arguments(Options, sys.argv[1:])
        torch.set_num_threads(options.threads)
        rows = measure(options, prompt=list(range(1, 17)))
    except SpecterError as error:
        sys.exit(f"error: {error}")
    options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
