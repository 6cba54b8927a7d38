"""One input through one system: warm up, generate, measure. Live runs and replays take the same path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specter.build import build_costs, build_engine
from specter.config import RunConfig
from specter.engine import Engine
from specter.experts.transfer import Mover, SendBack, move_nothing, open_nothing
from specter.metrics import Metrics, accesses, summarize
from specter.models.base import Model
from specter.models.spec import ExpertId
from specter.recording import Recording, RecordingModel, ReplayModel
from specter.records import Generation
from specter.speculation.accept import Sampler, TokenSampler
from specter.timeline.base import Timeline
from specter.timeline.trace import TraceOp

OnCommit = Callable[[list[int]], None]


@dataclass(frozen=True, slots=True)
class RunResult:
    """All that a run leaves: its rounds, its numbers, and the recording that lets it be replayed."""

    generation: Generation
    metrics: Metrics
    recording: Recording
    warmup: Recording | None  # the recording of the warm-up
    trace: list[TraceOp] | None


def run_input(
    config: RunConfig,
    model: Model,
    sampler: Sampler,
    prompt: Sequence[int],
    warmup_prompt: Sequence[int],
    mover: Mover = move_nothing,
    on_commit: OnCommit = lambda tokens: None,
    timeline: Timeline | None = None,
    open_write_back: Callable[[int], SendBack] = open_nothing,
    foresees: bool = False,
) -> RunResult:
    """Runs `prompt` on a fresh engine whose cache the warm-up has filled, outside the timing.

    Every input starts from the same cache contents and recency, because each starts from the same warm-up.

    Args:
        on_commit: called with the tokens of every commit, the warm-up's included.
        timeline, open_write_back: see `build_engine`. foresees: see `RecordingModel`.
    Raises:
        SpecterError: a prompt that is empty or too long for the KV cache.
    """
    recorder = RecordingModel(model, foresees)
    engine = build_engine(config, recorder, sampler, mover, timeline, open_write_back=open_write_back)
    warmup = None
    if config.warmup_tokens:
        generation = engine.generate(warmup_prompt, config.warmup_tokens, on_commit)
        warmup = recorder.finish(generation, {})
    generation, residents = _generate(engine, prompt, config.max_new_tokens, on_commit)
    return _result(config, engine, generation, residents, recorder.finish(generation, {}), warmup)


class Replayer:
    """Replays runs from recordings. Runs one after the other that differ in their input alone share one warm-up: it
    leaves the same state whatever comes next, so each goes on from a copy of the engine that it leaves."""

    def __init__(self) -> None:
        self._warm: tuple[RunConfig, list[int], Engine] | None = None  # of which runs, after which prompt

    def replay(self, config: RunConfig, recording: Recording, warmup: Recording) -> RunResult:
        """The run from recordings of its prompt and of the warm-up, made with the same K and sampling.

        Raises:
            SpecterError: something else was recorded, or the budget leaves no slot (`DoesNotFit`).
        """
        spec = build_costs(config).spec
        model = ReplayModel([recording, warmup], spec.num_dense_layers, spec.num_experts)
        engine = self._engine(config, model, warmup.prompt).fork(model)
        generation, residents = _generate(engine, recording.prompt, config.max_new_tokens)
        return _result(config, engine, generation, residents, recording, warmup)

    def _engine(self, config: RunConfig, model: ReplayModel, prompt: list[int]) -> Engine:
        """An engine that the warm-up has left, never to be run."""
        any_input = replace(config, input=0)
        if self._warm is None or self._warm[:2] != (any_input, prompt):
            engine = build_engine(config, model, TokenSampler())
            if config.warmup_tokens:
                engine.generate(prompt, config.warmup_tokens)
            self._warm = any_input, prompt, engine
        return self._warm[2]


def replay_input(config: RunConfig, recording: Recording, warmup: Recording) -> RunResult:
    """One run alone; see `Replayer.replay`."""
    return Replayer().replay(config, recording, warmup)


def _generate(
    engine: Engine, prompt: Sequence[int], max_new_tokens: int, on_commit: OnCommit = lambda tokens: None
) -> tuple[Generation, list[ExpertId]]:
    """Generates, and tells which experts had slots at the first commit."""
    residents: list[ExpertId] = []

    def on_run_commit(tokens: list[int]) -> None:
        if not residents:
            residents.extend(engine.cache.residency.experts())
        on_commit(tokens)

    return engine.generate(prompt, max_new_tokens, on_run_commit), residents


def _result(
    config: RunConfig,
    engine: Engine,
    generation: Generation,
    residents: Sequence[ExpertId],
    recording: Recording,
    warmup: Recording | None,
) -> RunResult:
    metrics = summarize(
        generation,
        accesses(generation, recording),
        residents,
        len(engine.cache.residency.slots),
        config.system,
        engine.costs,
        config.hardware,
    )
    return RunResult(generation, metrics, recording, warmup, engine.timeline.ops)
