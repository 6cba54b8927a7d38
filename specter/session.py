"""One input through one system: warm up, generate, measure; live and by replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specter.build import build_engine
from specter.engine import Engine
from specter.experts.transfer import Backend
from specter.metrics import Metrics, accesses, summarize
from specter.models.base import Model
from specter.recording import Recording, RecordingModel, ReplayModel
from specter.records import Generation
from specter.resolve import ResolvedRun
from specter.speculation.accept import Sampler, TokenSampler
from specter.timeline.hardware import Hardware
from specter.timeline.trace import TraceOp

OnCommit = Callable[[list[int]], None]


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

    Every input starts from the same cache contents and recency, because each starts from the same warm-up.

    Args:
        backend: see `build_engine`.
        on_commit: called with the tokens of every commit, the warm-up's included.
        predicts: see `RecordingModel`.
        measured: the hardware whose rates the floors use, as found after the generation; by default the configured one.
    Raises:
        SpecterError: a prompt that is empty or too long for the KV cache.
    """
    recorder = RecordingModel(model, predicts)
    engine = build_engine(run, recorder, sampler, backend)
    warmup = None
    if run.config.warmup_tokens:
        warmup = recorder.finish(engine.generate(warmup_prompt, run.config.warmup_tokens, on_commit), {})
    generation = engine.generate(prompt, run.config.max_new_tokens, on_commit)
    if measured is not None:
        run = replace(run, config=replace(run.config, hardware=measured(generation)))
    result = _result(run, engine, recorder.finish(generation, {}), warmup)
    if measured is not None:
        result.metrics["plain_copy_bytes_per_s"] = run.config.hardware.link_bytes_per_s
    return result


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
        model = ReplayModel([recording, warmup], run.spec.num_dense_layers, run.spec.num_experts)
        engine = self._engine(run, model, warmup.prompt).fork(model)
        engine.generate(recording.prompt, run.config.max_new_tokens)
        return _result(run, engine, recording, warmup)

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
