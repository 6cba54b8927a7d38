"""Hits and bytes of every baseline on 1000 random traces equal those of an independent implementation (policies.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from baselines.specmoeoff import choose_k, simulate
from harness.plan import compose
from specter import resolve as resolving
from specter.config import RunConfig, SystemConfig
from specter.models.base import Choose, FinishedStep, Output, Routing
from specter.models.full_size import FULL_SIZE
from specter.models.spec import ModelSpec
from specter.resolve import resolve
from specter.session import build_engine
from specter.speculation.accept import TokenSampler
from specter.timeline.costs import CostModel
from tests.baselines.policies import POLICIES, Pass
from tests.helpers import BASELINES

DEEPSEEK_V2_LITE = FULL_SIZE["deepseek_v2_lite"]

SPEC: ModelSpec = replace(
    DEEPSEEK_V2_LITE, name="trace", num_layers=3, num_dense_layers=0, num_experts=8, top_k=3, max_positions=64
)
NUM_TRACES = 1000
NUM_TOKENS = 6
QUOTA = 4
BY_NAME = {system.name: system for system in BASELINES}


def token_at(position: int) -> int:
    return position % 7


class TraceModel:
    """Random routing, skewed and repetitive as real routing is; a draft that is right four times in five."""

    num_layers, num_dense_layers = SPEC.num_layers, SPEC.num_dense_layers
    num_experts, top_k = SPEC.num_experts, SPEC.top_k

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.log: list[Pass] = []
        self.drafts: list[np.ndarray] = []
        self.popularity = 0.5 ** np.arange(self.num_experts) + 0.05

    def rows(self, *shape: int) -> np.ndarray:
        keys = self.random.random((*shape, self.num_experts)) ** (1 / self.popularity)
        return np.argsort(-keys, axis=-1)[..., : self.top_k].astype(np.int16)

    def reset(self) -> None:
        self.drafts = []

    def crop(self, length: int) -> None:
        pass

    def begin_draft(self, token: int, position: int, choose: Choose) -> None:
        self.position, self.choose = position, choose

    def draft_step(self) -> FinishedStep:
        self.position += 1
        token = token_at(self.position) + int(self.random.random() > 0.8)
        self.drafts.append(self.rows(self.num_layers))
        return FinishedStep(self.choose(token, self.position), self.drafts[-1])

    def target_pass(self, tokens: Sequence[int], position: int, num_outputs: int) -> TracePass:
        target = TracePass(self.rows(self.num_layers, len(tokens)), self.rows(self.num_layers, len(tokens)))
        target.tokens = [token_at(position + len(tokens) - num_outputs + i + 1) for i in range(num_outputs)]
        drafts = [draft.tolist() for draft in self.drafts]
        self.log.append(Pass(target.routing.tolist(), target.predicted.tolist(), drafts))
        self.drafts = []
        return target


class TracePass:
    def __init__(self, routing: np.ndarray, predicted: np.ndarray) -> None:
        self.routing, self.predicted = routing, predicted
        self.tokens: list[int] = []

    def attend_and_route(self, layer: int) -> Routing:
        return self.routing[layer]

    def predict_next(self, layer: int) -> Routing:
        return self.predicted[layer]

    def decode(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        pass

    def run_experts(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        pass

    def combine(self, layer: int) -> None:
        pass

    def outputs(self) -> list[Output]:
        return list(self.tokens)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A machine whose copies and launches take no time, so that planned experts always arrive in time."""
    monkeypatch.setitem(resolving.FULL_SIZE, "trace", SPEC)
    config = compose(["budget.policy=same_experts", f"budget.experts_per_layer={QUOTA}", "k=5", "tile_rows=8"])
    config.kv_capacity = 64
    config.model.charged_as = "trace"
    config.hardware = replace(
        config.hardware, launch_ns=0, sync_ns=0, link_latency_ns=0, link_bytes_per_s=10**18, kernel_ns=1000
    )
    return config


@pytest.mark.parametrize("name", POLICIES)
def test_hits_and_bytes_equal_an_independent_policy(config: RunConfig, name: str) -> None:
    system: SystemConfig = BY_NAME[name]
    for seed in range(NUM_TRACES):
        model = TraceModel(seed)
        engine = build_engine(resolve(replace(config, system=system)), model, TokenSampler())
        generation = engine.generate([1], NUM_TOKENS)
        assert generation.tokens == [token_at(position) for position in range(1, 1 + NUM_TOKENS)]
        expected = POLICIES[name](model.log, SPEC.num_layers, QUOTA)
        counters = engine.cache.counters
        found = (counters.num_hits + counters.num_late_hits, counters.num_misses, counters.num_prefetched)
        assert found == (expected.num_present, expected.num_missing, expected.num_prefetched), seed
        copies = expected.num_missing + expected.num_prefetched + expected.num_write_backs
        assert engine.timeline.totals().copied_bytes == copies * engine.costs.payload_bytes, seed


def test_every_baseline_has_an_independent_policy() -> None:
    assert set(POLICIES) | {"resident"} == set(BY_NAME)


class TestDepthByCostModel:
    """SpecMoEOff's own choice of K."""

    costs = CostModel(DEEPSEEK_V2_LITE, 16, 256)
    hardware = compose([]).hardware
    unions: ClassVar = {n: 64 * (1 - (1 - 6 / 64) ** n) for n in range(1, 40)}

    def choose(self, acceptance: float, num_slots: int, **machine: Any) -> int:
        hardware = replace(self.hardware, **machine)
        return choose_k(range(1, 33), self.unions, acceptance, num_slots, self.costs, hardware)

    def test_a_draft_that_is_never_accepted_gets_the_least_depth(self) -> None:
        assert self.choose(0.0, 16 * 26) == 1

    def test_a_better_draft_gets_more_depth(self) -> None:
        assert self.choose(0.6, 2 * 26) < self.choose(0.97, 2 * 26)

    def test_by_hand(self) -> None:
        one = simulate(1, 12.0, 0.5, 10 * 26, self.costs, self.hardware)
        assert one.num_tokens == 1.5
        assert one.h2d_ms == pytest.approx(2 * 26 * self.hardware.copy_ns(self.costs.payload_bytes) / 1e6)
        assert one.tpot_ms == pytest.approx((one.draft_ms + one.attention_ms + one.h2d_ms) / 1.5)
