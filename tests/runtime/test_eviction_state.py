"""What an eviction keeps from one call to the next: scores, staging; and what a starting state leaves in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specter.experts.policies.base import Pool
from specter.experts.policies.lru import LruEviction
from specter.experts.policies.retain import RetainEviction
from specter.models.spec import ExpertId
from tests.runtime.test_reports_to_policies import spied

A, B = ExpertId(0, 0), ExpertId(0, 1)


def anything(expert: ExpertId) -> bool:
    return True


def counts(**rows: int) -> np.ndarray:
    """Rows of a pass by expert: a, b, c."""
    array = np.zeros(8, np.int64)
    for name, number in rows.items():
        array["abc".index(name)] = number
    return array


@pytest.mark.parametrize(("num_rounds", "victim"), [(1, B), (2, A)])
def test_a_round_of_age_takes_three_tenths_of_a_score(num_rounds: int, victim: ExpertId) -> None:
    """A has 10, then 7, then 4.9; B always comes to 5."""
    eviction = RetainEviction(Pool([4], num_experts=8, payload_bytes=1, num_staging=2))
    for expert in (A, B):
        eviction.loaded(expert)
        eviction.used(expert)
    eviction.demand(0, counts(a=10))
    for index in range(num_rounds):
        eviction.demand(0, counts(b=5 if index == num_rounds - 1 else 0))
    eviction.begin_round()
    assert eviction.victim(0, anything, is_urgent=False) == victim


def test_a_score_survives_the_loss_of_the_slot() -> None:
    eviction = RetainEviction(Pool([4], num_experts=8, payload_bytes=1, num_staging=2))
    for expert in (A, B):
        eviction.loaded(expert)
        eviction.used(expert)
    eviction.demand(0, counts(a=10, b=5))
    for expert in (A, B):
        eviction.forget(expert)
        eviction.loaded(expert)
        eviction.used(expert)
    assert eviction.victim(0, anything, is_urgent=False) == B


def test_a_refused_resident_is_looked_at_again_in_the_next_round_only() -> None:
    eviction = RetainEviction(Pool([4], num_experts=8, payload_bytes=1, num_staging=2))
    for expert in (A, B):
        eviction.loaded(expert)
        eviction.used(expert)
    asked: list[ExpertId] = []

    def nothing(expert: ExpertId) -> bool:
        asked.append(expert)
        return False

    assert eviction.victim(0, nothing, is_urgent=True) is None
    assert eviction.victim(0, nothing, is_urgent=True) is None
    assert asked == [A, B]
    eviction.begin_round()
    assert eviction.victim(0, anything, is_urgent=True) == A


@pytest.mark.parametrize("system", ["lru", "specter_deadline"])
def test_a_starting_state_is_reported_as_loaded_and_used(system: str, tmp_path: Path) -> None:
    """So that none of it counts as staged."""
    run = spied(system, tmp_path)
    run.timeline.lines.clear()
    run.engine.cache.place([B, A])
    assert run.timeline.lines == [
        "eviction.clear()",
        "eviction.loaded(L0E1)",
        "eviction.used(L0E1)",
        "eviction.loaded(L0E0)",
        "eviction.used(L0E0)",
    ]


def test_an_expert_that_is_displaced_before_its_use_leaves_its_staging_slot() -> None:
    eviction = RetainEviction(Pool([4], num_experts=8, payload_bytes=1, num_staging=1))
    eviction.loaded(B)
    eviction.used(B)
    eviction.loaded(A)
    assert eviction.victim(0, anything, is_urgent=False) is None, "A is staged"
    eviction.forget(A)
    assert eviction.victim(0, anything, is_urgent=False) == B


def test_lru_counts_a_load_as_younger_than_every_use_before_it() -> None:
    """A layer without slots of its own takes the oldest of all: what was used before the other was loaded."""
    lru = LruEviction(Pool([1, 1, 0], num_experts=8, payload_bytes=1))
    lru.loaded(ExpertId(1, 0))
    lru.used(ExpertId(1, 0))
    lru.loaded(ExpertId(0, 0))
    assert lru.victim(2, anything, is_urgent=False) == ExpertId(1, 0)
