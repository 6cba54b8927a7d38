"""Refuses a scale that this machine or this version cannot run, before anything large starts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness.jobs import run_job, write_json
from harness.plan import compose
from harness.scales import Scale, load_scale
from specter.errors import SpecterError

ELSEWHERE = "or use the default scale, which needs no GPU: snakemake --cores 1 all"


def check(scale: Scale) -> dict[str, Any]:
    """What was found. Raises SpecterError naming the first thing that is missing."""
    title = f"scale {scale.name} ({scale.about})"
    if scale.clock != "virtual":
        raise SpecterError(
            f"{title} needs {scale.needs}, and the workflow cannot measure on the {scale.clock} clock yet",
            f"measure parts of the runtime on a GPU by python -m specter.bench kernels, {ELSEWHERE}",
        )
    for name in scale.models:
        model = compose([f"model={name}"]).model
        if not (Path(model.checkpoint) / "config.json").is_file():
            raise SpecterError(
                f"{title}: no checkpoint of {name} in {model.checkpoint}",
                f"see conf/model/{name}.yaml for how to get it, {ELSEWHERE}",
            )
    return {"scale": scale.name, "clock": scale.clock, "models": scale.models}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    found = check(load_scale(arguments.scale))
    write_json(arguments.out, found)
    print(f"scale {found['scale']} can run here, {found['clock']} clock")


if __name__ == "__main__":
    run_job(main)
