"""Measures one experiment on one model and data set on this machine's GPU: every system, budget and K, live.

At a scale on the device clock this takes the place of recording and replaying. Each run is kept as it ends, under a
name of everything that decides it, so that a killed job goes on where it was and experiments share their runs.
Recordings lie beside the runs: the probes read them, and `harness.jobs.charge` replays them on the virtual clock.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from tokenizers import Tokenizer

from harness.jobs import preflight, progress_bar, run_job, steps
from harness.jobs.replay import by_recording
from harness.plan import Live, live_of, matrix
from harness.recordings import RECORDING, WARMUP, Entry, manifest_text
from harness.scales import load_scale
from specter import provenance
from specter.build import build_costs, check_paths
from specter.config import RunConfig, to_yaml
from specter.errors import SpecterError
from specter.files import files_digest, write_whole
from specter.memory import DoesNotFit, fit, num_slots
from specter.models.checkpoint import Checkpoint
from specter.models.cuda.live import PLAIN_CACHED, DeviceLive
from specter.models.cuda.memory import DeviceBudget
from specter.prompts import encode, load_tokenizer, prompt_text, warmup_text
from specter.recording import Recording
from specter.results import adhoc_directory, run_id, write_misfit, write_run
from specter.session import RunResult

NOTED = (*provenance.MACHINE, "clocks.max.sm", "clocks.max.mem", "power.draw", "commit", "source_sha256")
Notes = dict[str, str]


class Runner(Protocol):
    """What runs inputs: `specter.models.cuda.live.DeviceLive`."""

    notes: Notes

    def run(self, config: RunConfig, prompt: Sequence[int], warmup: Sequence[int]) -> RunResult: ...


Load = Callable[[RunConfig], Runner]


@dataclass(frozen=True)
class Run:
    """One run: what it is, its texts, and where it is kept."""

    config: RunConfig
    prompt: list[int]
    warmup: list[int]
    directory: Path

    @classmethod
    def of(cls, config: RunConfig, tokenizer: Tokenizer, root: Path) -> Run:
        """The run below `root`, whichever experiment asked for it; the name has the texts' tokens, too."""
        prompt, warmup = (encode(tokenizer, text, config) for text in (prompt_text(config), warmup_text()))
        texts = hashlib.sha256(json.dumps([prompt, warmup]).encode()).hexdigest()[:8]
        directory = adhoc_directory(dataclasses.replace(config, results=str(root)))
        return cls(config, prompt, warmup, directory.with_name(f"{directory.name}-{texts}"))

    @property
    def text(self) -> Live:
        """The live run of plain decoding that continues the same prompt."""
        return Live(self.config.sampling.kind, self.config.prompt_tokens, 0, self.config.input)

    @property
    def is_finished(self) -> bool:
        """Whether it was written whole: metrics.json is the last file."""
        return (self.directory / "metrics.json").is_file()

    @property
    def metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "metrics.json").read_text())
        return found


@dataclass(frozen=True)
class Runs:
    """Those of an experiment, and plain decoding of every text in slots that fit beside a draft: their reference."""

    asked: list[Run]
    plain: dict[Live, Run]

    @classmethod
    def of(cls, configs: Sequence[RunConfig], tokenizer: Tokenizer, root: Path) -> Runs:
        asked, plain = [Run.of(config, tokenizer, root) for config in configs], dict[Live, Run]()
        for run in asked:
            if run.text not in plain:
                budget = dataclasses.replace(run.config.budget, policy="same_experts")
                config = dataclasses.replace(run.config, system=PLAIN_CACHED, budget=budget, k=1)
                plain[run.text] = Run.of(config, tokenizer, root)
        return cls(asked, plain)

    @property
    def each(self) -> list[Run]:
        """Every run once, the references first."""
        return list({run.directory: run for run in [*self.plain.values(), *self.asked]}.values())


def slots_of(config: RunConfig) -> tuple[int, bool]:
    """Slots of a run, and whether its system fits the machine with them."""
    costs = build_costs(config)
    try:
        slots = num_slots(config, costs)
    except DoesNotFit:
        return 0, False
    return slots, bool(fit(costs, config.system, slots, config.hardware)["fits_device"])


def measure(runs: Runs, load: Load, notes: Notes, title: str) -> None:
    """Runs what is not finished: first what decodes plainly, for which no draft need be on the device.

    Args:
        load: the model for runs like this one.
        notes: of the machine, for the records.
    """
    for speculative in (False, True):
        todo = [run for run in runs.each if run.config.system.speculative == speculative and not run.is_finished]
        fitting = []
        for run in todo:
            slots, fits = slots_of(run.config)
            if fits:
                fitting.append(run)
            else:
                write_misfit(run.directory, run.config, notes, slots)
        if fitting:
            _measure_alike(fitting, runs.plain, load, notes, title)
            gc.collect()  # the model of plain decoding goes before the one with the draft comes


def _measure_alike(todo: list[Run], plain: dict[Live, Run], load: Load, notes: Notes, title: str) -> None:
    def key(run: Run) -> tuple[bool, int, str, int]:
        """References first; then so that slots are made and graphs captured as seldom as can be."""
        is_reference = plain[run.text].directory == run.directory
        return not is_reference, slots_of(run.config)[0], run.config.sampling.kind, run.config.depth

    runner = load(todo[0].config)
    num_threads = torch.get_num_threads()  # loading takes all there are
    torch.set_num_threads(todo[0].config.threads)
    try:
        with progress_bar() as progress:
            for run in steps(sorted(todo, key=key), title, progress):
                result = runner.run(run.config, run.prompt, run.warmup)
                reference = plain[run.text].directory
                tokens = result.generation.tokens
                expected = tokens if reference == run.directory else Recording.load(reference / RECORDING).tokens
                result.metrics["agrees_with_plain"] = tokens == expected
                result.recording.save(run.directory / RECORDING)
                if result.warmup is not None:
                    result.warmup.save(run.directory / WARMUP)
                write_run(run.directory, run.config, result, runner.notes | notes)
    finally:
        torch.set_num_threads(num_threads)


def check_lossless(runs: Runs) -> None:
    """Raises SpecterError naming the runs whose tokens are not plain decoding's."""
    differing = [str(run.directory) for run in runs.each if run.metrics.get("agrees_with_plain") is False]
    if differing:
        raise SpecterError(
            f"{len(differing)} runs differ from plain decoding: {', '.join(differing[:3])}",
            "report this: it is a fault of the runtime; delete these directories to measure them again",
        )


def entries(runs: Runs) -> list[Entry]:
    """A recording of every text, K and draft, where a system that makes one fits."""
    found: dict[Live, Entry] = {}
    for run in runs.each:
        if (run.directory / RECORDING).is_file():
            live = live_of(run.config)
            found.setdefault(live, Entry(live, str(run.directory / RECORDING), str(run.directory / WARMUP)))
    return list(found.values())


def publish(runs: Runs, out: Path) -> None:
    """Copies the experiment's runs to where its tables look for them, by their names."""
    shutil.rmtree(out, ignore_errors=True)
    for run in runs.asked:
        directory = shutil.copytree(run.directory, out / run_id(run.config))
        (directory / "config.yaml").write_text(to_yaml(run.config))  # another experiment may have measured it


def origin(config: RunConfig, where: dict[str, Any]) -> str:
    """A name for the device, the code, the packages, the checkpoint and its draft: what measured runs hang on."""
    kept: Notes = {key: where[key] for key in provenance.MACHINE if key in where}
    kept["code"] = files_digest(Path(), "specter/**/*.py", "baselines/*.py")
    kept["checkpoint"] = Checkpoint.open(config.model.checkpoint).digest()
    kept["draft"] = files_digest(Path(config.model.quantized), "*.safetensors", "*config.json")
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


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
    preflight.check_device(load_scale(arguments.scale))
    where = provenance.of_device(DeviceBudget("cuda").device, arguments.commit)
    name = origin(drafting, where)
    root = Path("results") / arguments.scale / "measured" / arguments.model / name
    runs = Runs.of(configs, load_tokenizer(drafting), root)
    num_todo = sum(not run.is_finished for run in runs.each)
    title = f"measure {arguments.experiment} {arguments.model} {arguments.dataset}"
    notes = {key: str(where[key]) for key in NOTED if key in where}
    measure(runs, lambda config: DeviceLive.load(config, Console(stderr=True)), notes, title)
    check_lossless(runs)
    write_whole(arguments.manifest, manifest_text(entries(runs), {**notes, "origin": name}))
    publish(runs, arguments.out)
    num_misfits = sum(not run.metrics["fits_budget"] for run in runs.asked)
    print(f"{len(runs.asked)} runs, {num_misfits} of them misfits; {num_todo} new; all tokens are plain decoding's")


if __name__ == "__main__":
    run_job(main)
