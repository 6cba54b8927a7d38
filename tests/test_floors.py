"""Floors: the load count is optimal, no simulated run beats the bounds, and a case by hand."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter.errors import SpecterError
from specter.floors import Floor, RoundAccess, floor_ideal, floor_trace, min_loads
from specter.models.full_size import FULL_SIZE
from specter.models.spec import ExpertId, ModelSpec
from specter.timeline.costs import CostModel
from specter.timeline.hardware import Hardware
from specter.timeline.virtual import VirtualEvent, VirtualTimeline
from specter.typed import load_typed

DEEPSEEK_V2_LITE = FULL_SIZE["deepseek_v2_lite"]

HARDWARE = load_typed(Hardware, Path(__file__).parents[1] / "conf" / "hardware" / "a100_40gb_pcie4.yaml")
COSTS = CostModel(DEEPSEEK_V2_LITE, tile_rows=48, kv_capacity=256)

Visits = list[list[int]]


@st.composite
def traces(draw: st.DrawFn, num_items: int, max_visits: int, max_items: int) -> tuple[Visits, int, set[int]]:
    """Visits of distinct items, a number of slots, and items held at the start."""
    items = st.integers(0, num_items - 1)
    visits = draw(st.lists(st.lists(items, max_size=max_items, unique=True), max_size=max_visits))
    num_slots = draw(st.integers(1, num_items))
    return visits, num_slots, draw(st.sets(items, max_size=num_slots))


def fewest_by_search(visits: Visits, num_slots: int, residents: set[int]) -> int:
    """Every reachable set of held items after every visit, with the fewest loads to get there."""
    states = {frozenset(residents): 0}
    for visit in visits:
        after: dict[frozenset[int], int] = {}
        for held, loads in states.items():
            reachable = held | set(visit)
            loads += len(set(visit) - held)
            for size in range(min(num_slots, len(reachable)) + 1):
                for kept in map(frozenset, itertools.combinations(sorted(reachable), size)):
                    after[kept] = min(after.get(kept, loads), loads)
        states = after
    return min(states.values())


def lru_loads(visits: Visits, num_slots: int, residents: set[int]) -> int:
    held = OrderedDict.fromkeys(sorted(residents))
    loads = 0
    for item in itertools.chain.from_iterable(visits):
        if item in held:
            held.move_to_end(item)
            continue
        loads += 1
        if len(held) == num_slots:
            held.popitem(last=False)
        held[item] = None
    return loads


def random_loads(visits: Visits, num_slots: int, residents: set[int], rng: random.Random) -> int:
    """Any order within a visit, any victim, sometimes a bypass, sometimes a prefetch of anything."""
    held, loads = set(residents), 0
    for visit in visits:
        for item in rng.sample(visit, len(visit)):
            wanted = [item] if item not in held else []
            if rng.random() < 0.2:
                wanted.append(rng.choice([other for later in visits for other in later]))
            for load in wanted:
                if load in held:
                    continue
                loads += 1
                if rng.random() < 0.8:
                    if len(held) == num_slots:
                        held.remove(rng.choice(sorted(held)))
                    held.add(load)
    return loads


@settings(max_examples=150, deadline=None)
@given(traces(num_items=5, max_visits=7, max_items=3))
def test_loads_equal_exhaustive_search(case: tuple[Visits, int, set[int]]) -> None:
    assert sum(min_loads(*case)) == fewest_by_search(*case)


@settings(max_examples=150, deadline=None)
@given(traces(num_items=12, max_visits=40, max_items=5), st.integers(0, 2**32))
def test_no_policy_loads_less(case: tuple[Visits, int, set[int]], seed: int) -> None:
    fewest = sum(min_loads(*case))
    assert fewest <= lru_loads(*case)
    assert fewest <= random_loads(*case, random.Random(seed))


@settings(max_examples=50, deadline=None)
@given(traces(num_items=12, max_visits=40, max_items=5))
def test_all_fit(case: tuple[Visits, int, set[int]]) -> None:
    visits, _, residents = case
    assert sum(min_loads(visits, 12, range(12))) == 0
    assert sum(min_loads(visits, 12, residents)) == len(set().union(*visits) - residents)


def test_loads_by_hand() -> None:
    """Belady with bypass on unit visits, two slots: a b c a b with a, b kept and c streamed through."""
    assert min_loads([[0], [1], [2], [0], [1]], 2) == [1, 1, 1, 0, 0]
    assert min_loads([[0, 1, 2], [0, 1, 2], [2]], 2, residents=[2]) == [2, 1, 0]
    assert min_loads([], 1) == []


# -- floors -----------------------------------------------------------------------------------


def random_rounds(
    rng: random.Random, spec: ModelSpec, num_rounds: int, draft_len: int, union: int
) -> list[RoundAccess]:
    """Skewed routing, so that keeping experts pays."""
    weights = [1 / (rank + 1) for rank in range(spec.num_experts)]
    rounds = []
    for _ in range(num_rounds):
        layers = []
        for _ in range(spec.num_moe_layers):
            chosen: set[int] = set()
            while len(chosen) < union:
                chosen.update(rng.choices(range(spec.num_experts), weights, k=union - len(chosen)))
            layers.append(sorted(chosen))
        rounds.append(RoundAccess(draft_len, rng.randint(1, draft_len + 1), layers))
    return rounds


def simulated_tpot_ms(
    rounds: Sequence[RoundAccess], num_slots: int, costs: CostModel, residents: set[ExpertId], rng: random.Random
) -> float:
    """A run of the engine's shape on the virtual clock, with perfect prediction inside a round and random victims."""
    timeline = VirtualTimeline(HARDWARE)

    def nothing() -> None:
        return None

    class Pool:
        def __init__(self) -> None:
            self.arrived: dict[ExpertId, VirtualEvent] = {expert: VirtualEvent(0, True) for expert in residents}
            self.used: dict[ExpertId, VirtualEvent] = {}

        def load(self, expert: ExpertId, keep: set[ExpertId]) -> bool:
            after = []
            if len(self.arrived) == num_slots:
                victims = sorted(set(self.arrived) - keep)
                if not victims:
                    return False
                victim = rng.choice(victims)
                after = [self.arrived.pop(victim), self.used.pop(victim, VirtualEvent(0, False))]
            self.arrived[expert] = timeline.copy(costs.payload_bytes, nothing, after)
            return True

    pool = Pool()
    for access in rounds:
        needed = {ExpertId(layer, e) for layer, experts in enumerate(access.experts) for e in experts}
        for _ in range(access.draft_len):
            _, drafted = timeline.compute(costs.draft_step(), nothing)
            for expert in rng.sample(sorted(needed), k=min(4, len(needed))):
                if expert not in pool.arrived:
                    pool.load(expert, keep=needed)
            timeline.wait(drafted)
        for layer in range(costs.spec.num_layers):
            timeline.compute(costs.attend_and_route(layer), nothing)
            moe_layer = layer - costs.spec.num_dense_layers
            if moe_layer < 0:
                continue
            wanted = [ExpertId(moe_layer, e) for e in access.experts[moe_layer]]
            for expert in sorted(wanted, key=lambda expert: expert not in pool.arrived):
                if expert not in pool.arrived and not pool.load(expert, keep=needed):
                    pool.load(expert, keep=set())
                _, pool.used[expert] = timeline.compute(costs.experts(1), nothing, [pool.arrived[expert]])
            needed.difference_update(wanted)
            timeline.compute(costs.combine(), nothing)
        _, end = timeline.compute(costs.head(access.draft_len + 1), nothing)
        timeline.wait(end)
    return timeline.now_ns() / 1e6 / sum(access.new_len for access in rounds)


SMALL = ModelSpec(
    name="small", vocab=1000, hidden=512, num_layers=4, num_dense_layers=1, dense_inter=1024, expert_inter=512,
    num_experts=16, top_k=2, shared_inter=512, num_heads=4, nope_dim=64, rope_dim=32, v_dim=64, kv_lora=128,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_no_run_beats_the_bounds(seed: int) -> None:
    rng = random.Random(seed)
    costs = CostModel(SMALL, tile_rows=16, kv_capacity=64)
    draft_len = rng.choice([0, 0, 2, 7])
    rounds = random_rounds(rng, SMALL, num_rounds=8, draft_len=draft_len, union=rng.choice([2, 5, 9]))
    num_slots = rng.choice([1, 6, 20, 48])
    everything = [ExpertId(layer, expert) for layer in range(3) for expert in range(16)]
    residents = set(rng.sample(everything, k=num_slots))
    run_ms = simulated_tpot_ms(rounds, num_slots, costs, residents, rng)
    ideal = floor_ideal(rounds, num_slots, costs, HARDWARE)
    trace = floor_trace(rounds, num_slots, costs, HARDWARE, residents)
    assert ideal.tpot_ms <= run_ms
    assert trace.strict_tpot_ms <= run_ms
    assert ideal.num_loads <= trace.num_loads
    assert trace.strict_tpot_ms <= trace.tpot_ms
    assert ideal.tpot_ms <= trace.tpot_ms


def two_rounds(draft_len: int) -> list[RoundAccess]:
    """DeepSeek's 26 layers; 6 experts in each, the second round half the same."""
    return [
        RoundAccess(draft_len, 4, [list(range(6))] * 26),
        RoundAccess(draft_len, 3, [list(range(3, 9))] * 26),
    ]


def test_floors_by_hand() -> None:
    """No draft, 104 slots: ideal loads 156 - 104 in both rounds; trace 156, then 156 less the 78 shared ones."""
    copy_ms = HARDWARE.copy_ns(COSTS.payload_bytes) / 1e6
    ideal = floor_ideal(two_rounds(0), 104, COSTS, HARDWARE)
    trace = floor_trace(two_rounds(0), 104, COSTS, HARDWARE)
    assert ideal == approx_floor(104 * copy_ms / 7, 104 * copy_ms / 7, 104)
    assert trace == approx_floor(234 * copy_ms / 7, 234 * copy_ms / 7, 234)


def approx_floor(tpot_ms: float, strict_ms: float, num_loads: int) -> Floor:
    approx: Any = pytest.approx
    return Floor(approx(tpot_ms), approx(strict_ms), num_loads)


def test_draft_covers_only_loads_that_have_a_slot() -> None:
    """78 slots. Round 1 hits nothing: its link never rests. Round 2 hits 78 experts, so that no slot is free
    while drafting and its 78 loads wait for the draft, but for those that a further slot takes.
    """
    copy_ns = HARDWARE.copy_ns(COSTS.payload_bytes)
    draft_ns = 8 * HARDWARE.hbm_ns(COSTS.draft_step().hbm_bytes)
    assert 20 * copy_ns < draft_ns < 78 * copy_ns
    for num_free in (0, 10):
        floor = floor_trace(two_rounds(8), 78 + num_free, COSTS, HARDWARE)
        second = draft_ns + 78 * copy_ns - num_free * copy_ns
        assert floor.num_loads == 156 + 78
        assert floor.tpot_ms == pytest.approx((156 * copy_ns + second) / 7 / 1e6)


def test_device_bound_when_all_fits() -> None:
    everything = [ExpertId(layer, expert) for layer in range(26) for expert in range(64)]
    floor = floor_trace(two_rounds(0), 26 * 64, COSTS, HARDWARE, residents=everything)
    assert floor == floor_ideal(two_rounds(0), 26 * 64, COSTS, HARDWARE)
    gpu_ms = 2 * HARDWARE.hbm_ns(COSTS.verification_bytes(156, rows=1)) / 1e6
    assert floor.num_loads == 0 and floor.tpot_ms == pytest.approx(gpu_ms / 7)
    assert floor.strict_tpot_ms == floor.tpot_ms


def test_bad_input() -> None:
    with pytest.raises(SpecterError, match="0 slots"):
        floor_ideal(two_rounds(0), 0, COSTS, HARDWARE)
    with pytest.raises(SpecterError, match="commit no token"):
        floor_trace([], 4, COSTS, HARDWARE)
    with pytest.raises(SpecterError, match="round 0 lists 1 layers"):
        floor_trace([RoundAccess(0, 1, [[1]])], 4, COSTS, HARDWARE)
    with pytest.raises(SpecterError, match="2 residents in 1 slots"):
        floor_trace(two_rounds(0), 1, COSTS, HARDWARE, residents=[ExpertId(0, 0), ExpertId(0, 1)])
