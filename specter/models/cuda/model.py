"""A model on this machine's GPU that serves inputs under any budget; the counterpart of `specter.models.cpu.live`."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from specter.config import RunConfig, SamplingConfig, SystemConfig
from specter.engine import Engine
from specter.errors import SpecterError
from specter.execution import ExecutionConfig
from specter.experts.transfer import Backend, move_nothing
from specter.kernels.compilation import check_compiler, compiling
from specter.metrics import link_bytes_per_s
from specter.models.base import Model
from specter.models.cuda.arena import WriteBack
from specter.models.cuda.loaded_model import LoadedModel, load_model
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.no_gc import no_gc
from specter.models.cuda.runner import ModelRunner, RunnerOptions, check_sampling
from specter.models.cuda.target import OUTPUT_ROWS
from specter.models.cuda.weights import OwnMemory
from specter.records import Generation
from specter.resolve import ResolvedRun, resolve
from specter.session import OnCommit, RunResult, build_engine, run_input
from specter.speculation.accept import TokenSampler
from specter.speculation.depth import CAPTURED
from specter.speculation.drafts import DRAFTS
from specter.timeline.costs import CostModel
from specter.timeline.cuda import CudaTimeline
from specter.timeline.hardware import Hardware
from specter.timeline.stress import StressedTimeline

# conf/system/lru.yaml: plain decoding through the expert cache, which runs where the model does not fit, too.
LRU = SystemConfig(name="lru", residents_of="mixtral_offloading")


@dataclasses.dataclass(slots=True)
class CudaModel:
    """A loaded model, and the runner of the last run."""

    model: LoadedModel
    budget: DeviceBudget
    notes: dict[str, str]  # provenance and degradations, for every run's env.json
    console: Console = dataclasses.field(default_factory=lambda: Console(stderr=True))  # for kernels that compile
    runner: ModelRunner | None = None  # reused by the next run with equal options

    @classmethod
    def load(cls, run: ResolvedRun, console: Console) -> CudaModel:
        """Loads the target, and the draft if the run speculates, within the memory of `config.hardware`.

        Raises SpecterError: sampling that the device does not support, no device, too little memory on either side, no
        C compiler, or a faulty checkpoint.
        """
        config = run.config
        check_sampling(config.sampling)
        budget = DeviceBudget("cuda", min(config.hardware.device_memory_bytes, DeviceBudget("cuda").cap_bytes))
        budget.check(int(run.fit()["device_total_bytes"]), f"{config.system.name} at this budget")
        check_compiler(budget.device, console)
        checkpoint, quantized = Path(config.model.checkpoint), Path(config.model.quantized)
        residual = Path(config.model.residual) if run.costs.decodes else None
        model = load_model(
            checkpoint, quantized, run.spec, budget, console, pin="prefer", with_draft=config.system.speculative,
            residual=residual,
        )  # fmt: skip
        is_inflated = model.source is not model.checkpoint
        origin = f", inflated from {model.checkpoint.spec.name} (tiled, BF16)" if is_inflated else ""
        notes = {
            "checkpoint": f"{run.spec.name}{origin}",
            "checkpoint_digest": model.checkpoint.digest(),
            "draft_origin": model.draft_origin,
            "inflated": str(is_inflated),
            "store_is_page_locked": str(model.load.is_pinned),
            "store_gb_per_s": f"{model.load.gb_per_s:.2f}",
        }
        if model.blobs is not None:
            notes |= {key: str(value) for key, value in model.blobs.facts.items()}
        return cls(model, budget, notes, console)

    def run(
        self, run: ResolvedRun, prompt: Sequence[int], warmup: Sequence[int], on_commit: OnCommit = lambda tokens: None
    ) -> RunResult:
        """Runs one input; see `session.run_input`. Raises SpecterError: the model was loaded for another codec."""
        run, config = self._with_real_sizes(run), run.config
        with compiling(self.console):
            runner = self.prepare(runner_options(run, longest=max(len(prompt), len(warmup))))
            link_before = runner.link_bytes_per_s()

            def measured(generation: Generation) -> Hardware:
                """The link at its fastest before, during and after the run: other processes share the host."""
                during = round(link_bytes_per_s(generation.rounds) or 0)
                fastest = max(link_before, during, runner.link_bytes_per_s())
                return dataclasses.replace(config.hardware, link_bytes_per_s=fastest, link_latency_ns=0)

            with _compute_first(self.budget.device, run.costs):
                model, backend = self._open(run, runner, len(prompt))
                with no_gc():
                    result = run_input(
                        run, model, TokenSampler(), prompt, warmup, backend=backend, on_commit=on_commit,
                        measured=measured,
                    )  # fmt: skip
        use = self.budget.use()
        result.metrics["device_peak_bytes"] = use.peak_reserved_bytes + use.context_bytes
        result.metrics["store_is_page_locked"] = self.model.load.is_pinned
        result.metrics.update(allocated(runner.own_memory, config.system))
        if self.model.blobs is not None:
            result.metrics.update(self.model.blobs.facts)
        return result

    @contextmanager
    def serving(self, run: ResolvedRun, longest: int) -> Iterator[Engine]:
        """An engine for any number of generations: the cache stays as the last one leaves it.

        Args:
            longest: tokens of the longest prompt.
        """
        run = self._with_real_sizes(run)
        with compiling(self.console):
            runner = self.prepare(runner_options(run, longest))
            with _compute_first(self.budget.device, run.costs):
                model, backend = self._open(run, runner, longest)
                yield build_engine(run, model, TokenSampler(), backend)

    def set_sampling(self, engine: Engine, sampling: SamplingConfig) -> None:
        """How an engine of `serving` selects tokens from here on. Raises SpecterError as `check_sampling`."""
        assert self.runner is not None
        self.runner.set_sampling(sampling)

    def _open(self, run: ResolvedRun, runner: ModelRunner, prompt_len: int) -> tuple[Model, Backend]:
        """Captures the graphs of a run; returns its model over empty slots, and a clock of the current stream."""
        config = run.config
        runner.set_sampling(config.sampling)
        runner.poison()  # a slot must not still hold the expert of the last run whose copy has not arrived
        # A pass with another number of drafts is padded to the next longer one of these.
        lens = CAPTURED if config.is_auto else ()
        row_counts = {1, config.draft_len + 1, *(k + 1 for k in lens if k < config.draft_len)}
        if prompt_len <= OUTPUT_ROWS:  # a longer prompt is launched kernel by kernel
            row_counts.add(prompt_len)
        runner.capture(row_counts, predicts_next=config.system.predictor != "none")
        # The slots of a resident runner are full already.
        move = move_nothing if runner.options.is_resident else runner.move
        backend = Backend(make_timeline(config, self.budget.device), move, partial(WriteBack, runner.arena))
        return DRAFTS[config.system.draft].join(runner, runner.own_draft), backend

    def _with_real_sizes(self, run: ResolvedRun) -> ResolvedRun:
        """The run with the blobs' own sizes, so that budget and link are exact to the byte."""
        model = self.model
        if run.costs.decodes != (model.blobs is not None):
            raise SpecterError(
                f"a run with codec={run.config.payload_codec} on a model that was loaded for another codec",
                "load the model again",
            )
        if model.blobs is None:
            return run
        return resolve(run.config, model.blobs.sizes)

    def prepare(self, options: RunnerOptions) -> ModelRunner:
        """The last runner if its options are equal, or a new one in its place."""
        if self.runner is None or self.runner.options != options:
            self.runner = None  # the slots of both need not fit side by side
            gc.collect()
            torch.cuda.empty_cache()
            self.budget.restart_peaks()
            self.runner = ModelRunner(self.model, self.budget, options)
        return self.runner

    def agrees_with_plain(
        self, run: ResolvedRun, result: RunResult, on_commit: OnCommit = lambda tokens: None
    ) -> bool | None:
        """Whether plain decoding yields the same tokens, with experts in the form that is loaded."""
        config = run.config
        budget = dataclasses.replace(config.budget, policy="same_experts")  # the draft's bytes are allocated
        plain = dataclasses.replace(
            config,
            system=LRU,
            codec=config.payload_codec,
            budget=budget,
            execution=ExecutionConfig(),
            warmup_tokens=0,
            trace=False,
        )
        expected = self.run(resolve(plain), result.recording.prompt, (), on_commit).generation
        return expected.tokens == result.generation.tokens


@contextmanager
def _compute_first(device: torch.device, costs: CostModel) -> Iterator[None]:
    """Where waves are decoded beside compute, computes on a stream of higher priority: otherwise all programs of a
    decoding would start before those of the products of the wave before."""
    if not costs.decodes or device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
        yield
    torch.cuda.synchronize(device)


def make_timeline(config: RunConfig, device: torch.device) -> CudaTimeline:
    """A fresh device clock for the run's execution options."""
    execution = config.execution
    if execution.stress_seed is not None:
        return StressedTimeline(device, trace=config.trace, seed=execution.stress_seed)
    return CudaTimeline(device, trace=config.trace, is_serial=not execution.overlap)


def runner_options(run: ResolvedRun, longest: int) -> RunnerOptions:
    """The options of a run whose longest prompt has `longest` tokens."""
    config = run.config
    return RunnerOptions(
        num_slots=run.num_slots,
        kv_capacity=config.kv_capacity,
        max_rows=max(config.draft_len + 1, longest),
        max_draft_len=max(config.draft_len, 1),
        owns_draft=DRAFTS[config.system.draft].is_own,
        is_resident=config.system.holds_all and not config.system.speculative and not run.costs.decodes,
        is_fused=config.execution.fused,
        is_by_expert=config.execution.by_expert,
        is_graphed=config.execution.graphs,
        slot_bytes=run.slots.num_bytes if run.costs.decodes else 0,
        num_staged=run.costs.num_staged,
    )


def allocated(own: OwnMemory | None, system: SystemConfig) -> dict[str, int | str]:
    """What an own draft really allocates, beside what the budget charges for it (`device_draft_shared_bytes`)."""
    kind = DRAFTS[system.draft]
    if own is None or not kind.is_own:
        return {}
    charged = "BF16" if kind.weight_bits is None else "INT4"
    return {
        **{f"allocated_{part}_bytes": num_bytes for part, num_bytes in own.bytes_by_part.items()},
        "draft_copy": f"BF16 on the device, charged to the budget as {charged}",
    }
