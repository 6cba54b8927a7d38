"""Residency, eviction, lookahead and planner: pure policy, checked by properties and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter.experts.lookahead import LookaheadBuffer
from specter.experts.policies.base import PLANNERS, Planner, Pool, layer_quotas
from specter.experts.policies.deadline import DeadlinePlanner
from specter.experts.policies.lru import LruEviction
from specter.experts.policies.three_phase import ThreePhasePlanner
from specter.experts.residency import Residency, State
from specter.models.spec import ExpertId

POOL = Pool([4] * 4, 4, 1)


def anything(expert: ExpertId) -> bool:
    return True


experts = st.builds(ExpertId, st.integers(0, 3), st.integers(0, 5))


@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from(["load", "evict", "pin", "end use", "end"]), experts)))
@settings(max_examples=200, deadline=None)
def test_residency_equals_a_reference_dictionary(num_slots: int, steps: list[tuple[str, ExpertId]]) -> None:
    residency = Residency(num_slots)
    model: dict[ExpertId, dict[str, int]] = {}
    for action, expert in steps:
        slot = residency.find(expert)
        assert (slot is not None) == (expert in model)
        if action == "load" and slot is None and len(model) < num_slots:
            generation = residency.begin_load(expert).generation
            assert generation >= 1 and residency.state(expert) is State.LOADING
            model[expert] = {"pins": 0}
        elif action == "load" and slot is not None:
            with pytest.raises(ValueError, match="already"):
                residency.begin_load(expert)
        elif action == "evict":
            if slot is None or model[expert]["pins"]:
                with pytest.raises(ValueError, match="cannot be evicted"):
                    residency.evict(expert)
            else:
                residency.evict(expert)
                del model[expert]
        elif slot is not None and action == "pin":
            residency.pin(slot)
            model[expert]["pins"] += 1
        elif slot is not None and action == "end use" and model[expert]["pins"]:
            residency.end_use(slot)
            model[expert]["pins"] -= 1
            assert residency.state(expert) is State.RESIDENT
        elif slot is not None and action == "end use":
            with pytest.raises(ValueError, match="not pinned"):
                residency.end_use(slot)
        elif slot is not None and action == "end":
            residency.end_load(slot)
            assert residency.state(expert) is State.RESIDENT
        held = {slot.expert: slot for slot in residency.slots if slot.expert is not None}
        assert set(held) == set(model) == set(residency.experts())
        assert residency.num_free == num_slots - len(model)
        assert all(held[one].pins == state["pins"] for one, state in model.items())


@given(st.integers(1, 200), st.integers(1, 30))
def test_quotas_share_all_slots_evenly(num_slots: int, num_layers: int) -> None:
    quotas = layer_quotas(num_slots, num_layers)
    assert sum(quotas) == num_slots and max(quotas) - min(quotas) <= 1


@given(st.lists(experts, min_size=1, max_size=40), st.sets(experts))
def test_lru_displaces_the_oldest_evictable_expert_of_the_layer(uses: list[ExpertId], pinned: set[ExpertId]) -> None:
    lru = LruEviction(Pool([1] * 4, 6, 1))
    for expert in uses:
        lru.used(expert)
    for layer in range(4):
        recency = list(dict.fromkeys(reversed([e for e in uses if e.layer == layer])))[::-1]
        if not recency:
            continue
        allowed = [e for e in recency if e not in pinned]
        assert lru.victim(layer, lambda e: e not in pinned, False) == (allowed[0] if allowed else None)


def test_lru_below_its_quota_displaces_from_a_layer_above_its_own() -> None:
    lru = LruEviction(Pool([2, 2], 6, 1))
    for expert in (0, 1, 2):
        lru.used(ExpertId(1, expert))
    lru.used(ExpertId(0, 5))
    assert lru.victim(0, anything, False) == ExpertId(1, 0)


def test_lru_without_a_quota_displaces_the_oldest_of_all_layers() -> None:
    lru = LruEviction(Pool([1, 1, 0], 6, 1))
    for expert in (ExpertId(1, 3), ExpertId(0, 2)):
        lru.used(expert)
    assert lru.victim(2, anything, False) == ExpertId(1, 3)
    assert lru.victim(2, lambda e: e != ExpertId(1, 3), False) == ExpertId(0, 2)


def test_lookahead_counts_tokens_per_expert() -> None:
    buffer = LookaheadBuffer(2, 4)
    buffer.add(np.array([[0, 1], [2, 3]], np.int16))
    buffer.add(np.array([[0, 2], [2, 1]], np.int16))
    assert buffer.counts.tolist() == [[2, 1, 1, 0], [0, 1, 2, 1]]
    buffer.clear()
    assert not buffer.counts.any()


class TestThreePhasePlanner:
    """By hand: 2 layers, M = 2 residents each, payload 12 MB: one copy is estimated at 1 ms, as is a draft step."""

    def planner(self, draft_len: int) -> ThreePhasePlanner:
        planner = ThreePhasePlanner(Pool([2, 2], 4, payload_bytes=12_000_000))
        planner.begin_round(draft_len)
        return planner

    def boundaries(self, planner: ThreePhasePlanner, draft_len: int) -> list[int]:
        return [n for n in range(1, draft_len + 1) if planner.is_boundary(n)]

    @pytest.mark.parametrize(("draft_len", "first"), [(1, 1), (4, 1), (5, 1), (9, 1), (10, 2), (16, 3), (32, 6)])
    def test_cold_start_waits_for_a_fifth_of_the_draft(self, draft_len: int, first: int) -> None:
        assert self.boundaries(self.planner(draft_len), draft_len) == [first]

    def test_loads_the_top_m_of_each_layer_by_count_and_protects_those_present(self) -> None:
        counts = np.array([[5, 0, 3, 4], [0, 0, 1, 0]], np.int32)
        present = np.zeros((2, 4), np.bool_)
        present[0, 3] = True
        plan = self.planner(10).plan(2, counts, present)
        assert plan.loads == [ExpertId(0, 0), ExpertId(1, 2)]
        assert plan.protect.tolist() == [[True, False, False, True], [False, False, True, False]]

    def test_next_chunk_lasts_as_long_as_the_copies_just_submitted(self) -> None:
        planner = self.planner(16)
        counts = np.array([[1, 1, 0, 0], [1, 0, 0, 0]], np.int32)  # 3 copies of 1 ms: 3 draft steps
        planner.plan(3, counts, np.zeros((2, 4), np.bool_))
        assert self.boundaries(planner, 16) == [6]

    @pytest.mark.parametrize(
        ("step_ms", "copies", "boundary"),
        [
            ((), (), 6),  # not adapted: 3 copies of 1 ms are 3 steps of 1 ms
            ((0.2,), (), 7),  # a step of 0.75 * 1 + 0.25 * 0.2 = 0.8 ms: 3 / 0.8 = 3.75, so 4 steps
            ((0.2, 0.2), (), 8),  # 0.75 * 0.8 + 0.25 * 0.2 = 0.65 ms: 4.6, so 5 steps
            ((3.0,), (), 5),  # 1.5 ms: 2 steps
            ((), ((36_000_000, 1.0),), 5),  # 0.75 * 12 + 0.25 * 36 = 18 GB/s: 3 * 12 / 18 = 2 steps
            ((), ((12_000_000, 4.0),), 7),  # 0.75 * 12 + 0.25 * 3 = 9.75 GB/s: 3.7, so 4 steps
            ((), ((36_000_000, 1.0), (6_000_000, 1.0)), 6),  # 0.75 * 18 + 0.25 * 6 = 15 GB/s: 2.4, so 3 steps
            ((0.2,), ((12_000_000, 4.0),), 8),  # 3.7 ms of copies in steps of 0.8 ms: 4.6, so 5 steps
        ],
    )
    def test_chunk_adapts_to_measured_bandwidth_and_step(
        self, step_ms: tuple[float, ...], copies: tuple[tuple[int, float], ...], boundary: int
    ) -> None:
        planner = self.planner(16)
        for one_ms in step_ms:
            planner.observe_step(one_ms)
        for num_bytes, copy_ms in copies:
            planner.observe_copies(num_bytes, copy_ms)
        counts = np.array([[1, 1, 0, 0], [1, 0, 0, 0]], np.int32)
        planner.plan(3, counts, np.zeros((2, 4), np.bool_))
        assert self.boundaries(planner, 16) == [boundary]

    def test_estimates_outlast_a_round(self) -> None:
        planner = self.planner(16)
        planner.observe_step(0.2)
        planner.begin_round(16)
        planner.plan(3, np.array([[1, 1, 0, 0], [1, 0, 0, 0]], np.int32), np.zeros((2, 4), np.bool_))
        assert self.boundaries(planner, 16) == [7]

    def test_stops_when_the_next_boundary_would_reach_k(self) -> None:
        planner = self.planner(5)
        planner.plan(1, np.array([[1, 1, 0, 0], [1, 1, 0, 0]], np.int32), np.zeros((2, 4), np.bool_))
        assert self.boundaries(planner, 5) == []

    def test_stops_when_every_layer_has_counted_m_experts(self) -> None:
        planner = self.planner(16)
        planner.plan(3, np.array([[1, 1, 0, 0], [1, 1, 0, 0]], np.int32), np.ones((2, 4), np.bool_))
        assert self.boundaries(planner, 16) == []

    def test_continues_while_a_layer_has_counted_fewer_than_m(self) -> None:
        planner = self.planner(16)
        planner.plan(3, np.array([[1, 1, 0, 0], [1, 0, 0, 0]], np.int32), np.ones((2, 4), np.bool_))
        assert self.boundaries(planner, 16) == [4]


class TestDeadlinePlanner:
    @given(st.data())
    @settings(max_examples=50, deadline=None)
    def test_orders_absent_counted_experts_by_layer_then_count(self, data: st.DataObject) -> None:
        cells = st.lists(st.integers(0, 5), min_size=12, max_size=12)
        counts = np.array(data.draw(cells), np.int32).reshape(3, 4)
        present = np.array(data.draw(cells)).reshape(3, 4) > 2
        plan = DeadlinePlanner(POOL).plan(1, counts, present)
        assert set(plan.loads) == {ExpertId(*pair) for pair in np.argwhere((counts > 0) & ~present).tolist()}
        keys = [(expert.layer, -counts[expert]) for expert in plan.loads]
        assert keys == sorted(keys)
        assert np.array_equal(plan.protect, counts > 0)

    def test_variants_share_one_order_and_differ_in_one_published_choice(self) -> None:
        names = ("deadline", "deadline_cold", "deadline_joined", "three_phase")
        planners = [PLANNERS[name](POOL) for name in names]
        for planner in planners:
            planner.begin_round(16)
        first = [min(n for n in range(1, 17) if planner.is_boundary(n)) for planner in planners]
        assert first == [1, 3, 1, 3] and all(planners[1].is_boundary(n) for n in range(3, 17))
        batches = [[1, 2], [3, 4]]
        assert [list(planner.barrier(batches)) for planner in planners] == [[], [], [4], [4]]
        assert [planner.skips_boundary(lambda: True) for planner in planners] == [True, True, False, False]
        counts = np.array([[2, 0, 1], [0, 3, 0], [0, 0, 0], [1, 0, 0]], np.int32)
        plans = [planner.plan(5, counts, np.zeros((4, 3), np.bool_)) for planner in planners]
        assert plans[0].loads == plans[1].loads == plans[2].loads
        assert [plan.at_once for plan in plans] == [False, False, True, True]

    def test_plans_after_every_step_unless_the_next_one_has_ended_too(self) -> None:
        planner = DeadlinePlanner(POOL)
        planner.begin_round(16)
        assert all(planner.is_boundary(number) for number in range(1, 17))
        assert planner.skips_boundary(lambda: True) and not planner.skips_boundary(lambda: False)


def test_a_planner_without_hooks_loads_nothing_and_delays_nothing() -> None:
    planner = Planner(POOL)
    planner.begin_round(16)
    assert not any(planner.is_boundary(number) for number in range(1, 17))
    assert planner.barrier([]) == () and not planner.skips_boundary(lambda: True)
