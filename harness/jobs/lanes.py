"""Replays the experiment `timeline` operation by operation: a row per operation of its decoding rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.jobs import model_columns, progress_bar, steps, write_table
from harness.plan import experiment_runs, text_key
from harness.recordings import load_files, read_manifest
from specter.arguments import run_command
from specter.config import RunConfig
from specter.memory import DoesNotFit
from specter.resolve import resolve
from specter.session import Replayer, RunResult

EXPERIMENT = "timeline"
LANES = ("compute", "link")


@dataclass(frozen=True)
class Options:
    """Writes the operations of the runs of `timeline` on one model and data set."""

    scale: str
    model: str
    dataset: str
    manifest: Path  # of the experiment `timeline`
    out: Path


def operations(result: RunResult) -> pd.DataFrame:
    """[round, draft_len, new_len, round_ms, lane, part, begin_ms (in its round), length_ms, stall_ms] of a traced run.

    An operation belongs to the round in which it begins. stall_ms: what it waited for copies just before.
    """
    rounds = result.generation.rounds
    begins = np.array([one.start_ms for one in rounds])
    assert all(one.end_ms == other.start_ms for one, other in pairwise(rounds))
    spans = [
        (op.lane, op.label.split()[0], op.start_ns / 1e6, (op.end_ns - op.start_ns) / 1e6, op.stall_ns / 1e6)
        for op in result.trace or ()
        if op.lane in LANES and rounds[0].start_ms <= op.start_ns / 1e6 < rounds[-1].end_ms
    ]
    frame = pd.DataFrame(spans, columns=["lane", "part", "begin_ms", "length_ms", "stall_ms"])
    index = np.searchsorted(begins, frame["begin_ms"], side="right") - 1
    of_round = pd.DataFrame(
        [(one.index, one.draft_len, one.new_len, one.end_ms - one.start_ms) for one in rounds],
        columns=["round", "draft_len", "new_len", "round_ms"],
    )
    frame["begin_ms"] -= begins[index]
    return pd.concat([of_round.iloc[index].reset_index(drop=True), frame], axis=1)


def settings(config: RunConfig) -> dict[str, Any]:
    return model_columns(config.model) | {
        "system": config.system.name,
        "budget": config.budget.tier,
        "policy": config.budget.policy,
        "dataset": config.dataset.name,
        "input": config.input,
        "sampling": config.sampling.kind,
        "temperature": config.sampling.temperature,
        "hardware": config.hardware.name,
        "clock": config.clock,
    }


def main(options: Options) -> None:
    configs = experiment_runs(options.scale, EXPERIMENT, options.model, options.dataset)
    recordings = {key: load_files(pair) for key, pair in read_manifest(options.manifest)[0].items()}
    found = []
    with progress_bar() as progress:
        for config in steps(configs, f"lanes {options.model} {options.dataset}", progress):
            try:
                run = resolve(replace(config, trace=True))
            except DoesNotFit:
                continue
            result = Replayer().replay(run, *recordings[text_key(config)])
            found.append(operations(result).assign(**settings(config)))
    frame = pd.concat(found, ignore_index=True)
    write_table(options.out, frame)
    print(f"{len(frame)} rows")


if __name__ == "__main__":
    run_command(main, Options)
