"""Planners and evictions against any timing of the link: right bytes in right slots at the right time, no deadlock,
and a fresh start after whatever went wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter.engine import Engine
from specter.experts.residency import State
from specter.models.base import FinishedStep
from specter.models.spec import ExpertId
from specter.timeline.base import Event, T, Work
from specter.timeline.virtual import VirtualEvent, VirtualTimeline
from tests.runtime.fakes import MACHINE, TINY, FakeModel, make_engine
from tests.runtime.test_engine import PROMPT, expected, sometimes

PLANNERS = ("deadline", "deadline_cold", "deadline_joined", "three_phase", "none")
EVICTIONS = ("lru", "retain", "drop")


class WatchedModel(FakeModel):
    """Notes which slots an operation touches, and raises when its fuse has burnt down."""

    def __init__(self, draft: Callable[[Sequence[int]], int] = sometimes) -> None:
        self.touched: list[int] = []
        self.fuse: int | None = None
        self.error: type[BaseException] = RuntimeError
        super().__init__(draft)

    def burn(self) -> None:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                raise self.error("on purpose")

    def move(self, expert: ExpertId, slot: int) -> None:
        self.burn()
        self.touched.append(slot)
        super().move(expert, slot)

    def draft_step(self) -> FinishedStep:
        self.burn()
        return super().draft_step()

    def read(self, slot: int) -> ExpertId:
        self.burn()
        self.touched.append(slot)
        return super().read(slot)


class WatchedTimeline(VirtualTimeline):
    """Copies take random times; no slot is read before its copy has ended, or written before its reader has."""

    def __init__(self, model: WatchedModel, seed: int) -> None:
        super().__init__(MACHINE)
        self.model, self.rng = model, random.Random(seed)
        self.written: dict[int, int] = {}
        self.read: dict[int, int] = {}

    def compute(self, work: Work, run: Callable[[], T], after: Iterable[Event] = ()) -> tuple[T, VirtualEvent]:
        self.model.touched.clear()
        result, done = super().compute(work, run, after)
        if work.name == "experts":
            start = done.end_ns - self.hardware.compute_ns(work)
            assert all(self.written[slot] <= start for slot in self.model.touched), "read before it was there"
            self.read |= dict.fromkeys(self.model.touched, done.end_ns)
        return result, done

    def copy(
        self, num_bytes: int, run: Callable[[], None], after: Iterable[Event] = (), label: str = ""
    ) -> VirtualEvent:
        self.model.touched.clear()
        num_bytes = self.rng.choice((1, num_bytes // 50, num_bytes, 20 * num_bytes))
        done = super().copy(num_bytes, run, after, label)
        (slot,) = self.model.touched
        start = done.end_ns - self.hardware.copy_ns(num_bytes)
        assert self.read.get(slot, 0) <= start, "written while it was read"
        self.written[slot] = done.end_ns
        return done


def watched(num_slots: int, draft_len: int, eviction: str, planner: str, seed: int = 0) -> tuple[WatchedModel, Engine]:
    model = WatchedModel()
    timeline = WatchedTimeline(model, seed)
    return model, make_engine(model, num_slots, draft_len, eviction, planner, timeline)


def check_bookkeeping(engine: Engine) -> None:
    residency = engine.cache.residency
    held = [slot for slot in residency.slots if slot.expert is not None]
    assert {slot.expert for slot in held} == set(residency.experts())
    assert residency.num_free == len(residency.slots) - len(held)
    assert all(slot.pins == 0 for slot in residency.slots)
    assert all((slot.state is State.ABSENT) == (slot.expert is None) for slot in residency.slots)


@given(
    st.integers(2, 26),
    st.sampled_from([0, 1, 2, 5, 16]),
    st.sampled_from(EVICTIONS),
    st.sampled_from(PLANNERS),
    st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_tokens_do_not_depend_on_link_timing(
    num_slots: int, draft_len: int, eviction: str, planner: str, seed: int
) -> None:
    _, engine = watched(num_slots, draft_len, eviction, planner, seed)
    assert engine.generate(PROMPT, 25).tokens == expected(25)
    check_bookkeeping(engine)
    assert engine.generate(PROMPT, 25).tokens == expected(25)


@given(
    st.integers(2, 16),
    st.sampled_from(EVICTIONS),
    st.sampled_from(PLANNERS),
    st.integers(0, 300),
    st.sampled_from([RuntimeError, KeyboardInterrupt]),
)
@settings(max_examples=80, deadline=None)
def test_a_generation_after_an_exception_is_correct(
    num_slots: int, eviction: str, planner: str, fuse: int, error: type[BaseException]
) -> None:
    """The fuse burns in copies, draft steps and waves, whichever comes."""
    model, engine = watched(num_slots, 5, eviction, planner)
    model.fuse, model.error = fuse, error
    try:
        engine.generate(PROMPT, 25)
        model.fuse = None
    except error:
        assert engine.generation is not None
        committed = sum(record.new_len for record in engine.generation.rounds)
        assert committed < 25, "finished rounds are kept, the broken one is not among them"
    assert engine.generate(PROMPT, 25).tokens == expected(25)
    check_bookkeeping(engine)


@pytest.mark.parametrize("planner", ["deadline", "three_phase"])
def test_a_generation_after_a_failed_copy_is_correct(planner: str) -> None:
    _, engine = watched(12, 5, "retain", planner)
    assert engine.generate(PROMPT, 10).tokens == expected(10)

    def fail(expert: ExpertId, slot: int) -> None:
        raise OSError("the link is down")

    healthy, engine.cache._transfer._move = engine.cache._transfer._move, fail
    with pytest.raises(OSError, match="link is down"):
        engine.generate(PROMPT, 25)
    engine.cache._transfer._move = healthy
    assert engine.generate(PROMPT, 25).tokens == expected(25)


def test_deadline_starts_earlier_and_waits_less_than_the_published_planner() -> None:
    """Where nothing need be displaced, time is all that planners differ in."""
    ends = {}
    for planner in ("deadline", "three_phase", "none"):
        model = FakeModel(sometimes)
        engine = make_engine(model, TINY.num_moe_layers * TINY.num_experts, 8, "retain", planner)
        engine.generate(PROMPT, 2)
        engine.cache.place([])
        engine.generate(PROMPT, 2)  # cold again, its prefill loads some
        engine.cache.place([])
        ends[planner] = engine.generate(PROMPT, 10).rounds[0]
    assert ends["deadline"].num_misses <= ends["none"].num_misses
    assert ends["deadline"].stall_ms <= ends["three_phase"].stall_ms
