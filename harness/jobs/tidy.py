"""Gathers the runs of an experiment into two tables: a row per run, and a row per round."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness.jobs import write_table
from specter.arguments import run_command
from specter.config import SamplingConfig, read_values
from specter.errors import SpecterError
from specter.execution import ExecutionConfig
from specter.provenance import MACHINE
from specter.speculation.depth import AUTO, MAX_AUTO

Row = dict[str, Any]
# Columns that a round has of its run.
RUN_KEYS = (
    "model", "checkpoint_kind", "charged_as", "system", "execution", "budget", "policy", "dataset", "sampling",
    "hardware", "clock", "k", "input", "repeat", "prompt_tokens", "charged_bits",
)  # fmt: skip
# Columns of runs that were measured on a device.
PROVENANCE = (*MACHINE, "commit", "source_sha256", "checkpoint", "checkpoint_digest", "draft_origin")


@dataclass(frozen=True)
class Options:
    """Gathers the runs of an experiment, or tables of a probe or of several experiments, into one table."""

    sources: tuple[Path, ...]  # directories of runs, or tables
    out: Path
    rounds: Path | None = None  # the table of rounds, for runs


def sampling_label(config: Row) -> str:
    """`SamplingConfig.label` of plain values."""
    return SamplingConfig(**config["sampling"]).label


def settings(directory: Path) -> Row:
    """The settings of one run that vary between the runs of a scale."""
    config = read_values(directory / "config.yaml")
    system, budget, model = config["system"], config["budget"], config["model"]
    per_layer = budget["experts_per_layer"]
    env = json.loads((directory / "env.json").read_text()) if config["clock"] == "device" else {}
    depth = (system["draft_len"] or config["k"]) if system["speculative"] else 0
    is_auto = depth == AUTO
    return {
        "model": model["name"],
        "checkpoint_kind": model["checkpoint_kind"],
        "charged_as": model["charged_as"],
        "system": system["name"],
        "speculative": system["speculative"],
        "uses_budget": system["eviction"] != "resident",
        "budget": budget["tier"] if per_layer is None else f"{per_layer:g}",
        "policy": budget["policy"],
        "residents_of": system["residents_of"] or system["name"],
        "assumes_residents": budget["tier"] in model["assumed"].get(system["residents_of"] or system["name"], ()),
        "dataset": config["dataset"]["name"],
        "sampling": sampling_label(config),
        "temperature": config["sampling"]["temperature"],
        "hardware": config["hardware"]["name"],
        "k": MAX_AUTO if is_auto else depth,
        "is_auto": is_auto,  # then k is the most of a round
        "codec": config["codec"] or system["codec"],
        "charged_bits": config["payload_bits"] or 0.0,  # bits per weight in place of the measured ones; 0: none
        "input": config["input"],
        "repeat": config["repeat"],
        "prompt_tokens": config["prompt_tokens"],
        "max_new_tokens": config["max_new_tokens"],
        "ignore_eos": config["ignore_eos"],
        "execution": ExecutionConfig(**config["execution"]).label or "default",
        **config["execution"],
        **{key: env[key] for key in PROVENANCE if key in env},
    }


def gather(sources: Sequence[Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """All runs in these directories, in the order of their names: a row per run, and a row per round.

    Raises:
        SpecterError: a run whose tokens are not those of plain decoding.
    """
    directories = sorted(path for source in sources for path in source.iterdir() if path.is_dir())
    rows = [settings(path) | json.loads((path / "metrics.json").read_text()) for path in directories]
    runs = pd.DataFrame(rows)
    if num_differing := int(runs["agrees_with_plain"].eq(False).sum()):
        raise SpecterError(
            f"{num_differing} runs differ from plain decoding", "report this: it is a fault of the runtime"
        )
    rounds = [
        {key: row[key] for key in RUN_KEYS} | one
        for path, row in zip(directories, rows, strict=True)
        for one in _rounds(path)
    ]
    return runs, pd.DataFrame(rounds)


def _rounds(directory: Path) -> Iterator[Row]:
    """The rounds of one run, as `specter.records.RoundRecord` has them."""
    for line in (directory / "rounds.jsonl").read_text().splitlines():
        row = json.loads(line)
        yield {"round": row.pop("index"), **row}


def main(options: Options) -> None:
    if options.rounds is None:
        frame = pd.concat([pd.read_parquet(path) for path in options.sources])
        if "execution" in frame:  # experiments share runs
            frame = frame.drop_duplicates()
    else:
        frame, rounds = gather(options.sources)
        write_table(options.rounds, rounds)
    write_table(options.out, frame)
    print(f"{len(frame)} rows")


if __name__ == "__main__":
    run_command(main, Options)
