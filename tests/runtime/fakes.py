"""A ten-token model without tensors: outputs are tokens, routing is a hash, and slots are checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from specter.engine import Engine
from specter.experts.cache import ExpertCache
from specter.experts.policies.base import EVICTIONS, PLANNERS, Eviction, NextLayerPredictor, Pool, layer_quotas
from specter.experts.residency import Residency
from specter.experts.transfer import Backend, Transfer
from specter.models.base import Choose, FinishedStep, Output, Routing
from specter.models.full_size import FULL_SIZE
from specter.models.spec import ExpertId, ModelSpec
from specter.speculation.accept import TokenSampler
from specter.speculation.depth import Depth
from specter.timeline.costs import CostModel
from specter.timeline.hardware import Hardware
from specter.timeline.virtual import VirtualTimeline

DEEPSEEK_V2_LITE = FULL_SIZE["deepseek_v2_lite"]

TINY: ModelSpec = replace(
    DEEPSEEK_V2_LITE, name="tiny", num_layers=4, num_dense_layers=1, num_experts=8, top_k=2, vocab=10
)
MACHINE = Hardware(
    name="test",
    hbm_bytes_per_s=10**12,
    device_memory_bytes=10**11,
    bf16_flops=10**14,
    link_bytes_per_s=2 * 10**10,
    link_latency_ns=1000,
    launch_ns=5000,
    kernel_ns=1000,
    sync_ns=10_000,
    source="tests",
)
COSTS = CostModel(TINY, tile_rows=48, kv_capacity=256)
NextToken = Callable[[Sequence[int]], int]


def plain(prefix: Sequence[int]) -> int:
    """The target of every fake: a function of the whole prefix."""
    return (3 * prefix[-1] + len(prefix) + sum(prefix[-3:])) % 10


class FakeModel:
    """Implements `Model`; fails if an expert is run from a slot that holds another one, twice, or not at all."""

    num_layers, num_dense_layers = TINY.num_layers, TINY.num_dense_layers
    num_experts, top_k = TINY.num_experts, TINY.top_k

    def __init__(self, draft: NextToken = plain, target: NextToken = plain) -> None:
        self.draft, self.target = draft, target
        self.slots: dict[int, ExpertId] = {}
        self.reset()

    def reset(self) -> None:
        self.committed: list[int] = []  # tokens whose KV is the target's
        self.temporary: list[int] = []  # tokens whose KV is the draft's

    def move(self, expert: ExpertId, slot: int) -> None:
        self.slots[slot] = expert

    def read(self, slot: int) -> ExpertId:
        """The expert that a wave finds in a slot."""
        return self.slots[slot]

    def routing(self, prefix: Sequence[int]) -> np.ndarray:
        rng = random.Random(str((tuple(prefix[-2:]), len(prefix))))
        rows = [rng.sample(range(self.num_experts), self.top_k) for _ in range(self.num_layers - self.num_dense_layers)]
        return np.array(rows, np.int16)

    def begin_draft(self, token: int, position: int, choose: Choose) -> None:
        assert position == len(self.committed) and not self.temporary, "the draft must append"
        self.token, self.choose = token, choose

    def draft_step(self) -> FinishedStep:
        self.temporary.append(self.token)
        prefix = self.committed + self.temporary
        proposal = self.choose(self.draft(prefix), len(prefix))
        self.token = proposal.token
        return FinishedStep(proposal, self.routing(prefix))

    def target_pass(self, tokens: Sequence[int], position: int, num_outputs: int) -> FakePass:
        assert position == len(self.committed), "the target must append"
        self.temporary = []
        self.committed += tokens
        prefixes = [self.committed[: position + i + 1] for i in range(len(tokens))]
        return FakePass(self, prefixes, num_outputs)

    def crop(self, length: int) -> None:
        assert length <= len(self.committed)
        self.committed = self.committed[:length]


class FakePass:
    def __init__(self, model: FakeModel, prefixes: list[list[int]], num_outputs: int) -> None:
        self.model, self.prefixes, self.num_outputs = model, prefixes, num_outputs
        self.all_routing = np.stack([model.routing(prefix) for prefix in prefixes], axis=1)
        self.to_run: set[int] = set()
        self.staged: list[ExpertId] = []  # decoded

    def attend_and_route(self, layer: int) -> Routing | None:
        assert not self.to_run
        if layer < self.model.num_dense_layers:
            return None
        routing = self.all_routing[layer - self.model.num_dense_layers]
        self.to_run = set(routing.ravel().tolist())
        return routing

    def predict_next(self, layer: int) -> Routing:
        return self.all_routing[layer + 1 - self.model.num_dense_layers]

    def decode(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        assert not self.staged, "the last wave has not run"
        self.staged = [self.model.read(slot) for slot in slots]
        assert [expert.expert for expert in self.staged] == list(experts)

    def run_experts(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        for expert, slot in zip(experts, slots, strict=True):
            found = self.staged[slot] if self.staged else self.model.read(slot)
            assert found == ExpertId(layer - self.model.num_dense_layers, expert)
            self.to_run.remove(expert)
        self.staged = []

    def combine(self, layer: int) -> None:
        assert not self.to_run, f"never run: {self.to_run}"

    def outputs(self) -> list[Output]:
        return [self.model.target(prefix) for prefix in self.prefixes[-self.num_outputs :]]


def make_pool(num_slots: int, num_staging: int = 2) -> Pool:
    return Pool(layer_quotas(num_slots, TINY.num_moe_layers), TINY.num_experts, COSTS.payload_bytes, num_staging)


def make_eviction(name: str, num_slots: int, num_staging: int = 2) -> Eviction:
    return EVICTIONS[name](make_pool(num_slots, num_staging))


def make_engine(
    model: FakeModel,
    num_slots: int,
    draft_len: int,
    eviction: str = "lru",
    planner: str = "three_phase",
    timeline: VirtualTimeline | None = None,
    depth: Depth | None = None,
) -> Engine:
    backend = Backend(timeline or VirtualTimeline(MACHINE), model.move)
    transfer = Transfer(backend, lambda expert: COSTS.payload_bytes)
    cache = ExpertCache(Residency(num_slots), make_eviction(eviction, num_slots), transfer)
    return Engine(
        model,
        TokenSampler(),
        cache,
        backend.timeline,
        COSTS,
        planner=PLANNERS[planner if draft_len else "none"](make_pool(num_slots)),
        depth=Depth(draft_len) if depth is None else depth,
        predictor=NextLayerPredictor(),
    )
