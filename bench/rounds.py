"""`python -m bench rounds`: whole systems on this machine, one table and one JSON file.

Every system runs on one engine, one store and one set of kernels; what differs is policy. The full-size model is
an inflated stand-in (see `tools.standin`): its bytes and flops are the real model's, text and routing the stand-in's.

All sections but the rivals take about seven and a half minutes on an H200. Several calls with the same `out`, of the
same code and inputs on the same kind of device, make one record: each keeps the finished sections of those before it.
Two of less than seven minutes each, the second with the whole product of losslessness, and a minute for the rivals:

    python -m bench rounds out=rounds.json sections=link,main,traces
    python -m bench rounds out=rounds.json sections=ablations,depth,lossless num_lossless=20
    python -m bench rounds out=rounds.json sections=rivals
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tokenizers import Tokenizer

from bench import rivals, stress
from bench.cells import (
    NO_FUSED_KERNEL,
    NO_GRAPHS,
    NO_OVERLAP,
    SAMPLINGS,
    SLOTS_PER_LAYER,
    Beds,
    Cell,
    CellResult,
    WarmCache,
    mean,
    measure,
    run_cell,
)
from bench.host import host_rows
from bench.inputs import Inputs, run_section
from bench.measure import Sample, device_ms
from bench.report import Report, Row
from bench.resume import Earlier, compare_texts
from specter import provenance
from specter.arguments import parse_arguments
from specter.errors import SpecterError
from specter.experts.transfer import Mover
from specter.models.cuda.arena import open_arena
from specter.models.cuda.copies import make_mover
from specter.models.cuda.full_size import FullSize
from specter.models.cuda.memory import DeviceBudget
from specter.models.spec import ExpertId
from specter.progress import make_progress
from specter.timeline.cuda import CudaTimeline
from specter.timeline.hardware import Hardware, load_hardware
from specter.timeline.trace import write_chrome_trace

K = 16
K_SWEEP = (2, 4, 8, 12, 24, 32)
PROMPT_TOKENS = 16
OURS = "specter_deadline"
RIVALS = ("specter", "lru", "on_demand", "resident")
# One thing switched at a time, against `specter_deadline`: system, variant.
ABLATIONS = (
    ("specter_deadline_lru", "eviction as published"),
    ("specter_retain", "planner as published"),
    ("specter_cold_start", "cold start as published"),
    ("specter_barrier", "barrier as published"),
    ("specter_no_prefetch", "no prefetch, eviction as published"),
    (OURS, NO_FUSED_KERNEL),
    (OURS, NO_GRAPHS),
    (OURS, NO_OVERLAP),
)
SLOW = (NO_FUSED_KERNEL, NO_GRAPHS)  # measured on fewer texts
SUMMARY = {
    "tpot_ms": "tpot_ms",
    "over_floor_trace": "over_floor_trace",
    "over_floor_ideal": "over_floor_ideal",
    "link_busy_frac": "link_busy_in_need_frac",
    "acceptance": "acceptance",
    "union_mean": "union_mean",
    "bytes_per_token": "bytes_per_token",
}
DEFAULT = ("link", "main", "depth", "ablations", "lossless", "traces")
SECTIONS = (*DEFAULT, "rivals")


@dataclass(frozen=True)
class Options(Inputs):
    """The command line."""

    hardware: Path = Path("conf/hardware/h200_pcie5.yaml")  # for the floors, but for the link, which is measured
    out: Path = Path("data/reference/h200/rounds.json")
    sections: str = ",".join(DEFAULT)  # about seven and a half minutes
    num_prompts: int = 5  # of the main cells
    num_lossless: int = 2  # prompts of every bit-for-bit combination; 20 take three to four minutes


@dataclass(slots=True)
class RoundsBench:
    """What all sections share."""

    full: FullSize
    budget: DeviceBudget
    hardware: Hardware
    prompts: list[list[int]]
    warmup: list[int]
    options: Options
    report: Report
    progress: Progress
    beds: Beds
    earlier: Earlier
    results: dict[Cell, CellResult] = field(default_factory=dict)
    # Caches after the warm-up, by eviction, slots and sampling: policies that differ in nothing else start alike.
    _warm: dict[tuple[str, int, str, str], WarmCache] = field(default_factory=dict)
    _move: Mover | None = None

    def run(self, cell: Cell, num_prompts: int) -> CellResult:
        """Measures a cell, once."""
        if cell not in self.results:
            before = self._link_rate()
            timeline = partial(CudaTimeline, self.budget.device, is_serial=cell.variant == NO_OVERLAP)
            task = self.progress.add_task(cell.name, total=None)
            self.progress.refresh()
            bed = self.beds.get(cell, PROMPT_TOKENS)
            prompts = self.prompts[:num_prompts]
            system = cell.config().system
            key = system.eviction, system.num_staging, cell.tier, cell.sampling
            generations = run_cell(cell, bed, prompts, self.warmup, timeline, warm=self._warm.get(key))
            self._warm[key] = generations.warm
            # Others share the host: floors use the fastest of the rates just before, just after and of any text.
            rate = max(before, self._link_rate())
            result = measure(generations, self._machine(rate))
            fastest = max(result.values("link_bytes_per_s"), default=0.0)
            self.results[cell] = result if fastest <= rate else measure(generations, self._machine(fastest))
            self.progress.remove_task(task)
            self.earlier.cells.pop(cell, None)
            self.report.facts["cells"] = [
                *self.earlier.cells.values(), *(result.as_json() for result in self.results.values())
            ]  # fmt: skip
            self.report.write()
        return self.results[cell]

    # -- sections --------------------------------------------------------------------------------

    def link(self) -> None:
        """The plain pinned copy that every rate is held against, expert by expert, and a whole layer at once (which
        tells what batching adjacent copies would bring); and what the host pays for issuing them."""
        store, num_experts = self.full.store, self.full.spec.num_experts
        single = Sample(tuple(self._link_rate() / 1e9 for _ in range(5)))
        self.report.add(Row("link, one expert per copy", "GB/s", single, note="pinned host to device, back to back"))
        arena = open_arena(num_experts, self.full.codec, self.budget)
        layers = device_ms(lambda index: arena.write_run(0, store.arena(index % store.num_layers)), per_repeat=4)
        for row in host_rows(arena, store):
            self.report.add(row)
        whole = Sample(tuple(store.layer_bytes / ms / 1e6 for ms in layers.values))
        self.report.add(Row("link, one layer per copy", "GB/s", whole, note="64 adjacent experts"))

    def main(self) -> None:
        """Every system at both budgets, greedy and seeded."""
        for sampling in SAMPLINGS:
            for tier in SLOTS_PER_LAYER:
                for system in (OURS, *RIVALS):
                    self.run(_cell(system, tier, sampling), self.options.num_prompts)
                self._summarize(tier, sampling)

    def depth(self) -> None:
        """The K sweep, greedy."""
        for tier in SLOTS_PER_LAYER:
            for k in K_SWEEP:
                self.run(Cell(OURS, tier, "greedy", k), 1)

    def ablations(self) -> None:
        """One published or missing choice at a time, greedy."""
        for tier in SLOTS_PER_LAYER:
            for system, variant in ABLATIONS:
                self.run(Cell(system, tier, "greedy", K, variant), 1 if variant in SLOW else 2)

    def rivals(self) -> None:
        """The paper's baselines and the usual prefetch, greedy."""
        rivals.compare(self.beds, self.budget, self._machine(self._link_rate()), self.prompts, self.warmup, self.report)

    def lossless(self) -> None:
        """Bit for bit against plain decoding: the texts measured so far, and every policy under stress."""
        outcome = stress.compare(self.full, self.budget, self.prompts[: self.options.num_lossless], self.progress)
        self.report.facts["bit for bit, all policies"] = outcome.as_json()

    def traces(self) -> None:
        """Chrome traces of three rounds of each system."""
        for system in (OURS, *RIVALS):
            cell = _cell(system, "high", "greedy")
            timeline = CudaTimeline(self.budget.device, trace=True)
            num_tokens = 1 + 3 * (K + 1 if cell.k else 1)
            bed = self.beds.get(cell, PROMPT_TOKENS)
            run_cell(cell, bed, self.prompts[:1], (), lambda: timeline, num_tokens, warmup_tokens=0)  # noqa: B023
            timeline.drain()
            path = self.report.path.parent / f"rounds_{system}.trace.json.gz"
            write_chrome_trace(path, timeline.ops or [], {"cell": cell.name, "gpu": self.report.provenance["gpu"]})

    # -- inside ----------------------------------------------------------------------------------

    def _machine(self, bytes_per_s: float) -> Hardware:
        """This machine, with a link of that rate."""
        return dataclasses.replace(self.hardware, link_bytes_per_s=round(bytes_per_s), link_latency_ns=0)

    def _link_rate(self) -> float:
        """Bytes per second of experts copied one behind the other, on the current stream."""
        store = self.full.store
        if self._move is None:
            self._move = make_mover(open_arena(2, self.full.codec, self.budget), store)
        move = self._move

        def copy(index: int) -> None:
            layer, expert = divmod(index, store.num_experts)
            move(ExpertId(layer % store.num_layers, expert), expert % 2)

        return store.codec.payload_bytes / device_ms(copy, repeats=1, per_repeat=100).median * 1e3

    def conclude(self) -> None:
        """What all sections together say, those of earlier calls included."""
        facts = self.report.facts
        compared = compare_texts(facts.get("cells", []))
        facts["bit for bit, measured cells"] = compared
        if (outcome := facts.get("bit for bit, all policies")) is not None:
            self.report.summary["bit_equal"] = outcome["all_equal"] and not compared["different"]
        self.report.write()

    def _summarize(self, tier: str, sampling: str) -> None:
        summary, ours = self.report.summary, self.results[_cell(OURS, tier, sampling)]
        for name, key in SUMMARY.items():
            summary[f"{name}.{tier}.{sampling}"] = mean(ours.values(key))
        for rival in RIVALS:
            tpot_ms = mean(self.results[_cell(rival, tier, sampling)].values("tpot_ms"))
            summary[f"speedup_over_{rival}.{tier}.{sampling}"] = tpot_ms / summary[f"tpot_ms.{tier}.{sampling}"]

    def show(self, console: Console) -> None:
        """The cells as one table; means over prompts, the spread of TPOT beside it."""
        keys = (
            "over_floor_trace",
            "over_floor_ideal",
            "link_busy_in_need_frac",
            "acceptance",
            "union_mean",
            "hit_rate",
        )
        table = Table("cell", "n", "TPOT, ms", "spread", *keys)
        for cell, result in self.results.items():
            tpot = Sample(tuple(result.values("tpot_ms")))
            means = (f"{mean(values):.3f}" if (values := result.values(key)) else "" for key in keys)
            table.add_row(
                cell.name, str(len(tpot.values)), f"{mean(tpot.values):.2f}", f"{tpot.spread:.0%}", *means
            )  # fmt: skip
        console.print(table)


def run(options: Options, console: Console) -> Report:
    """The sections asked for; one that fails is named in the report, and the others go on.

    Raises:
        SpecterError: no device, or anything wrong with the input, before large work.
    """
    start = time.perf_counter()
    sections = options.sections.split(",")
    if unknown := [name for name in sections if name not in SECTIONS]:
        raise SpecterError(f"section {unknown[0]!r} is unknown", f"use some of: {','.join(SECTIONS)}")
    options.check()
    budget = DeviceBudget("cuda")
    hardware = load_hardware(options.hardware)
    inputs = {"hardware": dataclasses.asdict(hardware), "num_prompts": options.num_prompts}
    here = provenance.of_device(budget.device, options.commit) | inputs
    Earlier.read(Report(options.out, here), sections)  # refuses before loading
    num_prompts = max(options.num_prompts, options.num_lossless)
    prompts = options.load_prompts(num_prompts, PROMPT_TOKENS)
    spread = prompts[:: num_prompts // options.num_prompts][: options.num_prompts]  # from all data sets
    prompts = [*spread, *(prompt for prompt in prompts if prompt not in spread)]
    warmup = Tokenizer.from_file(str(options.tokenizer)).encode((options.prompts / "warmup.txt").read_text()).ids
    full = options.load(budget, console)
    report = options.report(options.out, full, budget)
    report.provenance |= inputs
    earlier = Earlier.read(report, sections)
    if earlier.sections:
        console.print(f"kept from earlier calls: {', '.join(earlier.sections)}", highlight=False)
    with make_progress(console, auto_refresh=False) as progress:
        bench = RoundsBench(
            full, budget, hardware, prompts, warmup[:PROMPT_TOKENS], options, report, progress, Beds(full, budget),
            earlier,
        )  # fmt: skip
        for name in sections:
            run_section(name, getattr(bench, name), report, console)
            bench.conclude()
    use = budget.use()
    report.facts["device memory"] = dataclasses.asdict(use)
    before = report.facts.get("seconds: all", 0.0) if earlier.sections else 0.0
    report.facts["seconds: all"] = round(before + time.perf_counter() - start, 1)
    report.write()
    bench.show(console)
    return report


def _cell(system: str, tier: str, sampling: str) -> Cell:
    if system == "resident":
        tier = "high"
    elif system == "on_demand":  # keeps nothing and loads k experts a layer, whatever the text and the budget
        tier, sampling = "high", "greedy"
    return Cell(system, tier, sampling, K if "specter" in system else 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Raises SpecterError for bad input; exits with 1 if a section failed."""
    console = Console(width=180)
    report = run(parse_arguments(Options, sys.argv[1:] if arguments is None else arguments), console)
    for title, content in (("summary", report.summary), ("skipped", report.skipped)):
        for key, value in content.items():
            console.print(f"{title}: {key} = {value}", highlight=False)
    if report.skipped:
        sys.exit(1)
