"""`python -m tools.standin.inflate checkpoint=DIR out=DIR`: a stand-in at full size, as a hub directory.

The GPU runtime does not need the directory: it reads `InflatedCheckpoint` layer by layer into its store.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
from safetensors.torch import save_file
from torch import Tensor

from specter.arguments import run_command
from specter.errors import SpecterError
from specter.files import replacing_directory, write_json
from specter.models.checkpoint import Checkpoint
from specter.models.full_size import FULL_SIZE
from specter.models.hub_config import config_of
from specter.models.inflation.inflated import InflatedCheckpoint
from specter.models.names import on_hub
from specter.quantize.gptq_writer import write_index

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Options:
    """Writes a stand-in at full size (30 GB) as a hub directory."""

    checkpoint: Path  # the narrow stand-in
    out: Path  # directory to make
    model: str = "deepseek_v2_lite"
    layout: str = "tiled"  # or random: see specter/models/inflation/isometry.py
    dtype: str = "bfloat16"
    device: str = "cpu"
    seed: int = 0  # of the random layout

    def check(self) -> None:
        """Raises SpecterError for a choice that does not exist."""
        for key, value, choices in (("dtype", self.dtype, DTYPES), ("model", self.model, FULL_SIZE)):
            if value not in choices:
                raise SpecterError(f"{key}={value} is unknown", f"use {key}={f' or {key}='.join(choices)}")
        if self.device != "cpu" and not torch.cuda.is_available():
            raise SpecterError(f"device={self.device} is not available", "use device=cpu")


def write_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]], progress: Progress, max_bytes: int) -> None:
    """Writes a stream of tensors to safetensors shards of at most `max_bytes`, and their index."""
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    shard_bytes = total_bytes = num_shards = 0

    def flush() -> None:
        nonlocal shard_bytes, num_shards
        num_shards += 1
        file = f"model-{num_shards:05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()
        shard_bytes = 0

    for name, tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > max_bytes:
            flush()
        shard[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
        shard_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
        progress.advance(progress.task_ids[0], tensor.nbytes)
    flush()
    write_index(directory, weight_map, total_bytes)


def run(options: Options) -> None:
    """Inflates, and writes the directory.

    Raises SpecterError: anything wrong with the input, or a disk too small, before large work.
    """
    start, console = time.perf_counter(), Console(stderr=True)
    options.check()
    dtype, spec = DTYPES[options.dtype], FULL_SIZE[options.model]
    wide = InflatedCheckpoint(
        Checkpoint.open(options.checkpoint),
        spec,
        options.layout,  # type: ignore[arg-type]  # checked there
        dtype,
        options.device,
        options.seed,
    )
    needed = (spec.non_expert_params + spec.experts_params) * dtype.itemsize  # of all matrices
    with replacing_directory(options.out) as directory:
        if (free := shutil.disk_usage(directory).free) < needed:
            raise SpecterError(f"{options.out} needs {needed} bytes, {free} are free", "give an out=DIR with more room")
        write_json(directory / "config.json", config_of(spec))
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress("{task.description}", *columns, console=console) as progress:
            progress.add_task(f"inflate {spec.name}", total=needed)
            tensors = ((on_hub(spec.family, name), tensor) for name, tensor in wide.tensors())
            write_shards(directory, tensors, progress, MAX_SHARD_BYTES)
    console.print(f"{needed / 1e9:.1f} GB in {time.perf_counter() - start:.1f} s: {options.out}")


def main(arguments: Sequence[str] | None = None) -> None:
    run_command(run, Options, arguments)


if __name__ == "__main__":
    main()
