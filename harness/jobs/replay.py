"""Replays one experiment on one model and data set: every system, budget, K and machine through the engine itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.jobs import ExperimentOptions, progress_bar, steps
from harness.plan import TextKey, experiment_runs, text_key
from harness.recordings import load_files, read_manifest
from specter.arguments import run_command
from specter.config import BudgetConfig, RunConfig
from specter.errors import SpecterError
from specter.memory import DoesNotFit
from specter.recording import Recording
from specter.resolve import ResolvedRun, resolve
from specter.results import run_id, write_misfit, write_run
from specter.session import Replayer, RunResult
from specter.speculation.accept import through_stop


@dataclass(frozen=True)
class Options(ExperimentOptions):
    """Replays the runs of an experiment from its recordings."""

    manifest: Path  # as harness.jobs.record writes it
    out: Path  # a directory for each run


def check_names(configs: Sequence[RunConfig]) -> None:
    """Raises SpecterError if two runs share a name, and so a directory."""
    (name, count), *_ = Counter(map(run_id, configs)).most_common(1)
    if count > 1:
        raise SpecterError(f"two runs of the experiment are called {name}", "vary what a run's name shows")


def same_replay(run: ResolvedRun) -> str:
    """A key that runs share whose budgets differ in name only: they buy the same slots."""
    return f"{run.slots} {replace(run.config, budget=BudgetConfig('any'))}"


def main(options: Options) -> None:
    configs = experiment_runs(options.scale, options.experiment, options.model, options.dataset)
    check_names(configs)
    # Runs that differ only in their input are adjacent, and so share a warm-up.
    configs.sort(key=lambda config: (run_id(replace(config, input=0)), config.input))
    files, notes = read_manifest(options.manifest)
    loaded: dict[TextKey, tuple[Recording, Recording]] = {}
    replayer, known = Replayer(), dict[str, RunResult]()
    with progress_bar() as progress:
        for config in steps(configs, f"replay {options.experiment} {options.model} {options.dataset}", progress):
            key = text_key(config)
            for one in {key, key.plain} - set(loaded):
                loaded[one] = load_files(files[one])
            directory = options.out / run_id(config)
            try:
                run = resolve(config)
            except DoesNotFit:
                write_misfit(directory, config, notes)
                continue
            if (same := same_replay(run)) not in known:
                known[same] = replayer.replay(run, *loaded[key])
            result = known[same]
            plain = through_stop(loaded[key.plain][0].tokens, run.stop_ids)
            result.metrics["agrees_with_plain"] = result.generation.tokens == plain
            write_run(directory, config, result, notes)
    print(f"{len(configs)} runs, {len(known)} replays")


if __name__ == "__main__":
    run_command(main, Options)
