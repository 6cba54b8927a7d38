"""One input through one system: warm up, generate, measure. Live runs and replays take the same path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specter.build import build_costs, build_engine
from specter.config import RunConfig
from specter.experts.transfer import Mover, SendBack, move_nothing, open_nothing
from specter.metrics import Metrics, accesses, summarize
from specter.model.base import Model
from specter.model.spec import ExpertId
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

    residents: list[ExpertId] = []

    def on_run_commit(tokens: list[int]) -> None:
        if not residents:
            residents.extend(engine.cache.residency.experts())
        on_commit(tokens)

    generation = engine.generate(prompt, config.max_new_tokens, on_run_commit)
    recording = recorder.finish(generation, {})
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


def replay_input(config: RunConfig, recording: Recording, warmup: Recording) -> RunResult:
    """The same run from recordings of its prompt and of the warm-up, made with the same K and sampling."""
    spec = build_costs(config).spec
    model = ReplayModel([recording, warmup], spec.num_dense_layers, spec.num_experts)
    return run_input(config, model, TokenSampler(), recording.prompt, warmup.prompt)
