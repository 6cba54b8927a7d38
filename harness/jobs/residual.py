"""Measures the residual codec's cells of one model on this machine's GPU, and writes them as JSON; `residual_record`
joins the models. A cell is a system at one budget and sampling, on the first input of several data sets.

The time is limited: what is left of it is shared by the cells that are left, and a cell that has used its share stops
after at least one text. Every run is written as soon as it ends. `conf/experiment` states systems and K; one load of
the model with its draft serves all systems of a codec, whose slots are those of their own budget.

    python -m harness.jobs.residual model=phi3_5_moe seconds=400 max_new_tokens=32 warmup_tokens=24 out=phi.json
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from rich.console import Console

from harness.jobs import preflight
from harness.jobs.replay import check_names
from harness.plan import experiment_runs
from harness.scales import Experiment, load_experiment, load_scale
from specter import provenance
from specter.arguments import run_command
from specter.config import RunConfig
from specter.files import write_json
from specter.memory import DoesNotFit
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.model import CudaModel
from specter.prompts import encode, load_tokenizer, prompt_text, warmup_text
from specter.resolve import ResolvedRun, check_paths, resolve
from specter.session import RunResult
from specter.timeline.trace import TraceOp

SCALE = "standin"
KEPT = (
    "tpot_ms", "ttft_ms", "acceptance", "mean_accepted_len", "union_mean", "hit_rate", "num_rounds", "num_new_tokens",
    "num_slots", "experts_per_layer", "link_busy_frac", "compute_busy_frac", "stall_ms", "bytes_per_token",
    "floor_trace_ms", "over_floor_trace", "over_floor_ideal", "distinct_4grams", "plain_copy_bytes_per_s",
    "device_total_bytes", "device_peak_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Measures the cells of the residual codec for one model."""

    model: str
    out: Path  # a JSON file
    seconds: float = 300.0  # for all runs, loading not counted
    max_new_tokens: int = 64
    warmup_tokens: int = 32
    ks: tuple[int, ...] = ()  # of the fixed K of the experiment, these alone; none: all
    experiments: tuple[str, ...] = ("residual_cells",)  # of conf/experiment, whose cells are joined
    traced: bool = True  # run the first text of each residual cell once more, for the time of each kind of work


class Cell(NamedTuple):
    """What is compared."""

    tier: str
    sampling: str
    system: str
    k: str  # a number, `auto`, or 0 for plain decoding


class Runner(Protocol):
    notes: dict[str, str]

    def run(self, run: ResolvedRun, prompt: Sequence[int], warmup: Sequence[int]) -> RunResult: ...


def cell_of(config: RunConfig) -> Cell:
    return Cell(config.budget.tier, config.sampling.label, config.system.name, str(config.depth))


def by_cell(runs: Iterable[RunConfig]) -> dict[Cell, list[RunConfig]]:
    """The runs of each cell, one per text."""
    cells: dict[Cell, list[RunConfig]] = defaultdict(list)
    for config in runs:
        cells[cell_of(config)].append(config)
    return cells


def time_by_work(trace: Sequence[TraceOp]) -> dict[str, float]:
    """ms of each kind of work on the compute lane, and of all copies."""
    total: dict[str, int] = defaultdict(int)
    for op in trace:
        if op.lane != "host":
            total["copies" if op.lane == "link" else op.label] += op.end_ns - op.start_ns
    return {label: ns / 1e6 for label, ns in total.items()}


@dataclass
class Record:
    """The runs of a model, written to `path` after each.

    Attributes:
        tokens: of plain decoding, by text and sampling: of the first plain run with 16-bit experts.
    """

    path: Path
    facts: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)
    loaded: dict[str, dict[str, str]] = field(default_factory=dict)  # notes of the model, by codec
    tokens: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, config: RunConfig, result: RunResult) -> None:
        tokens = result.generation.tokens
        key = config.dataset.name, config.sampling.label
        if not config.decodes and not config.system.speculative:
            self.tokens.setdefault(key, tokens)
        expected = self.tokens.get(key)
        row = cell_of(config)._asdict() | {
            "text": config.dataset.name,
            "codec": config.payload_codec,
            "is_traced": result.trace is not None,
            "agrees_with_plain": None if expected is None else tokens == expected,
        }
        row |= {name: result.metrics.get(name) for name in KEPT}
        if result.trace is not None:
            row["ms_by_work"] = time_by_work(result.trace)
        self.runs.append(row)
        self.write()

    def write(self) -> None:
        write_json(self.path, {**self.facts, "loaded": self.loaded, "runs": self.runs})


def measure(
    cells: dict[Cell, list[RunConfig]], runner: Runner, record: Record, seconds: float, *, traced: bool
) -> float:
    """Runs the cells on one loaded model; returns the seconds left."""
    tokenizer = load_tokenizer(next(iter(cells.values()))[0])
    end = time.monotonic() + seconds

    def run(config: RunConfig) -> None:
        prompt, warmup = (encode(tokenizer, text, config) for text in (prompt_text(config), warmup_text()))
        record.add(config, runner.run(resolve(config), prompt, warmup))

    for done, (cell, configs) in enumerate(cells.items()):
        cell_end = time.monotonic() + (end - time.monotonic()) / (len(cells) - done)
        for index, config in enumerate(configs):
            if index and time.monotonic() > cell_end:
                break
            run(config)
        else:
            if traced and configs[0].decodes and time.monotonic() < cell_end:
                run(replace(configs[0], trace=True))
        last = record.runs[-1]
        print(
            f"{' '.join(cell)}: {index + 1} texts, {last['tpot_ms']:.2f} ms, plain: {last['agrees_with_plain']}",
            flush=True,
        )
    return end - time.monotonic()


def fitting(runs: Sequence[RunConfig]) -> list[RunConfig]:
    """The runs whose budget leaves slots. A system that does not fit is missing in the record."""
    found = []
    for config in runs:
        try:
            resolve(config)
        except DoesNotFit as error:
            print(f"left out: {' '.join(cell_of(config))}: {error}", flush=True)
        else:
            found.append(config)
    return found


def planned(options: Options) -> list[RunConfig]:
    """All runs, the texts of a cell one after the other."""
    return [
        replace(run, max_new_tokens=options.max_new_tokens, warmup_tokens=options.warmup_tokens)
        for name in options.experiments
        for run in _runs_of(load_experiment(name), options)
    ]


def _runs_of(what: Experiment, options: Options) -> list[RunConfig]:
    datasets = load_scale(SCALE).datasets[: what.num_datasets]
    runs = [run for name in datasets for run in experiment_runs(SCALE, what.name, options.model, name)]
    return [
        run
        for run in runs
        if run.input == 0 and (not options.ks or run.system.name not in what.depths or run.depth in options.ks)
    ]


def measure_all(
    runs: Sequence[RunConfig], load: Callable[[RunConfig], Runner], record: Record, seconds: float, *, traced: bool
) -> None:
    """Runs all cells, 16-bit experts first: their plain decoding is the reference. Each codec has a load of its own,
    and a share of the time by its cells."""
    codecs = sorted({run.payload_codec for run in runs})  # "bf16" is the first
    cells = {codec: by_cell(run for run in runs if run.payload_codec == codec) for codec in codecs}
    for index, codec in enumerate(codecs):
        num_left = sum(len(cells[later]) for later in codecs[index:])
        share = seconds * len(cells[codec]) / num_left
        drafting = next((run for run in runs if run.payload_codec == codec and run.system.speculative), None)
        runner = load(drafting or next(iter(cells[codec].values()))[0])
        record.loaded[codec] = runner.notes
        # Plain decoding first, then by what needs other slots or graphs.
        ordered = sorted(cells[codec], key=lambda cell: (cell.k != "0", cell.system, cell.k, cell.tier, cell.sampling))
        left = measure({cell: cells[codec][cell] for cell in ordered}, runner, record, share, traced=traced)
        seconds -= share - left
        del runner
        gc.collect()


def main(options: Options) -> None:
    runs = fitting(planned(options))
    check_names(runs)
    check_paths(next(run for run in runs if run.system.speculative))
    preflight.check_device(load_scale(SCALE))
    settings = {"max_new_tokens": options.max_new_tokens, "warmup_tokens": options.warmup_tokens}
    where = provenance.of_device(DeviceBudget("cuda").device)
    record = Record(options.out, {"model": options.model, "provenance": where, **settings})

    num_threads = torch.get_num_threads()

    def load(config: RunConfig) -> Runner:
        torch.set_num_threads(num_threads)  # loading uses all cores
        model = CudaModel.load(resolve(config), Console(stderr=True))
        torch.set_num_threads(config.threads)
        return model

    measure_all(runs, load, record, options.seconds, traced=options.traced)


if __name__ == "__main__":
    run_command(main, Options)
