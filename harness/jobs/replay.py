"""Replays one experiment on one model and data set: every system, budget, K and machine through the engine itself."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from harness.jobs import progress_bar, run_job, steps
from harness.plan import Live, live_of, matrix
from harness.recordings import load_entry, read_manifest
from specter.config import RunConfig
from specter.errors import SpecterError
from specter.memory import DoesNotFit
from specter.recording import Recording
from specter.results import run_id, write_misfit, write_run
from specter.session import Replayer


def by_recording(configs: list[RunConfig]) -> list[RunConfig]:
    """Runs in an order that reads every recording once. Raises SpecterError if two runs share a name."""
    names = [run_id(config) for config in configs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SpecterError(f"two runs of the experiment are called {twice}", "vary what a run's name shows")
    return sorted(configs, key=live_of)


def by_warmup(configs: list[RunConfig]) -> list[RunConfig]:
    """Runs in an order in which those that differ in their input alone follow each other, and so share a warm-up."""
    return sorted(by_recording(configs), key=lambda config: run_id(replace(config, input=0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--scale", "--experiment", "--model", "--dataset"):
        parser.add_argument(name, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("manifest", type=Path)
    arguments = parser.parse_args()
    configs = by_warmup(matrix(arguments.scale, arguments.experiment, arguments.model, arguments.dataset).runs())
    entries, notes = read_manifest(arguments.manifest)
    loaded: dict[Live, tuple[Recording, Recording]] = {}
    replayer = Replayer()
    with progress_bar() as progress:
        for config in steps(configs, f"replay {arguments.experiment} {arguments.model} {arguments.dataset}", progress):
            live = live_of(config)
            plain = Live(live.sampling, live.prompt_tokens, 0, live.input)
            for key in {live, plain} - set(loaded):
                loaded[key] = load_entry(entries[key])
            directory = arguments.out / run_id(config)
            try:
                result = replayer.replay(config, *loaded[live])
            except DoesNotFit:
                write_misfit(directory, config, notes)
                continue
            result.metrics["agrees_with_plain"] = result.generation.tokens == loaded[plain][0].tokens
            write_run(directory, config, result, notes)
    print(f"{len(configs)} runs")


if __name__ == "__main__":
    run_job(main)
