"""Where a generation ends: at a stop token, by the caller, or at its length. Tokens equal plain decoding's to there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from specter.records import Generation
from specter.speculation.accept import through_stop
from tests.runtime.fakes import FakeModel, make_engine, plain
from tests.runtime.test_engine import PROMPT, expected, never, sometimes

WHOLE = expected(40)


def stopped(tokens: Sequence[int], stop_ids: set[int]) -> list[int]:
    """The reference, written otherwise."""
    ends = [tokens.index(token) for token in stop_ids if token in tokens]
    return list(tokens[: min(ends) + 1]) if ends else list(tokens)


@pytest.mark.parametrize("draft", [plain, sometimes, never])
@pytest.mark.parametrize("draft_len", [0, 1, 4, 16])
@pytest.mark.parametrize("stop_ids", [{token} for token in range(10)] + [{3, 8}, {99}, set()], ids=str)
def test_a_stop_token_is_the_last(draft: Callable[[Sequence[int]], int], draft_len: int, stop_ids: set[int]) -> None:
    commits: list[int] = []
    engine = make_engine(FakeModel(draft), 12, draft_len)
    generation = engine.generate(PROMPT, 40, lambda tokens: commits.extend(tokens), stop_ids=stop_ids)
    assert generation.tokens == commits == through_stop(WHOLE, stop_ids) == stopped(WHOLE, stop_ids)
    assert generation.stop_reason == ("eos" if stop_ids & set(WHOLE) else "length")
    assert 1 + sum(record.new_len for record in generation.rounds) == len(generation.tokens)


def cut_round(draft_len: int) -> Generation:
    """Always accepted; the stop token is inside a round."""
    engine = make_engine(FakeModel(plain), 12, draft_len)
    return engine.generate(PROMPT, 40, stop_ids={WHOLE[3]})


def test_the_round_that_is_cut_has_accepted_the_stop_token() -> None:
    assert WHOLE[3] not in WHOLE[:3]
    last = cut_round(16).rounds[-1]
    assert (last.draft_len, last.accepted_len, last.new_len) == (16, 3, 3)


def test_a_stop_token_that_is_a_bonus_is_not_accepted() -> None:
    last = cut_round(2).rounds[-1]
    assert (last.draft_len, last.accepted_len, last.new_len) == (2, 2, 3)


@pytest.mark.parametrize("num_commits", range(1, 6))
@pytest.mark.parametrize("draft_len", [0, 4])
def test_the_caller_ends_it_after_a_commit_and_the_cache_stays_warm(num_commits: int, draft_len: int) -> None:
    model = FakeModel(sometimes)
    engine = make_engine(model, 12, draft_len)
    commits: list[list[int]] = []

    def on_commit(tokens: list[int]) -> bool:
        commits.append(tokens)
        return len(commits) == num_commits

    generation = engine.generate(PROMPT, 40, on_commit)
    num_tokens = sum(map(len, commits))
    assert generation.tokens == WHOLE[:num_tokens] and generation.stop_reason == "stop"
    assert len(generation.rounds) == num_commits - 1
    before = set(engine.cache.residency.experts())
    assert before and engine.generate(PROMPT, 40).tokens == WHOLE


def test_length_and_eos_at_once_is_eos() -> None:
    generation = make_engine(FakeModel(), 12, 4).generate(PROMPT, 8, stop_ids={WHOLE[3]})
    assert generation.tokens == WHOLE[:4] and generation.stop_reason == "eos"


def test_an_interrupted_generation_has_no_reason() -> None:
    def on_commit(tokens: list[int]) -> bool:
        raise KeyboardInterrupt

    engine = make_engine(FakeModel(), 12, 4)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPT, 8, on_commit)
    assert engine.generation is not None and engine.generation.stop_reason is None
