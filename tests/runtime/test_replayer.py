"""Replays that share a warm-up equal runs with a warm-up of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.plan import compose
from specter import session
from specter.models.full_size import FULL_SIZE
from specter.recording import RecordedPass, Recording, ReplayModel
from specter.resolve import ResolvedRun, resolve
from specter.session import Replayer, run_input
from specter.speculation.accept import TokenSampler

SPEC = FULL_SIZE["deepseek_v2_lite"]

NUM_TOKENS, K = 12, 3


def record(seed: int, k: int) -> Recording:
    """A text of NUM_TOKENS tokens whose drafts are all accepted; every layer routes by chance."""
    rng = np.random.default_rng(seed)

    def routing(*shape: int) -> np.ndarray:
        ranked = rng.random((*shape, SPEC.num_experts)).argsort(axis=-1)
        return ranked[..., : SPEC.top_k].astype(np.int16)

    prompt, num_layers = [seed, 7, 7], SPEC.num_moe_layers
    passes = [RecordedPass(0, prompt, routing(0, num_layers), routing(num_layers, len(prompt)), [1])]
    num_left = NUM_TOKENS - 1
    while num_left:
        drafts = [1] * min(k, num_left - 1)
        new = [*drafts, 1]
        inputs = [1, *drafts]
        position = len(prompt) + NUM_TOKENS - 1 - num_left
        routings = routing(len(drafts), num_layers), routing(num_layers, len(inputs))
        passes.append(RecordedPass(position, inputs, *routings, new))
        num_left -= len(new)
    return Recording(passes, {})


def configured(system: str, budget: str = "low", index: int = 0) -> ResolvedRun:
    config = compose([f"system={system}", f"budget={budget}", f"k={K}"])
    return resolve(replace(config, warmup_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS, input=index))


@pytest.mark.parametrize("system", ["specter", "specter_deadline", "lru", "mixtral_offloading", "on_demand"])
def test_a_shared_warm_up_changes_no_result(system: str) -> None:
    run = configured(system)
    depth = run.config.draft_len
    warmup, inputs = record(0, depth), [record(seed, depth) for seed in (1, 2, 1)]
    replayer = Replayer()
    for index, recording in enumerate(inputs):
        shared = replayer.replay(configured(system, index=index), recording, warmup)
        model = ReplayModel([recording, warmup], SPEC.num_dense_layers, SPEC.num_experts)
        alone = run_input(run, model, TokenSampler(), recording.prompt, warmup.prompt)
        assert shared.generation == alone.generation
        assert shared.metrics == alone.metrics
        assert sum(one.num_hits for one in alone.generation.rounds) > 0 or system == "on_demand"


def test_runs_that_differ_beyond_their_input_warm_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    build = session.build_engine

    def counted(run: ResolvedRun, *arguments: object) -> object:
        built.append(run.config.budget.tier)
        return build(run, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "build_engine", counted)
    replayer, recording = Replayer(), record(1, 0)
    for budget, seed in (("low", 0), ("low", 0), ("high", 0), ("high", 9)):
        warmup = record(seed, 0)
        result = replayer.replay(configured("lru", budget), recording, warmup)
        assert result.warmup is warmup
    assert built == ["low", "high", "high"], "another budget, and another warm-up text, need a new warm-up"
