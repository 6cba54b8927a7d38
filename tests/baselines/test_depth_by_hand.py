"""SpecMoEOff's cost model of a round, worked out by hand for the small model of `tests.charges.tariff`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baselines.specmoeoff import Iteration, choose_k, simulate
from tests.charges.tariff import TARIFF
from tests.runtime.test_summary import BY_HAND, COSTS


def test_a_round_of_three_drafts() -> None:
    """Four rows are one tile. Three experts per layer are resident, 4.5 are needed."""
    round_ms = Iteration(
        h2d_ms=2 * 1.5 * 5000 / 1e6,
        moe_ms=2 * (4 * 192 + 64) / 1e6,  # 4.5 is rounded to four
        attention_ms=(2972 + 2 * 3196 + 832) / 1e6,
        draft_ms=3 * 7916 / 1e6,
        num_tokens=1 + 0.5 + 0.25 + 0.125,
    )
    assert simulate(3, 4.5, 0.5, 6, COSTS, BY_HAND) == round_ms
    assert round_ms.tpot_ms == pytest.approx((23748 + 10196 + 15000) / 1.875 / 1e6, rel=1e-12)


def test_experts_that_are_resident_are_not_copied_and_compute_binds() -> None:
    found = simulate(3, 4.5, 0.5, 12, COSTS, BY_HAND)
    assert found.h2d_ms == 0.0
    assert found.tpot_ms == pytest.approx((23748 + 10196 + 1664) / 1.875 / 1e6, rel=1e-12)


def test_at_least_one_expert_is_computed() -> None:
    assert simulate(1, 0.3, 0.5, 12, COSTS, BY_HAND).moe_ms == pytest.approx(2 * (192 + 64) / 1e6, rel=1e-12)


def test_five_rows_are_two_tiles() -> None:
    found = simulate(4, 3.0, 1.0, 12, COSTS, BY_HAND)
    dense, other, head = (
        TARIFF[f"{name} (2 tiles)"][1] for name in ("dense layer", "attention, router, shared", "head")
    )
    assert found.attention_ms == pytest.approx((dense + 2 * other + head) / 1e6, rel=1e-12)
    assert found.moe_ms == pytest.approx(2 * (3 * 192 + 128) / 1e6, rel=1e-12)
    assert found.num_tokens == 5.0


@pytest.mark.parametrize(("link_latency_ns", "best"), [(4999, 3), (99_999, 1)])
def test_the_depth_with_the_least_time_per_token_is_chosen(link_latency_ns: int, best: int) -> None:
    """All drafts are accepted. Without loads (7916 + 10196 + 1664) / 2 is more than (23748 + 10196 + 2432) / 4.

    With one and five loads of 0.1 ms, (18112 + 100000) / 2 is less than (33944 + 500000) / 4.
    """
    machine = replace(BY_HAND, link_latency_ns=link_latency_ns)
    num_slots = 12 if best == 3 else 6
    assert choose_k([1, 3], {2: 3.5, 4: 5.5}, 1.0, num_slots, COSTS, machine) == best
