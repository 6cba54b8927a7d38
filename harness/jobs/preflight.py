"""Refuses a scale that this machine or this version cannot run, before anything large starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.plan import compose
from harness.scales import CONF, Scale, load_scale
from specter.arguments import run_command
from specter.errors import SpecterError
from specter.files import write_json
from specter.timeline.hardware import Hardware
from specter.typed import load_typed

MOST_OF = 0.9  # share of a device's nominal memory that its driver leaves free
ELSEWHERE = "or use the default scale, which needs no GPU: snakemake --cores 1 all"


@dataclass(frozen=True)
class Options:
    """Checks that this machine can run a scale."""

    scale: str
    out: Path


def check_device(scale: Scale) -> None:
    """Raises SpecterError unless a GPU has as much free memory as the machine that the scale names."""
    import torch  # takes seconds to import, and only these scales need it

    if not torch.cuda.is_available():
        raise SpecterError(f"scale {scale.name} needs {scale.needs}, and there is no CUDA device", ELSEWHERE)
    for name in scale.hardware:
        needed = load_typed(Hardware, CONF / "hardware" / f"{name}.yaml").device_memory_bytes
        free, total = torch.cuda.mem_get_info(0)
        if free < MOST_OF * needed:
            raise SpecterError(
                f"scale {scale.name} measures {name}, {needed} bytes; {torch.cuda.get_device_name(0)} has {total}, of "
                f"which {free} are free",
                "end what else runs on the GPU, or name another machine in "
                f"conf/scale/{scale.name}.yaml (hardware: ...), {ELSEWHERE}",
            )


def check(scale: Scale) -> dict[str, Any]:
    """Facts for the record. Raises SpecterError naming the first thing that is missing."""
    title = f"scale {scale.name} ({scale.about})"
    if scale.clock == "device":
        check_device(scale)
    for name in scale.models:
        model = compose([f"model={name}"]).model
        if not (Path(model.checkpoint) / "config.json").is_file():
            raise SpecterError(
                f"{title}: no checkpoint of {name} in {model.checkpoint}",
                f"see conf/model/{name}.yaml for how to get it, {ELSEWHERE}",
            )
    return {"scale": scale.name, "clock": scale.clock, "models": scale.models}


def main(options: Options) -> None:
    found = check(load_scale(options.scale))
    write_json(options.out, found)
    print(f"scale {found['scale']} can run here, {found['clock']} clock")


if __name__ == "__main__":
    run_command(main, Options)
