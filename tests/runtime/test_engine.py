"""Rounds over fake models: committed tokens, cropped KV, and the right expert in every slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specter.errors import SpecterError
from specter.records import Generation
from specter.timeline.virtual import VirtualTimeline
from tests.runtime.fakes import MACHINE, TINY, FakeModel, make_engine, plain

PROMPT = [1, 2, 3, 4, 5]


def expected(num_tokens: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        tokens.append(plain(tokens))
    return tokens[len(PROMPT) :]


def generate(
    draft: Callable[[Sequence[int]], int], num_slots: int = 12, draft_len: int = 4, num_tokens: int = 40, **policy: Any
) -> Generation:
    engine = make_engine(FakeModel(draft), num_slots, draft_len, **policy)
    return engine.generate(PROMPT, num_tokens)


def never(prefix: Sequence[int]) -> int:
    return (plain(prefix) + 1) % 10


def sometimes(prefix: Sequence[int]) -> int:
    return plain(prefix) if len(prefix) % 3 else never(prefix)


def test_draft_that_never_matches_commits_one_token_a_round() -> None:
    generation = generate(never)
    assert generation.tokens == expected(40)
    assert [record.new_len for record in generation.rounds] == [1] * 39
    assert all(record.accepted_len == 0 for record in generation.rounds)


def test_draft_that_always_matches_commits_k_plus_one() -> None:
    generation = generate(plain, num_tokens=41)
    assert generation.tokens == expected(41)
    assert [record.new_len for record in generation.rounds] == [5] * 8


def test_draft_that_sometimes_matches_commits_the_matching_prefix_and_a_bonus() -> None:
    generation = generate(sometimes)
    assert generation.tokens == expected(40)
    assert {record.new_len for record in generation.rounds[:-1]} > {1} or len(generation.rounds) > 10
    for record in generation.rounds:
        assert record.new_len == record.accepted_len + 1 <= record.draft_len + 1


@pytest.mark.parametrize("num_tokens", range(1, 8))
def test_generates_exactly_as_many_tokens_as_asked(num_tokens: int) -> None:
    assert generate(plain, num_tokens=num_tokens).tokens == expected(num_tokens)


@pytest.mark.parametrize("num_slots", [2, 3, 5, 7, 12, 24])
@pytest.mark.parametrize("draft_len", [0, 1, 2, 7, 16])
@pytest.mark.parametrize(("eviction", "planner"), [("lru", "three_phase"), ("lru", "none"), ("drop", "none")])
def test_tokens_depend_on_no_budget_depth_or_policy(
    num_slots: int, draft_len: int, eviction: str, planner: str
) -> None:
    generation = generate(sometimes, num_slots, draft_len, 30, eviction=eviction, planner=planner)
    assert generation.tokens == expected(30)


def test_counts_add_up_and_bytes_equal_those_of_the_link() -> None:
    engine = make_engine(FakeModel(sometimes), num_slots=12, draft_len=4)
    generation = engine.generate(PROMPT, 40)
    records = generation.rounds
    payload = engine.costs.payload_bytes
    assert sum(r.num_prefetched for r in records) > 0
    for record in records:
        num_demanded = record.num_hits + record.num_late_hits + record.num_misses
        assert num_demanded == round(record.union_mean * TINY.num_moe_layers)
        assert record.num_prefetched_used <= record.num_prefetched + 12
        assert record.fetch_bytes == record.num_misses * payload
    moved = generation.prefill_bytes + sum(record.prefetch_bytes + record.fetch_bytes for record in records)
    assert moved == engine.timeline.totals().copied_bytes


def test_rounds_follow_each_other_on_the_clock() -> None:
    generation = generate(sometimes)
    assert generation.prefill_end_ms == generation.rounds[0].start_ms
    for record, following in zip(generation.rounds, generation.rounds[1:], strict=False):
        assert record.start_ms < record.draft_end_ms < record.end_ms == following.start_ms


def test_prefetching_turns_misses_into_hits_where_the_draft_is_right() -> None:
    """Not a claim about time: with random routing every resident is useful, and each prefetch displaces one."""
    with_planner = generate(plain, num_slots=18, draft_len=4, num_tokens=100)
    without = generate(plain, num_slots=18, draft_len=4, num_tokens=100, planner="none")
    assert with_planner.tokens == without.tokens
    assert sum(r.num_misses for r in with_planner.rounds) < sum(r.num_misses for r in without.rounds)
    assert sum(r.num_prefetched_used for r in with_planner.rounds) > 0
    assert sum(r.num_prefetched for r in without.rounds) == 0


def test_commits_are_reported_as_they_happen() -> None:
    seen: list[int] = []
    make_engine(FakeModel(sometimes), 12, 4).generate(PROMPT, 20, seen.extend)
    assert seen == expected(20)


def test_empty_and_too_long_prompts_are_refused() -> None:
    engine = make_engine(FakeModel(), 12, 4)
    with pytest.raises(SpecterError, match="no tokens"):
        engine.generate([], 10)
    with pytest.raises(SpecterError, match="kv_capacity=260"):
        engine.generate([1] * 250, 10)
    engine.generate([1] * 246, 10)


class Lanes(VirtualTimeline):
    """Tracks whether the host has waited for both lanes since the last operation was issued."""

    is_idle = True

    def compute(self, *args: Any, **options: Any) -> Any:
        self.is_idle = False
        return super().compute(*args, **options)

    def copy(self, *args: Any, **options: Any) -> Any:
        self.is_idle = False
        return super().copy(*args, **options)

    def drain(self) -> None:
        super().drain()
        self.is_idle = True


@pytest.mark.parametrize("planner", ["none", "three_phase", "deadline"])
def test_nothing_is_under_way_when_a_generation_returns(planner: str) -> None:
    """On a device its slots may then be refilled, or their memory reused."""
    timeline = Lanes(MACHINE)
    make_engine(FakeModel(sometimes), 12, 4, planner=planner, timeline=timeline).generate(PROMPT, 30)
    assert timeline.is_idle
