"""Gathers the runs of an experiment into one table, a row per run (or the probes' tables into one)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from harness.jobs import run_job
from specter.errors import SpecterError


def row(directory: Path) -> dict[str, Any]:
    """One run: what was configured, and what was measured."""
    config = yaml.safe_load((directory / "config.yaml").read_text())
    metrics = json.loads((directory / "metrics.json").read_text())
    budget = config["budget"]
    named = budget["tier"] if budget["experts_per_layer"] is None else f"{budget['experts_per_layer']:g}"
    return {
        "model": config["model"]["name"],
        "checkpoint_kind": config["model"]["checkpoint_kind"],
        "charged_as": config["model"]["charged_as"],
        "system": config["system"]["name"],
        "speculative": config["system"]["speculative"],
        "uses_budget": config["system"]["eviction"] != "resident",
        "budget": named,
        "policy": budget["policy"],
        "dataset": config["dataset"]["name"],
        "sampling": config["sampling"]["kind"],
        "temperature": config["sampling"]["temperature"],
        "hardware": config["hardware"]["name"],
        "k": (config["system"]["draft_len"] or config["k"]) if config["system"]["speculative"] else 0,
        "input": config["input"],
        "prompt_tokens": config["prompt_tokens"],
        "max_new_tokens": config["max_new_tokens"],
        **metrics,
    }


def gather(replays: list[Path]) -> pd.DataFrame:
    """All runs below these directories, in the order of their names.

    Raises:
        SpecterError: a run whose tokens are not those of plain decoding.
    """
    directories = sorted(path for replay in replays for path in replay.iterdir() if path.is_dir())
    frame = pd.DataFrame([row(path) for path in directories])
    differing = frame[frame["agrees_with_plain"].eq(False)]
    if len(differing):
        raise SpecterError(
            f"{len(differing)} runs differ from plain decoding", "report this: it is a fault of the runtime"
        )
    return frame


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("sources", type=Path, nargs="+")
    arguments = parser.parse_args()
    tables = [path for path in arguments.sources if path.suffix == ".parquet"]
    frame = pd.concat([pd.read_parquet(path) for path in tables]) if tables else gather(arguments.sources)
    frame.to_parquet(arguments.out, index=False)
    print(f"{len(frame)} rows")


if __name__ == "__main__":
    run_job(main)
