"""Metrics of a run, computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.plan import compose
from specter.config import SystemConfig
from specter.floors import RoundAccess
from specter.memory import device_bytes
from specter.metrics import acceptance, distinct_4grams, summarize
from specter.models.full_size import FULL_SIZE
from specter.records import Generation, RoundRecord
from specter.resolve import ResolvedRun
from specter.timeline.costs import CostModel
from specter.timeline.payload import Slots
from tests.runtime.fakes import MACHINE, TINY

DEEPSEEK_V2_LITE = FULL_SIZE["deepseek_v2_lite"]

SPECTER = SystemConfig(name="specter", speculative=True, planner="three_phase", eviction="lru")
ROUND = RoundRecord(
    index=0,
    start_ms=100.0,
    draft_end_ms=110.0,
    end_ms=140.0,
    draft_len=4,
    accepted_len=2,
    new_len=3,
    prefetch_bytes=1000,
    fetch_bytes=2000,
    writeback_bytes=0,
    num_hits=6,
    num_late_hits=1,
    num_misses=3,
    num_prefetched=4,
    num_prefetched_used=1,
    union_mean=10 / 3,
    stall_ms=5.0,
    link_busy_ms=30.0,
    need_ms=32.0,
    compute_busy_ms=20.0,
)
SECOND = replace(ROUND, index=1, start_ms=140.0, draft_end_ms=150.0, end_ms=200.0, accepted_len=4, new_len=5)


def generation(*rounds: RoundRecord) -> Generation:
    tokens = list(range(1 + sum(record.new_len for record in rounds)))
    return Generation("virtual", 7, tokens, start_ms=60.0, prefill_end_ms=100.0, prefill_bytes=99, rounds=list(rounds))


def metrics(*rounds: RoundRecord) -> dict[str, Any]:
    accesses = [RoundAccess(record.draft_len, record.new_len, [[0, 1], [2], [3, 4]]) for record in rounds]
    config = replace(compose(), system=SPECTER, hardware=MACHINE)
    run = ResolvedRun(config, CostModel(TINY, tile_rows=16, kv_capacity=64), Slots(12, 1))
    return summarize(run, generation(*rounds), accesses)


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (1, None),  # prefill's token
        (2, 1 / 1),
        (3, 2 / 2),
        (4, 2 / 3),  # the bonus token shows the rejection
        (5, 3 / 4),
        (8, 6 / 7),
        (9, 6 / 7),  # all four accepted, and the bonus token
    ],
)
def test_acceptance_up_to_a_token(num_tokens: int, expected: float | None) -> None:
    assert acceptance([ROUND, SECOND], num_tokens) == expected


def test_times_rates_and_shares() -> None:
    values = metrics(ROUND, SECOND)
    expected = {
        "ttft_ms": 40.0,
        "tpot_ms": 100 / 8,  # nine tokens, the first of them at 100 ms
        "tpot_after_first_round_ms": 60 / 5,
        "end_to_end_ms": 140.0,
        "acceptance": 6 / 7,  # 2 of 3 examined, then 4 of 4
        "mean_accepted_len": 3.0,
        "hit_rate": 12 / 20,
        "frac_prefetched_used": 2 / 8,
        "link_bytes": 6000,
        "bytes_per_token": 750.0,
        "link_busy_frac": 0.6,
        "link_busy_in_need_frac": 60 / 64,
        "stall_ms": 10.0,
        "experts_per_layer": 4.0,
    }
    assert {key: values[key] for key in expected} == pytest.approx(expected)
    assert values["over_floor_trace"] == values["tpot_ms"] / values["floor_trace_ms"]


def test_one_round_has_no_time_after_the_first() -> None:
    assert metrics(ROUND)["tpot_after_first_round_ms"] is None


def test_a_generation_of_prefill_alone_has_no_tpot() -> None:
    values = metrics()
    assert "tpot_ms" not in values and values["ttft_ms"] == 40.0


def test_distinct_4grams_sees_a_loop() -> None:
    assert distinct_4grams(range(50)) == 1.0
    assert distinct_4grams([1, 2, 3] * 20) == pytest.approx(3 / 57)
    assert distinct_4grams([1, 2]) == 1.0


def test_device_bytes_of_the_published_model() -> None:
    """31.4 GB whole, 28.8 GB of it experts, 7.4 GB as INT4 (design, 1-paper-facts)."""
    parts = device_bytes(CostModel(DEEPSEEK_V2_LITE, 16, 256), SPECTER, Slots(26 * 64, 17_301_504))
    assert parts["slot"] / 1e9 == pytest.approx(28.8, abs=0.05)
    assert parts["draft"] / 1e9 == pytest.approx(7.4, abs=0.05)
    assert (parts["slot"] + parts["shared"]) / 1e9 == pytest.approx(31.4, abs=0.1)
