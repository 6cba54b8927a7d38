"""Compares the virtual clock with the device clock: measured runs beside what the virtual clock charges for them.

Replays the recordings that `harness.jobs.measure` writes beside its runs, by the virtual clock of the same machine:

    measured=$(ls -d results/standin/main/deepseek_v2_lite/* | paste -sd,)
    python -m harness.jobs.charge measured=$measured out=data/reference/h200/clock.parquet
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from harness.jobs import progress_bar, steps, write_table
from harness.recordings import RECORDING, WARMUP
from specter.arguments import run_command
from specter.errors import SpecterError
from specter.provenance import MACHINE, merged
from specter.recording import Recording
from specter.resolve import resolve
from specter.results import read_config
from specter.session import Replayer

WHERE = (*MACHINE, "commit", "source_sha256", "checkpoint_digest")
COMPARED = ("tpot_ms", "bytes_per_token", "hit_rate")


@dataclass(frozen=True)
class Options:
    """Charges measured runs by the virtual clock."""

    measured: tuple[Path, ...]  # directories of runs
    out: Path


def charge(directory: Path) -> dict[str, Any]:
    """One run: its measured and its charged numbers. Milliseconds per token; bytes over the link per token.

    Raises:
        SpecterError: the run was not measured on a device, or its recording is not of it.
    """
    config = read_config(directory)
    if config.clock != "device":
        raise SpecterError(f"{directory} was not measured: its clock is {config.clock}", "give runs of a device scale")
    measured = json.loads((directory / "metrics.json").read_text())
    recording, warmup = (Recording.load(directory / name) for name in (RECORDING, WARMUP))
    charged = Replayer().replay(resolve(replace(config, clock="virtual")), recording, warmup)
    if charged.generation.tokens != recording.tokens:
        raise SpecterError(f"{directory}: its replay has other tokens", "report this: it is a fault of the runtime")
    named = {
        "model": config.model.charged_as,
        "system": config.system.name,
        "budget": config.budget.tier,
        "sampling": config.sampling.label,
        "dataset": config.dataset.name,
        "input": config.input,
        "k": config.draft_len,
    }
    numbers = {"measured": measured, "charged": charged.metrics}
    return named | {f"{clock}_{key}": metrics[key] for clock, metrics in numbers.items() for key in COMPARED}


def medians(rows: pd.DataFrame) -> dict[str, float]:
    """The median of charged over measured TPOT, by system and over all."""
    ratios = rows["charged_tpot_ms"] / rows["measured_tpot_ms"]
    by_system = {str(system): float(ratio) for system, ratio in ratios.groupby(rows["system"]).median().items()}
    return by_system | {"all": float(ratios.median())}


def provenance(runs: Sequence[Path]) -> dict[str, Any]:
    """Provenance of the runs: each key's distinct values, joined with commas.

    Raises:
        SpecterError: the runs differ in their machine's file or in their length.
    """
    where = merged([json.loads((path / "env.json").read_text()) for path in runs], WHERE)
    alike = {(config.hardware.name, config.max_new_tokens) for config in map(read_config, runs)}
    if len(alike) > 1:
        raise SpecterError(f"runs of different machines or lengths: {sorted(alike)}", "charge them one by one")
    [(hardware, max_new_tokens)] = alike
    return {**where, "hardware": hardware, "max_new_tokens": max_new_tokens}


def main(options: Options) -> None:
    found = [path.parent for parent in options.measured for path in sorted(parent.glob(f"*/{RECORDING}"))]
    configs = {path: read_config(path) for path in found}
    # Resident runs record no routing, and a run with `k=auto` would choose other depths by the virtual clock's times.
    runs = [path for path, config in configs.items() if not (config.system.holds_all or config.is_auto)]
    if not runs:
        raise SpecterError(
            f"{', '.join(map(str, options.measured)) or 'measured='} has no measured runs",
            "measure them on a GPU: snakemake --cores 1 --config scale=standin -- all",
        )
    where = provenance(runs)
    with progress_bar() as progress:
        rows = pd.DataFrame([charge(path) | where for path in steps(runs, "charge", progress)])
    write_table(options.out, rows)
    for name, ratio in medians(rows).items():
        print(f"charged over measured, {name}: {ratio:.3f}")


if __name__ == "__main__":
    run_command(main, Options)
