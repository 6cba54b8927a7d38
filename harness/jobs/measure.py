"""Measures one experiment on one model and data set on this machine's GPU: every system, budget and K, live.

At a scale on the device clock this job replaces recording and replaying. Each run is kept as soon as it ends, under a
name of everything that decides it: a job that was killed resumes after its last run, and experiments share runs.
Loading a model takes a minute, so the first job of an experiment measures all of its data sets.
Recordings are beside the runs: the probes read them, and `harness.jobs.charge` replays them on the virtual clock.
"""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console

from harness.jobs import ExperimentOptions, preflight, progress_bar, steps
from harness.jobs.replay import check_names
from harness.plan import TextKey, experiment_runs, text_key
from harness.recordings import RECORDING, WARMUP, Files, write_manifest
from harness.scales import datasets, load_scale
from specter import provenance
from specter.arguments import run_command
from specter.config import RunConfig, to_yaml
from specter.errors import SpecterError
from specter.execution import ExecutionConfig
from specter.files import files_digest
from specter.memory import DoesNotFit
from specter.models.checkpoint import Checkpoint
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.model import LRU, CudaModel
from specter.prompts import encode, load_tokenizer, prompt_text, warmup_text
from specter.recording import Recording
from specter.resolve import ResolvedRun, check_paths, resolve
from specter.results import adhoc_directory, run_id, write_misfit, write_run
from specter.session import RunResult
from specter.sources import code_digest
from specter.text.tokenizer import Tokenizer

NOTED = (*provenance.MACHINE, "clocks.max.sm", "clocks.max.mem", "power.draw", "commit", "source_sha256")
Notes = dict[str, str]
PlainKey = tuple[str, TextKey]  # the data set, and the text within it


@dataclass(frozen=True)
class Options(ExperimentOptions):
    """Measures the runs of an experiment on this machine's GPU."""

    out: Path  # a directory for each run
    manifest: Path  # of the recordings


class Runner(Protocol):
    """Runs inputs: `specter.models.cuda.model.CudaModel`."""

    notes: Notes

    def run(self, run: ResolvedRun, prompt: Sequence[int], warmup: Sequence[int]) -> RunResult: ...


@dataclass(frozen=True)
class Run:
    """One run with its texts, and the directory that keeps it."""

    config: RunConfig
    prompt: list[int]
    warmup: list[int]
    directory: Path

    @classmethod
    def of(cls, config: RunConfig, tokenizer: Tokenizer, root: Path) -> Run:
        """The run below `root`, the same for all experiments; its name has a digest of the texts' tokens, too."""
        prompt, warmup = (encode(tokenizer, text, config) for text in (prompt_text(config), warmup_text()))
        texts = hashlib.sha256(json.dumps([prompt, warmup]).encode()).hexdigest()[:8]
        directory = adhoc_directory(replace(config, results=str(root)))
        return cls(config, prompt, warmup, directory.with_name(f"{directory.name}-{texts}"))

    @property
    def plain_key(self) -> PlainKey:
        """The key of plain decoding after the same prompt: a job measures several data sets."""
        return self.config.dataset.name, text_key(self.config).plain

    @property
    def is_finished(self) -> bool:
        """metrics.json is the last file that a run writes; one whose run had no trace lacks that."""
        return (self.directory / "metrics.json").is_file() and (
            not self.config.trace or (self.directory / "trace.json").is_file()
        )

    @property
    def metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "metrics.json").read_text())
        return found


@dataclass(frozen=True)
class Runs:
    """The runs of an experiment, and the reference of every text: plain decoding in slots that fit beside a draft."""

    planned: list[Run]
    plain: dict[PlainKey, Run]

    @classmethod
    def of(cls, configs: Sequence[RunConfig], tokenizer: Tokenizer, root: Path) -> Runs:
        planned, plain = [Run.of(config, tokenizer, root) for config in configs], dict[PlainKey, Run]()
        for run in planned:
            if run.plain_key not in plain:
                budget = replace(run.config.budget, policy="same_experts")
                config = replace(run.config, system=LRU, codec=None, budget=budget, k=1, repeat=0, trace=False)
                config = replace(config, execution=ExecutionConfig())
                plain[run.plain_key] = Run.of(config, tokenizer, root)
        return cls(planned, plain)

    @property
    def each(self) -> list[Run]:
        """Every run once, the references first."""
        return list({run.directory: run for run in [*self.plain.values(), *self.planned]}.values())


def slots_of(config: RunConfig) -> tuple[int, bool]:
    """Slots of a run, and whether its system fits the machine with them."""
    try:
        run = resolve(config)
    except DoesNotFit:
        return 0, False
    return run.num_slots, bool(run.fit()["fits_device"])


def measure(runs: Runs, load: Callable[[RunConfig], Runner], notes: Notes, title: str) -> int:
    """Runs all that is not finished, and returns how many: first plain decoding of 16-bit experts, which needs no draft
    on the device; last what runs on residual experts.

    Args:
        load: loads the model for runs like this one.
        notes: of the machine, for the records.
    """
    unfinished = [run for run in runs.each if not run.is_finished]
    for kind in sorted({_loaded_as(run.config) for run in unfinished}):
        fitting = []
        for run in (run for run in unfinished if _loaded_as(run.config) == kind):
            slots, fits = slots_of(run.config)
            if fits:
                fitting.append(run)
            else:
                write_misfit(run.directory, run.config, notes, slots)
        if fitting:
            _measure_loaded(fitting, runs.plain, load, notes, title)
            gc.collect()  # frees this model before the one with the draft is loaded
    return len(unfinished)


def _loaded_as(config: RunConfig) -> tuple[bool, bool]:
    """What decides the model that a run needs: whether experts are blobs, and whether it drafts."""
    return config.decodes, config.decodes or config.system.speculative


def _measure_loaded(
    todo: list[Run], plain: dict[PlainKey, Run], load: Callable[[RunConfig], Runner], notes: Notes, title: str
) -> None:
    """Runs `todo` on one loaded model."""

    def order(run: Run) -> tuple[bool, str, int, str, int]:
        """References first; then the order that allocates slots and captures graphs least often."""
        config, is_reference = run.config, plain[run.plain_key].directory == run.directory
        return not is_reference, config.execution.label, slots_of(config)[0], config.sampling.kind, config.draft_len

    runner = load(todo[0].config)
    num_threads = torch.get_num_threads()  # loading uses all cores
    torch.set_num_threads(todo[0].config.threads)
    try:
        with progress_bar() as progress:
            for run in steps(sorted(todo, key=order), title, progress):
                result = runner.run(resolve(run.config), run.prompt, run.warmup)
                reference = plain[run.plain_key].directory
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


def recorded(runs: Runs) -> dict[TextKey, Files]:
    """A recording of every text, K and draft, where a run that made one fits; one of a resident run has no routing."""
    found: dict[TextKey, Files] = {}
    for run in runs.each:
        if (run.directory / RECORDING).is_file() and not run.config.system.holds_all:
            found.setdefault(text_key(run.config), (run.directory / RECORDING, run.directory / WARMUP))
    return found


def publish(runs: Runs, out: Path) -> None:
    """Copies the experiment's runs to `out`, by their names."""
    shutil.rmtree(out, ignore_errors=True)
    for run in runs.planned:
        directory = shutil.copytree(run.directory, out / run_id(run.config))
        (directory / "config.yaml").write_text(to_yaml(run.config))  # another experiment may have measured it


def origin(config: RunConfig, where: dict[str, Any]) -> str:
    """A digest of what measured runs depend on: the device, the code, the packages, the checkpoint and its draft."""
    kept: Notes = {key: where[key] for key in provenance.MACHINE if key in where}
    kept["code"] = code_digest("specter.models.cuda.model", "baselines")
    kept["checkpoint"] = Checkpoint.open(config.model.checkpoint).digest()
    kept["draft"] = files_digest(Path(config.model.quantized), "*.safetensors", "*config.json")
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def main(options: Options) -> None:
    names = dict.fromkeys([options.dataset, *datasets(options.scale, options.experiment, options.model)])
    configs = {name: experiment_runs(options.scale, options.experiment, options.model, name) for name in names}
    every = [config for one in configs.values() for config in one]
    check_names(every)
    drafting = next((config for config in every if config.system.speculative), every[0])
    check_paths(drafting)
    preflight.check_device(load_scale(options.scale))
    where = provenance.of_device(DeviceBudget("cuda").device)
    notes = {key: str(where[key]) for key in NOTED if key in where}
    name, tokenizer = origin(drafting, where), load_tokenizer(drafting)
    root = Path("results") / options.scale / "measured" / options.model / name
    title = f"measure {options.experiment} {options.model}"
    load = lambda config: CudaModel.load(resolve(config), Console(stderr=True))  # noqa: E731
    num_new = measure(Runs.of(every, tokenizer, root), load, notes, title)
    runs = Runs.of(configs[options.dataset], tokenizer, root)
    check_lossless(runs)
    write_manifest(options.manifest, recorded(runs), notes | {"origin": name})
    publish(runs, options.out)
    num_misfits = sum(not run.metrics["fits_budget"] for run in runs.planned)
    print(f"{len(runs.planned)} runs, {num_misfits} of them misfits; {num_new} new; all tokens are plain decoding's")


if __name__ == "__main__":
    run_command(main, Options)
