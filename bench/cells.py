"""One cell of the rounds bench: a system, a budget, a way of sampling and a depth, over several prompts."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from bench.int4 import Int4Layer
from bench.unfused import UnfusedDraft
from specter.build import build_engine
from specter.config import BudgetConfig, DatasetConfig, ModelConfig, RunConfig, SamplingConfig, SystemConfig
from specter.errors import SpecterError
from specter.experts.cache import CacheState
from specter.experts.transfer import Backend
from specter.memory import num_slots
from specter.metrics import Metrics, accesses, summarize
from specter.models.cuda.bed import Bed
from specter.models.cuda.draft import Draft
from specter.models.cuda.full_size import FullSize
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.no_gc import no_gc
from specter.models.spec import ExpertId
from specter.recording import Recording, RecordingModel
from specter.records import Generation
from specter.registry import import_modules
from specter.resolve import ResolvedRun
from specter.speculation.accept import TokenSampler
from specter.speculation.drafts import DRAFTS
from specter.timeline.base import Timeline
from specter.timeline.costs import CostModel
from specter.timeline.hardware import Hardware, load_hardware

TILE_ROWS = 16
MAX_K = 47
TPOT_TOKENS = 128
WARMUP_TOKENS = 64
KV_CAPACITY = 256
SAMPLINGS = ("greedy", "seeded")
SLOTS_PER_LAYER = {"high": 16, "low": 4}  # the published tiers of DeepSeek-V2-Lite
NO_GRAPHS = "no graphs"
NO_OVERLAP = "no overlap"
NO_FUSED_KERNEL = "no fused kernel"
CONF = Path("conf")
import_modules("baselines")


def load_group(group: str, name: str) -> dict[str, Any]:
    """One file of a configuration group. Raises SpecterError if there is none."""
    path = CONF / group / f"{name}.yaml"
    if not path.is_file():
        raise SpecterError(f"{path} does not exist", "run from the root of the repository")
    values: dict[str, Any] = yaml.safe_load(path.read_text())
    return values


@dataclass(frozen=True, slots=True)
class Cell:
    """What a record is of. `variant` names what was switched off, if anything; `model` is a file of conf/model."""

    system: str
    tier: str
    sampling: str
    k: int
    variant: str = ""
    model: str = "deepseek_v2_lite"

    @property
    def name(self) -> str:
        depth = f" K={self.k}" if self.k else ""
        return f"{self.system}{f' ({self.variant})' if self.variant else ''}, {self.tier}, {self.sampling}{depth}"

    def config(self) -> RunConfig:
        return RunConfig(
            model=ModelConfig(**load_group("model", self.model)),
            system=SystemConfig(**load_group("system", self.system)),
            budget=BudgetConfig(self.tier, policy="same_experts"),
            dataset=DatasetConfig(**load_group("dataset", "prose")),
            sampling=SamplingConfig(**load_group("sampling", self.sampling)),
            hardware=load_hardware(CONF / "hardware" / "h200_pcie5.yaml"),
            k=self.k or 1,
            kv_capacity=KV_CAPACITY,
        )


@dataclass(frozen=True, slots=True)
class CellResult:
    """Metrics of every prompt, and the tokens that were generated."""

    cell: Cell
    metrics: list[Metrics]
    tokens: list[list[int]]
    plain_copy_bytes_per_s: float  # of copies with nothing else to do, beside this cell
    warmed_by: str  # the cell whose warm-up left the cache that every text started from

    def values(self, key: str) -> list[float]:
        return [one[key] for one in self.metrics if one.get(key) is not None]

    def as_json(self) -> dict[str, Any]:
        """Every number over prompts: mean, least and greatest, and one by one."""
        keys = [key for key, value in self.metrics[0].items() if isinstance(value, int | float)]
        numbers = {key: self.values(key) for key in keys}
        return {
            **dataclasses.asdict(self.cell),
            "num_prompts": len(self.metrics),
            "warmed_by": self.warmed_by,
            "plain_copy_bytes_per_s": self.plain_copy_bytes_per_s,
            "text_digests": [digest(tokens) for tokens in self.tokens],
            **{key: {"mean": mean(v), "min": min(v), "max": max(v), "values": v} for key, v in numbers.items() if v},
        }


def digest(tokens: Sequence[int]) -> str:
    """Tells generated texts apart, where a record need not hold them."""
    return hashlib.sha256(" ".join(map(str, tokens)).encode()).hexdigest()[:16]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Beds:
    """Beds of one model, made as they are asked for; all systems of a budget run on the same one, in turn."""

    def __init__(self, full: FullSize, budget: DeviceBudget) -> None:
        self.full, self._budget = full, budget
        self._beds: dict[tuple[int, str, str], Bed] = {}
        self._unpacked: list[Int4Layer] = []

    def get(self, cell: Cell, prompt_len: int) -> Bed:
        """The bed for a cell, with the graphs of all its passes but a text's last."""
        spec = self.full.spec
        num_slots = spec.num_moe_layers * (
            spec.num_experts if cell.system == "resident" else SLOTS_PER_LAYER[cell.tier]
        )
        launches = cell.variant if cell.variant in (NO_GRAPHS, NO_FUSED_KERNEL) else ""
        key = num_slots, cell.sampling, launches
        if key not in self._beds:
            options = load_group("sampling", cell.sampling)
            temperature = None if cell.sampling == "greedy" else options["temperature"]
            self._beds[key] = Bed(
                self.full,
                num_slots,
                self._budget,
                KV_CAPACITY,
                MAX_K + 1,
                MAX_K,
                temperature,
                options["seed"],
                cell.variant != NO_GRAPHS,
                cell.system == "resident",
                partial(UnfusedDraft, self.unpacked()) if cell.variant == NO_FUSED_KERNEL else Draft,
            )
        self._beds[key].capture({1, cell.k + 1, prompt_len})
        return self._beds[key]

    def unpacked(self) -> list[Int4Layer]:
        """The draft's codes as a plain backend reads them, on the device."""
        if not self._unpacked:
            self._unpacked = self.full.int4_layers()
        return self._unpacked


@dataclass(frozen=True, slots=True)
class WarmCache:
    """The cache that a warm-up has left."""

    warmed_by: str  # the cell's name
    state: CacheState


@dataclass(frozen=True, slots=True)
class Generations:
    """What a cell generated, before anything is held against a machine's rates."""

    cell: Cell
    num_slots: int
    costs: CostModel
    texts: list[tuple[Generation, Recording, list[ExpertId]]]  # with the residents at the first commit
    warm: WarmCache  # that every text started from


def run_cell(
    cell: Cell,
    bed: Bed,
    prompts: Sequence[Sequence[int]],
    warmup: Sequence[int],
    make_timeline: Callable[[], Timeline],
    num_tokens: int = TPOT_TOKENS,
    warmup_tokens: int = WARMUP_TOKENS,
    warm: WarmCache | None = None,
) -> Generations:
    """Warms up once and starts every prompt from the cache that this leaves, restored outside the timing.

    Args:
        warm: of an earlier cell of the same eviction, slots and way of sampling, instead of a warm-up.
    """
    config = cell.config()
    bed.poison()  # or the last cell's experts would stand in for copies that have not arrived
    recorder = RecordingModel(DRAFTS[config.system.draft].join(bed.model, bed.own_draft))
    costs = CostModel(bed.spec, TILE_ROWS, KV_CAPACITY)
    run = ResolvedRun(config, costs, num_slots(config.model, config.budget, config.system, costs))
    backend = Backend(make_timeline(), bed.move, bed.open_write_back)
    engine = build_engine(run, recorder, TokenSampler(), backend)
    if warm is None:
        if warmup_tokens:
            engine.generate(warmup, warmup_tokens)
        warm = WarmCache(cell.name, engine.cache.snapshot())
    texts = []
    for prompt in prompts:
        engine.cache.restore(warm.state)
        engine.timeline.drain()
        residents: list[ExpertId] = []

        def on_commit(tokens: list[int], residents: list[ExpertId] = residents) -> None:
            if not residents:
                residents.extend(engine.cache.residency.experts())

        with no_gc():
            generation = engine.generate(prompt, num_tokens, on_commit)
        texts.append((generation, recorder.finish(generation, {}), residents))
    return Generations(cell, len(engine.cache.residency.slots), costs, texts, warm)


def measure(generations: Generations, hardware: Hardware) -> CellResult:
    """Metrics of every text, floors by the rates of `hardware`."""
    cell, costs = generations.cell, generations.costs
    metrics = []
    for generation, recording, residents in generations.texts:
        if cell.system == "resident":  # its routing stays on the device
            window_ms = generation.rounds[-1].end_ms - generation.prefill_end_ms
            ttft_ms = generation.prefill_end_ms - generation.start_ms
            metrics.append({"tpot_ms": window_ms / (len(generation.tokens) - 1), "ttft_ms": ttft_ms})
            continue
        rounds = accesses(generation, recording)
        run = ResolvedRun(replace(cell.config(), hardware=hardware), costs, generations.num_slots)
        metrics.append(summarize(run, generation, rounds, residents))
    tokens = [generation.tokens for generation, _, _ in generations.texts]
    return CellResult(cell, metrics, tokens, hardware.link_bytes_per_s, generations.warm.warmed_by)
