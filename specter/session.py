"""One input through one system: build the engine, warm up, generate, measure; live and by replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specter.engine import Engine
from specter.errors import SpecterError
from specter.execution import DRAFTED, PERFECT
from specter.experts.cache import ExpertCache
from specter.experts.policies.base import EVICTIONS, PLANNERS, PREDICTORS, Pool, layer_quotas
from specter.experts.residency import Residency
from specter.experts.transfer import TRANSFERS, Backend, Mover, move_nothing
from specter.metrics import Metrics, accesses, summarize
from specter.models.base import Model
from specter.models.spec import ExpertId
from specter.recording import RecordedPass, Recording, RecordingModel, ReplayModel
from specter.records import Generation, OnCommit
from specter.resolve import ResolvedRun
from specter.speculation.accept import Sampler, TokenSampler
from specter.speculation.depth import AutoDepth, Depth
from specter.speculation.drafts import DRAFTS
from specter.timeline.hardware import Hardware
from specter.timeline.trace import TraceOp
from specter.timeline.virtual import VirtualTimeline


@dataclass(frozen=True, slots=True)
class RunResult:
    """Rounds and metrics of a run, and its recording for replays."""

    generation: Generation
    metrics: Metrics
    recording: Recording
    warmup: Recording | None  # the recording of the warm-up
    trace: list[TraceOp] | None


def run_input(
    run: ResolvedRun,
    model: Model,
    sampler: Sampler,
    prompt: Sequence[int],
    warmup_prompt: Sequence[int],
    backend: Backend | None = None,
    on_commit: OnCommit = lambda tokens: None,
    predicts: bool = False,
    measured: Callable[[Generation], Hardware] | None = None,
) -> RunResult:
    """Runs `prompt` on a fresh engine whose cache the warm-up has filled, outside the timing.

    Every input starts from the same cache contents and recency, because each starts from the same warm-up, which EOS
    does not end.

    Args:
        backend: see `build_engine`.
        on_commit: called with the tokens of every commit, the warm-up's included.
        predicts: see `RecordingModel`.
        measured: the hardware whose rates the floors use, as found after the generation; by default the configured one.
    Raises:
        SpecterError: a prompt that is empty or too long for the KV cache.
    """
    if run.config.execution.routes != DRAFTED:
        raise SpecterError(
            f"execution.routes={run.config.execution.routes} replaces the routing of a recording",
            "put the run into an experiment of the virtual clock (conf/experiment/planner.yaml), or set "
            f"execution.routes={DRAFTED}",
        )
    recorder = RecordingModel(model, predicts)
    engine = build_engine(run, recorder, sampler, backend)
    warmup = None
    if run.config.warmup_tokens:
        warmup = recorder.finish(engine.generate(warmup_prompt, run.config.warmup_tokens, on_commit), {})
    generation = engine.generate(prompt, run.config.max_new_tokens, on_commit, run.stop_ids)
    if measured is not None:
        run = replace(run, config=replace(run.config, hardware=measured(generation)))
    result = _result(run, engine, recorder.finish(generation, {}), warmup)
    if measured is not None:
        result.metrics["plain_copy_bytes_per_s"] = run.config.hardware.link_bytes_per_s
    return result


def build_engine(run: ResolvedRun, model: Model, sampler: Sampler, backend: Backend | None = None) -> Engine:
    """An engine with an empty cache, or a full one for a system that holds all experts.

    Args:
        backend: by default a `virtual_backend` without payloads.
    Raises:
        SpecterError: the model has other layers or experts than the one charged.
    """
    config, costs, spec = run.config, run.costs, run.spec
    system = config.system
    shape = ("num_layers", "num_dense_layers", "num_experts", "top_k")
    if any(getattr(model, name) != getattr(spec, name) for name in shape):
        raise SpecterError(
            f"{config.model.checkpoint} has other layers or experts than {spec.name}, which it is to be charged as",
            "set model.charged_as to the full-size model that this checkpoint stands for",
        )
    backend = backend or virtual_backend(run)
    transfer = TRANSFERS[system.transfer](backend, run.link_bytes, system.num_buffers)
    quotas = layer_quotas(run.num_slots, spec.num_moe_layers)
    pool = Pool(quotas, spec.num_experts, costs.payload_bytes, system.num_staging)
    eviction = EVICTIONS[system.eviction](pool)
    cache = ExpertCache(Residency(run.num_slots), eviction, transfer, costs.num_staged // 2 or None)
    if system.holds_all or (costs.decodes and run.num_slots == spec.num_moe_layers * spec.num_experts):
        cache.place([ExpertId(m, e) for m in range(spec.num_moe_layers) for e in range(spec.num_experts)])
    return Engine(
        model,
        sampler,
        cache,
        transfer.timeline,
        costs,
        planner=PLANNERS[system.planner](pool),
        depth=_depth(run),
        predictor=PREDICTORS[system.predictor](),
        has_own_draft=DRAFTS[system.draft].is_own,
        copies_kv=DRAFTS[system.draft].copies_kv,
        by_token=config.execution.by_token,
    )


def _depth(run: ResolvedRun) -> Depth:
    config = run.config
    if config.is_auto:
        return AutoDepth(run.costs, config.hardware, config.draft_len)
    return Depth(config.draft_len)


def virtual_backend(run: ResolvedRun, move: Mover = move_nothing) -> Backend:
    """A fresh virtual clock of the run's hardware; `move` copies payloads, which a replay does not have."""
    return Backend(VirtualTimeline(run.config.hardware, run.config.trace), move)


def with_routes(recording: Recording, run: ResolvedRun) -> Recording:
    """The recording with the draft's routing that `execution.routes` states."""
    routes = run.config.execution.routes
    if routes == DRAFTED:
        return recording

    def replaced(one: RecordedPass) -> RecordedPass:
        if routes == PERFECT:  # row i of a pass is the input of draft step i
            return replace(one, draft_routing=one.target_routing[:, : len(one.draft_routing)].swapaxes(0, 1))
        other = (one.draft_routing + run.spec.num_experts // 2) % run.spec.num_experts
        return replace(one, draft_routing=other)

    return replace(recording, passes=[replaced(one) for one in recording.passes])


class Replayer:
    """Replays runs from recordings. Consecutive runs that differ in their input alone share one warm-up: each goes on
    from a copy of the engine that the warm-up has left."""

    def __init__(self) -> None:
        self._warm: tuple[object, list[int], Engine] | None = None  # configuration, prompt, warm engine

    def replay(self, run: ResolvedRun, recording: Recording, warmup: Recording) -> RunResult:
        """The run from recordings of its prompt and of the warm-up, made with the same K and sampling.

        Raises:
            SpecterError: the recordings are of another run.
        """
        recording, warmup = (with_routes(one, run) for one in (recording, warmup))
        model = ReplayModel([recording, warmup], run.spec.num_dense_layers, run.spec.num_experts)
        engine = self._engine(run, model, warmup.prompt).fork(model)
        engine.generate(recording.prompt, run.config.max_new_tokens, stop_ids=run.stop_ids)
        return _result(run, engine, Recording(model.played, recording.meta), warmup)

    def _engine(self, run: ResolvedRun, model: ReplayModel, prompt: list[int]) -> Engine:
        """An engine that the warm-up has left, to be copied and never run."""
        any_input = replace(run.config, input=0)
        if self._warm is None or self._warm[:2] != (any_input, prompt):
            engine = build_engine(run, model, TokenSampler())
            if run.config.warmup_tokens:
                engine.generate(prompt, run.config.warmup_tokens)
            self._warm = any_input, prompt, engine
        return self._warm[2]


def _result(run: ResolvedRun, engine: Engine, recording: Recording, warmup: Recording | None) -> RunResult:
    """The result of the engine's last generation."""
    generation = engine.generation
    assert generation is not None
    rounds = accesses(generation, recording) if recording.has_routing else None
    metrics = summarize(run, generation, rounds)
    return RunResult(generation, metrics, recording, warmup=warmup, trace=engine.timeline.ops)
