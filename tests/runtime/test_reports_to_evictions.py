"""Everything that the cache reports to an eviction: each call with its arguments, in order, written by hand.

The run is that of `test_reports_to_policies`.
"""

from __future__ import annotations

from pathlib import Path

from tests.runtime.test_reports_to_policies import lines, reports, spied

LRU = """
    prefill
    begin_round()
    demand(0, 110000)
    loaded(L0E0)
    loaded(L0E1)
    used(L0E0)
    used(L0E1)
    demand(1, 110000)
    loaded(L1E0)
    loaded(L1E1)
    used(L1E0)
    used(L1E1)
    round 1
    begin_round()
    demand(0, 101000)
    loaded(L0E2)
    used(L0E0)
    used(L0E2)
    demand(1, 001100)
    loaded(L1E2)
    # all slots are taken, and the layer's hit can be computed meanwhile
    victim(1, False) -> L1E0
    forget(L1E0)
    loaded(L1E3)
    used(L1E2)
    used(L1E3)
    round 2
    begin_round()
    demand(0, 001100)
    victim(0, False) -> L0E1
    forget(L0E1)
    loaded(L0E3)
    used(L0E2)
    used(L0E3)
    demand(1, 101000)
    victim(1, False) -> L1E1
    forget(L1E1)
    loaded(L1E0)
    used(L1E2)
    used(L1E0)
"""
RETAIN = """
    round 1
    begin_round()
    loaded(L0E2)
    loaded(L1E2)
    victim(1, False) -> L0E1
    forget(L0E1)
    loaded(L1E3)
    # rows of four tokens
    demand(0, 302201)
    # three staging slots are taken
    victim(0, False)
    used(L0E0)
    victim(0, False)
    used(L0E2)
    # nothing of this layer is under way any more
    victim(0, True) -> L1E1
    forget(L1E1)
    loaded(L0E3)
    victim(0, False)
    used(L0E3)
    victim(0, True) -> L0E2
    forget(L0E2)
    loaded(L0E5)
    used(L0E5)
    victim(1, False) -> L0E5
    forget(L0E5)
    loaded(L1E5)
    demand(1, 114110)
    victim(1, False) -> L0E3
    forget(L0E3)
    loaded(L1E1)
    victim(1, False)
    used(L1E0)
    used(L1E2)
    used(L1E3)
    victim(1, False) -> L1E3
    forget(L1E3)
    loaded(L1E4)
    used(L1E1)
    used(L1E4)
"""
DROP = """
    prefill
    begin_round()
    demand(0, 110000)
    loaded(L0E0)
    loaded(L0E1)
    demand(1, 110000)
    loaded(L1E0)
    loaded(L1E1)
    round 1
    begin_round()
    demand(0, 101000)
    loaded(L0E0)
    loaded(L0E2)
    demand(1, 001100)
    loaded(L1E2)
    loaded(L1E3)
"""


def test_reports_to_an_eviction(tmp_path: Path) -> None:
    assert reports(spied("lru", tmp_path), "eviction", num_tokens=3) == lines(LRU)


def test_reports_to_an_eviction_that_shares_its_slots_with_a_planner(tmp_path: Path) -> None:
    found = reports(spied("specter_deadline", tmp_path), "eviction", num_tokens=8)
    assert found[found.index("round 1") : found.index("round 2")] == lines(RETAIN)


def test_reports_to_an_eviction_that_keeps_nothing(tmp_path: Path) -> None:
    """Experts are given up after use, about which it has nothing to decide."""
    assert reports(spied("on_demand", tmp_path), "eviction", num_tokens=2) == lines(DROP)
