"""Measures one experiment on one model and data set on this machine's GPU: every system, budget and K, live.

At a scale on the device clock this takes the place of recording and replaying. Each run is kept as it ends, under a
name of everything that decides it, so that a killed job goes on where it was and experiments share their runs.
Recordings lie beside the runs: the probes read them, and `harness.charge` replays them on the virtual clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from harness.jobs import progress_bar, run_job, steps, write_whole
from harness.plan import Live, live_of, matrix
from harness.recordings import RECORDING, WARMUP, Entry, manifest_text
from harness.replay import by_recording
from specter.bench.report import files_digest, provenance
from specter.build import build_costs, check_paths
from specter.config import RunConfig
from specter.gpu.live import PLAIN_CACHED, DeviceLive
from specter.gpu.memory import DeviceBudget
from specter.memory import DoesNotFit, num_slots
from specter.model.checkpoint import Checkpoint
from specter.prompts import encode, load_tokenizer, prompt_text, warmup_text
from specter.recording import Recording
from specter.results import adhoc_directory, run_id, write_misfit, write_run
from specter.session import RunResult

MACHINE = ("gpu", "driver_version", "torch", "triton")


class Runner(Protocol):
    """What runs inputs: `specter.gpu.live.DeviceLive`."""

    notes: dict[str, str]

    def run(self, config: RunConfig, prompt: Sequence[int], warmup: Sequence[int]) -> RunResult: ...


def plain_of(config: RunConfig) -> RunConfig:
    """Plain decoding of the run's text, in slots that fit beside the draft: what its tokens are compared with."""
    budget = dataclasses.replace(config.budget, policy="same_experts")
    return dataclasses.replace(config, system=PLAIN_CACHED, budget=budget, k=1)


def plain_runs(configs: Sequence[RunConfig]) -> dict[Live, RunConfig]:
    """One plain run of every text."""
    found: dict[Live, RunConfig] = {}
    for config in configs:
        found.setdefault(_plain_live(config), plain_of(config))
    return found


def by_bed(configs: Sequence[RunConfig]) -> list[RunConfig]:
    """Runs in an order that makes slots and captures graphs as seldom as can be."""

    def key(config: RunConfig) -> tuple[int, str, int, str]:
        try:
            slots = num_slots(config, build_costs(config))
        except DoesNotFit:
            slots = 0
        return slots, config.sampling.kind, config.depth, config.system.name

    return sorted(configs, key=key)


def is_finished(directory: Path) -> bool:
    """Whether a run was written whole: metrics.json is its last file."""
    return (directory / "metrics.json").is_file()


def measure(
    plains: dict[Live, RunConfig], configs: Sequence[RunConfig], runner: Runner, tokenizer: Tokenizer, root: Path,
    progress: Progress, title: str,
) -> None:  # fmt: skip
    """Runs what is not finished below `root`: plain decoding first, since all others are compared with it."""
    for config in steps([*plains.values(), *by_bed(configs)], title, progress):
        directory = run_directory(root, config)
        if is_finished(directory):
            continue
        prompt, warmup = (encode(tokenizer, text, config) for text in (prompt_text(config), warmup_text()))
        try:
            result = runner.run(config, prompt, warmup)
        except DoesNotFit:
            write_misfit(directory, config, runner.notes)
            continue
        reference = run_directory(root, plains[_plain_live(config)])
        tokens = result.generation.tokens if reference == directory else Recording.load(reference / RECORDING).tokens
        result.metrics["agrees_with_plain"] = result.generation.tokens == tokens
        result.recording.save(directory / RECORDING)
        if result.warmup is not None:
            result.warmup.save(directory / WARMUP)
        write_run(directory, config, result, runner.notes)


def entries(plains: dict[Live, RunConfig], configs: Sequence[RunConfig], root: Path) -> list[Entry]:
    """A recording of every text, K and draft, where a system that makes one fits."""
    found: dict[Live, Entry] = {}
    for config in [*plains.values(), *configs]:
        directory = run_directory(root, config)
        if (directory / RECORDING).is_file():
            live = live_of(config)
            found.setdefault(live, Entry(live, str(directory / RECORDING), str(directory / WARMUP)))
    return list(found.values())


def run_directory(root: Path, config: RunConfig) -> Path:
    """Where a run lies below `root`, whichever experiment asked for it."""
    return adhoc_directory(dataclasses.replace(config, results=str(root)))


def publish(configs: Sequence[RunConfig], root: Path, out: Path) -> None:
    """The experiment's runs by their names, as links to what was measured."""
    shutil.rmtree(out, ignore_errors=True)
    for config in configs:
        shutil.copytree(run_directory(root, config), out / run_id(config), copy_function=os.link)


def origin(config: RunConfig, where: dict[str, str]) -> str:
    """A name for the device, the code, the packages, the checkpoint and its draft: what measured runs hang on."""
    kept: dict[str, str] = {key: where[key] for key in MACHINE if key in where}
    kept["code"] = files_digest(Path(), "specter/**/*.py", "baselines/*.py")
    kept["checkpoint"] = Checkpoint.open(config.model.checkpoint).digest()
    kept["draft"] = files_digest(Path(config.model.quantized), "*.safetensors", "*config.json")
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _plain_live(config: RunConfig) -> Live:
    return Live(config.sampling.kind, config.prompt_tokens, 0, config.input)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--scale", "--experiment", "--model", "--dataset"):
        parser.add_argument(name, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--commit", default="", help="of the code, where there is no git")
    arguments = parser.parse_args()
    configs = by_recording(matrix(arguments.scale, arguments.experiment, arguments.model, arguments.dataset).runs())
    drafting = next((config for config in configs if config.system.speculative), configs[0])
    check_paths(drafting)
    tokenizer = load_tokenizer(drafting)
    where = provenance(DeviceBudget("cuda").device, arguments.commit)
    name = origin(drafting, where)
    root = Path("results") / arguments.scale / "measured" / arguments.model / name
    plains = plain_runs(configs)
    todo = [one for one in [*plains.values(), *configs] if not is_finished(run_directory(root, one))]
    if todo:
        live = DeviceLive.load(drafting, Console(stderr=True))
        live.notes |= {key: str(where[key]) for key in (*MACHINE, "commit", "source_sha256") if key in where}
        with progress_bar() as progress:
            title = f"measure {arguments.experiment} {arguments.model} {arguments.dataset}"
            measure(plains, configs, live, tokenizer, root, progress, title)
    found = entries(plains, configs, root)
    notes = json.loads((run_directory(root, next(iter(plains.values()))) / "env.json").read_text())
    write_whole(arguments.manifest, manifest_text(found, {**notes, "origin": name}))
    publish(configs, root, arguments.out)
    print(f"{len(configs)} runs, {len(todo)} measured now; all tokens equal plain decoding's or stand in the record")


if __name__ == "__main__":
    run_job(main)
