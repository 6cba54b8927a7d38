"""`transformers_offload`: the transformers library with accelerate's offload, run as a user would.

Faithful to: what a user would try first. Greedy decoding with a KV cache, eager; accelerate's hooks bring the weights
of every module to the execution device just before the module runs and drop them afterwards: from host memory
(`cpu_offload`) or from disk (`disk_offload`); also with everything resident.
Departing where: nowhere in the library. It is not on the engine, and the workflow runs it on the CPU, so it measures
wall time of the narrow stand-in: the overhead of hooks and Python per module, not of a link. Its table compares it with
our decoder's wall time only. On a GPU use `device=cuda`, and for a directory in hub format `dtype=bfloat16`.

    python -m baselines.transformers_offload checkpoint=data/standins/deepseek_v2_lite out=offload.json
    python -m baselines.transformers_offload checkpoint=DIR out=offload.json device=cuda dtype=bfloat16
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specter.arguments import run_command
from specter.errors import SpecterError
from specter.files import write_json

if TYPE_CHECKING:  # imported where it is used: every run imports this package, and replays run without torch
    import torch

    from specter.models.checkpoint import Checkpoint
    from specter.models.inflation.inflated import InflatedCheckpoint

KINDS = ("resident", "cpu_offload", "disk_offload")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True)
class Options:
    """Decodes with the transformers library, resident and offloaded, and writes the times per token."""

    checkpoint: Path
    out: Path
    device: str = "cpu"  # where modules run, or cuda
    num_tokens: int = 8
    threads: int = 1
    dtype: str = "float32"  # or bfloat16

    def check(self) -> None:
        """Raises SpecterError for an unknown data type or a device that is not available."""
        import torch

        if self.dtype not in DTYPES:
            raise SpecterError(f"dtype={self.dtype} is unknown", f"use one of: {', '.join(DTYPES)}")
        kind = self.device.partition(":")[0]
        if kind != "cpu" and not (kind == "cuda" and torch.cuda.is_available()):
            what = f"device={self.device} is not available"
            raise SpecterError(what, "use device=cpu, or a machine with a CUDA device")


def load_eager(weights: Checkpoint | InflatedCheckpoint, device: torch.device | str, dtype: torch.dtype) -> Any:
    """transformers' model of the family on the same weights, built on the meta device and then assigned them."""
    import torch
    import transformers

    from specter.models.hub_config import config_of
    from specter.models.names import canonical

    spec = weights.spec
    values = {**config_of(spec), "attn_implementation": "sdpa"}
    model_class: Any = getattr(transformers, values["architectures"][0])
    config = model_class.config_class.from_dict(values)
    with torch.device("meta"):
        model = model_class(config)
    state: dict[str, torch.Tensor] = {}
    for stored in model.state_dict():
        name = canonical(spec.family, stored)
        if name.endswith(".experts.gate_up_proj"):
            gate_up, down = weights.experts(int(name.split(".")[2]) - spec.num_dense_layers)
            state[stored] = gate_up.to(device, dtype)
            state[stored.replace("gate_up_proj", "down_proj")] = down.to(device, dtype)
        elif ".experts." not in name:
            source = "model.embed_tokens.weight" if name == "lm_head.weight" and spec.tied else name
            state[stored] = weights.tensor(source).to(device, dtype)
    model.load_state_dict(state, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its buffers are in no checkpoint
    return model.eval()


def offload(model: Any, kind: str, device: str, scratch: Path) -> Any:
    """Puts the library's offload hooks on the model. Raises SpecterError for an unknown kind."""
    import torch
    from accelerate import cpu_offload, disk_offload

    if kind == "resident":
        return model.to(device)
    if kind == "cpu_offload":
        return cpu_offload(model, execution_device=torch.device(device))
    if kind == "disk_offload":
        return disk_offload(model, str(scratch), execution_device=torch.device(device))
    raise SpecterError(f"offload {kind!r} is unknown", f"use one of: {', '.join(KINDS)}")


def generate(model: Any, prompt: list[int], num_tokens: int, device: str) -> tuple[list[int], list[float]]:
    """Greedy tokens, and the time of each, ms; the first is the prompt's pass."""
    import torch

    tokens: list[int] = []
    times: list[float] = []
    cache, inputs = None, torch.tensor([prompt], device=device)
    with torch.inference_mode():
        for _ in range(num_tokens):
            begin = time.perf_counter()
            output = model(inputs, past_key_values=cache, use_cache=True)
            tokens.append(int(output.logits[0, -1].argmax()))
            times.append((time.perf_counter() - begin) * 1e3)
            cache, inputs = output.past_key_values, torch.tensor([[tokens[-1]]], device=device)
    return tokens, times


def measure(options: Options, prompt: list[int], report: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """One row per kind of offload: tokens, time to the first one, median time of the others, ms.

    Raises:
        SpecterError: an unknown data type or a device that is not available, before anything is loaded.
    """
    import torch

    from specter.models.checkpoint import Checkpoint

    options.check()
    rows = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as scratch:
            model = load_eager(Checkpoint.open(options.checkpoint), "cpu", getattr(torch, options.dtype))
            model = offload(model, kind, options.device, Path(scratch))
            tokens, times = generate(model, prompt, options.num_tokens, options.device)
        rows.append(
            {"system": f"transformers, {kind}", "tokens": tokens, "ttft_ms": times[0],
             "tpot_ms": statistics.median(times[1:])}
        )  # fmt: skip
        report(f"{kind}: {rows[-1]['tpot_ms']:.1f} ms per token")
    return rows


def main(options: Options) -> None:
    import torch

    torch.set_num_threads(options.threads)
    write_json(options.out, measure(options, prompt=list(range(1, 17))))


if __name__ == "__main__":
    run_command(main, Options)
