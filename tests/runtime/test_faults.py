"""Faults on the virtual clock: late and failing copies, refused memory. No wrong token, one clear error."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch

from specter.engine import Engine
from specter.errors import SpecterError
from specter.experts.slots import SlotArena
from specter.experts.store import RawCodec
from specter.timeline.base import Event
from specter.timeline.virtual import VirtualEvent
from tests.runtime.fakes import FakeModel, make_engine
from tests.runtime.test_engine import PROMPT, expected, sometimes

LATE_NS = 50_000_000


def engine(num_slots: int = 8) -> Engine:
    return make_engine(FakeModel(sometimes), num_slots, draft_len=4)


def delay(faulty: Engine, is_late: Callable[[], bool]) -> None:
    """Some copies end 50 ms after the link has let go of them."""
    copy = faulty.timeline.copy

    def late(num_bytes: int, run: Callable[[], None], after: Iterable[Event] = (), label: str = "") -> Event:
        event = copy(num_bytes, run, after, label)
        assert isinstance(event, VirtualEvent)
        return replace(event, end_ns=event.end_ns + LATE_NS * is_late())

    faulty.timeline.copy = late  # type: ignore[method-assign]


def fail(faulty: Engine, number: int) -> None:
    """The copy with this number fails, and no other."""
    copy, count = faulty.timeline.copy, 0

    def failing(num_bytes: int, run: Callable[[], None], after: Iterable[Event] = (), label: str = "") -> Event:
        nonlocal count
        count += 1
        if count == number:
            raise SpecterError(f"the copy {label!r} failed", "check the device")
        return copy(num_bytes, run, after, label)

    faulty.timeline.copy = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("seed", range(10))
def test_late_copies_change_times_and_no_token(seed: int) -> None:
    rng = random.Random(seed)
    punctual, late = engine(), engine()
    delay(late, lambda: rng.random() < 0.3)
    reference, generation = (one.generate(PROMPT, 30) for one in (punctual, late))
    assert generation.tokens == reference.tokens == expected(30)
    assert generation.rounds[-1].end_ms > reference.rounds[-1].end_ms


@pytest.mark.parametrize("number", [1, 2, 7, 20, 41])
def test_a_failed_copy_is_reported_and_finished_rounds_are_kept(number: int) -> None:
    faulty = engine()
    fail(faulty, number)
    committed: list[int] = []
    with pytest.raises(SpecterError, match="fetch L. E. failed|the copy '(pre)?fetch") as caught:
        faulty.generate(PROMPT, 40, committed.extend)
    assert caught.value.remedy == "check the device"
    assert committed == expected(40)[: len(committed)]
    generation = faulty.generation
    assert generation is not None
    assert sum(record.new_len for record in generation.rounds) == max(len(committed) - 1, 0)


@pytest.mark.parametrize("number", [1, 7, 41])
def test_the_next_generation_is_right_after_a_failure(number: int) -> None:
    faulty = engine()
    fail(faulty, number)
    with pytest.raises(SpecterError):
        faulty.generate(PROMPT, 40)
    assert faulty.generate(PROMPT, 40).tokens == expected(40)


def test_refused_memory_names_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise RuntimeError("not enough memory: you tried to allocate 7000000000 bytes")

    monkeypatch.setattr(torch, "full", refuse)
    with pytest.raises(SpecterError, match="416 slots of 128 bytes") as caught:
        SlotArena(416, RawCodec(torch.float32, 2, 4))
    assert "budget" in caught.value.remedy
