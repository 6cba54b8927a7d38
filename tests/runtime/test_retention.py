"""Eviction by decayed counts: against a plain minimum, against Belady, and against LRU."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter.experts.cache import ExpertCache
from specter.experts.policies.base import EVICTIONS, Plan, Pool, layer_quotas
from specter.experts.policies.retain import RetainEviction
from specter.experts.residency import Residency
from specter.experts.transfer import Backend, Transfer
from specter.floors import min_loads
from specter.models.spec import ExpertId
from specter.timeline.base import Work
from specter.timeline.virtual import VirtualTimeline
from tests.runtime.fakes import MACHINE

NUM_LAYERS, NUM_EXPERTS = 3, 32
COMPUTE = Work("compute", hbm_bytes=1000, flops=0, kernels=1, launches=1)
Rounds = list[list[dict[int, int]]]  # per round and layer: rows by expert


def anything(expert: ExpertId) -> bool:
    return True


def num_loads(eviction: str, rounds: Rounds, num_slots: int) -> int:
    """Loads of a cache without planner that serves `rounds`."""
    timeline = VirtualTimeline(MACHINE)
    policy = EVICTIONS[eviction](Pool(layer_quotas(num_slots, NUM_LAYERS), NUM_EXPERTS, 1000, 2))
    cache = ExpertCache(Residency(num_slots), policy, Transfer(Backend(timeline), lambda expert: 1000))
    for layers in rounds:
        cache.begin_round()
        for layer, rows in enumerate(layers):
            counts = np.zeros(NUM_EXPERTS, np.int64)
            counts[list(rows)] = list(rows.values())
            _, known = timeline.compute(COMPUTE, lambda: None)
            timeline.wait(known)
            for wave in cache.waves(layer, counts, known):
                _, done = timeline.compute(COMPUTE, lambda: None, after=wave.after)
                cache.release(wave, done)
    assert timeline.totals().num_copies == cache.counters.num_misses
    return cache.counters.num_misses


def belady(rounds: Rounds, num_slots: int) -> int:
    visits = [[layer * NUM_EXPERTS + e for e in rows] for layers in rounds for layer, rows in enumerate(layers)]
    return sum(min_loads(visits, num_slots))


def skewed(seed: int, num_rounds: int = 40) -> Rounds:
    """Per layer three experts in almost every round, and five of the others by chance."""
    rng = random.Random(seed)
    orders = [rng.sample(range(NUM_EXPERTS), NUM_EXPERTS) for _ in range(NUM_LAYERS)]
    rounds: Rounds = []
    for _ in range(num_rounds):
        layers = []
        for order in orders:
            frequent = [expert for expert in order[:3] if rng.random() < 0.95]
            layers.append(dict.fromkeys(frequent, 9) | dict.fromkeys(rng.sample(order[3:], 5), 2))
        rounds.append(layers)
    return rounds


counts = st.dictionaries(st.integers(0, NUM_EXPERTS - 1), st.integers(1, 17), min_size=1, max_size=8)


@given(st.lists(st.lists(counts, min_size=3, max_size=3), min_size=1, max_size=8), st.integers(2, 30))
@settings(max_examples=60, deadline=None)
def test_never_fewer_loads_than_belady_on_any_trace(rounds: Rounds, num_slots: int) -> None:
    assert num_loads("retain", rounds, num_slots) >= belady(rounds, num_slots)


@pytest.mark.parametrize("num_slots", [9, 12, 18])
def test_fewer_loads_than_lru_on_skewed_cyclic_traces_and_close_to_belady(num_slots: int) -> None:
    totals = {"retain": 0, "lru": 0, "belady": 0}
    for seed in range(5):
        rounds = skewed(seed)
        for name in ("retain", "lru"):
            totals[name] += num_loads(name, rounds, num_slots)
        totals["belady"] += belady(rounds, num_slots)
    assert totals["belady"] <= totals["retain"] < 0.93 * totals["lru"]
    assert totals["retain"] < 1.4 * totals["belady"]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_displaces_the_lowest_score_that_is_evictable(data: st.DataObject) -> None:
    """Against a minimum over all residents, after any history."""
    draw = data.draw
    eviction = RetainEviction(Pool([4] * NUM_LAYERS, NUM_EXPERTS, 1, num_staging=4), decay=0.5)
    scores = np.zeros((NUM_LAYERS, NUM_EXPERTS))
    residents: set[ExpertId] = set()
    for _ in range(draw(st.integers(1, 4))):
        eviction.begin_round()
        protected = {ExpertId(*pair) for pair in draw(st.sets(st.tuples(st.integers(0, 2), st.integers(0, 11))))}
        for layer in range(NUM_LAYERS):
            rows = draw(counts)
            array = np.zeros(NUM_EXPERTS, np.int64)
            array[list(rows)] = list(rows.values())
            protected = {expert for expert in protected if expert.layer != layer}
            eviction.demand(layer, array)
            scores[layer] = 0.5 * scores[layer] + array
            for number in rows:
                if (expert := ExpertId(layer, number)) not in residents:
                    residents.add(expert)
                    eviction.loaded(expert)
                eviction.used(expert)
            for _ in range(draw(st.integers(0, 4))):
                allowed = residents - protected
                victim = eviction.victim(layer, allowed.__contains__, True)
                assert victim == min(allowed, key=lambda e: (scores[e], e), default=None)
                if victim is not None:
                    eviction.forget(victim)
                    residents.remove(victim)
    assert set(eviction._residents) == residents


def filled(num_staging: int, num_residents: int = 6) -> RetainEviction:
    eviction = RetainEviction(Pool([3, 3], NUM_EXPERTS, 1, num_staging))
    for number in range(num_residents):
        eviction.loaded(ExpertId(0, number))
        eviction.used(ExpertId(0, number))
    eviction.begin_round()
    return eviction


@pytest.mark.parametrize(("num_staging", "expected"), [(0, 0), (2, 2), (3, 3), (50, 3)])
def test_loads_beyond_the_staging_slots_wait_for_use_unless_they_are_urgent(num_staging: int, expected: int) -> None:
    eviction = filled(num_staging)
    loads: list[ExpertId] = []
    while (victim := eviction.victim(1, anything, is_urgent=False)) is not None:
        eviction.forget(victim)
        loads.append(ExpertId(1, len(loads)))
        eviction.loaded(loads[-1])
    assert len(loads) == expected
    assert eviction.victim(1, anything, is_urgent=True) is not None
    if loads:
        eviction.used(loads[0])
        assert eviction.victim(1, anything, is_urgent=False) is not None


def test_an_unneeded_prefetch_frees_its_staging_slot() -> None:
    eviction = filled(num_staging=1)
    eviction.forget(ExpertId(0, 0))
    eviction.loaded(ExpertId(1, 0))
    assert eviction.victim(1, anything, is_urgent=False) is None
    eviction.demand(1, np.zeros(NUM_EXPERTS, np.int64))
    assert eviction.victim(1, anything, is_urgent=False) is not None


def test_streaming_experts_never_displace_those_used_every_round() -> None:
    """Ten rounds of three frequent and five rare experts per layer: the frequent ones are loaded once."""
    timeline = VirtualTimeline(MACHINE)
    eviction = RetainEviction(Pool([4, 4, 4], NUM_EXPERTS, 1000, num_staging=3))
    cache = ExpertCache(Residency(12), eviction, Transfer(Backend(timeline), lambda expert: 1000))
    for index in range(10):
        cache.begin_round()
        rare = [3 + (index + offset) % 9 for offset in range(0, 9, 2)]
        for layer in range(NUM_LAYERS):
            counts = np.zeros(NUM_EXPERTS, np.int64)
            counts[:3], counts[rare] = 17, 1
            _, known = timeline.compute(COMPUTE, lambda: None)
            timeline.wait(known)
            if index:
                assert all(cache.is_present(ExpertId(layer, expert)) for expert in range(3))
            plan = Plan([ExpertId(layer, expert) for expert in rare], np.zeros((3, NUM_EXPERTS), np.bool_))
            cache.submit(plan, known)
            cache.feed()
            for wave in cache.waves(layer, counts, known):
                _, done = timeline.compute(COMPUTE, lambda: None, after=wave.after)
                cache.release(wave, done)
