"""`python -m specter.quantize.residual encode|rebuild key=value ...`: residual directories.

encode   checkpoint=DIR quantized=DIR out=DIR   BF16 experts as what their INT4 codes leave open
rebuild  quantized=DIR residual=DIR out=DIR     the original BF16 experts from both
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from specter.arguments import run_command
from specter.errors import SpecterError
from specter.hub import find_checkpoint, is_hub_id
from specter.models.checkpoint import Checkpoint
from specter.quantize.residual.convert import encode_model, rebuild_model


@dataclass(frozen=True)
class Device:
    """Where torch works."""

    device: str = "cpu"  # or cuda
    threads: int = 1

    def start(self) -> None:
        """Raises SpecterError for a device that is not there."""
        if self.device not in ("cpu", "cuda") or (self.device == "cuda" and not torch.cuda.is_available()):
            raise SpecterError(f"device={self.device} is not available", "use device=cpu, or device=cuda on a GPU")
        torch.set_num_threads(self.threads)


@dataclass(frozen=True, kw_only=True)
class Encode(Device):
    """Encodes a checkpoint's routed experts as the residual of its INT4 directory; a killed run resumes."""

    checkpoint: Path  # hub directory, or hub id ORG/NAME
    quantized: Path  # INT4 directory
    out: Path  # directory to make


@dataclass(frozen=True, kw_only=True)
class Rebuild(Device):
    """Restores a checkpoint's routed experts from INT4 and residual directory, and proves them equal."""

    quantized: Path
    residual: Path
    out: Path  # directory to make


def encode(options: Encode) -> None:
    options.start()
    console = Console(stderr=True)
    directory = str(options.checkpoint)
    checkpoint = Checkpoint.open(find_checkpoint(directory, console) if is_hub_id(directory) else directory)
    report = encode_model(checkpoint, options.quantized, options.out, options.device, console)
    console.print(
        f"{report['bits_per_weight']:.3f} bits per weight, {report['patches_per_weight']:.4%} patched, "
        f"{report['num_raw']} experts raw, {report['num_bytes'] / 1e9:.3f} GB in {report['seconds']} s"
    )


def rebuild(options: Rebuild) -> None:
    options.start()
    console = Console(stderr=True)
    report = rebuild_model(options.quantized, options.residual, options.out, options.device, console)
    console.print(
        f"{report['num_layers']} MoE layers rebuilt, {report['num_bytes'] / 1e9:.3f} GB; SHA-256 of every layer equals "
        f"that of its original ({report['original']})"
    )


def main(arguments: list[str]) -> None:
    match arguments[:1]:
        case ["encode"]:
            run_command(encode, Encode, arguments[1:])
        case ["rebuild"]:
            run_command(rebuild, Rebuild, arguments[1:])
        case _:
            print(__doc__, file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
