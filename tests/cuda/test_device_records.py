"""Records of whole rounds on the device clock, over streams that a fake CUDA keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from specter.engine import Engine
from specter.errors import SpecterError
from specter.models.spec import ExpertId
from specter.records import RoundRecord
from specter.timeline.base import Event, Work
from specter.timeline.cuda import CudaTimeline
from tests.cuda.test_cuda_timeline import FakeCuda
from tests.runtime.fakes import FakeModel, make_engine
from tests.runtime.test_engine import PROMPT, expected, sometimes

COPY_MS = 5


class CopyingModel(FakeModel):
    """Its copies take time on the stream that is current; one of them may fail."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(sometimes)
        self.cuda = cuda
        self.num_left = 1 << 60

    def move(self, expert: ExpertId, slot: int) -> None:
        self.num_left -= 1
        if self.num_left == 0:
            raise RuntimeError("CUDA error: out of order")
        self.cuda.busy(COPY_MS)
        super().move(expert, slot)


def device_engine(eviction: str, planner: str, draft_len: int = 4) -> Engine:
    cuda = FakeCuda()
    timeline = CudaTimeline("cpu", cuda=cuda)
    return make_engine(CopyingModel(cuda), 12, draft_len, eviction, planner, timeline)  # type: ignore[arg-type]


POLICIES = [("lru", "three_phase"), ("retain", "deadline"), ("lru", "none")]


@pytest.mark.parametrize(("eviction", "planner"), POLICIES)
def test_a_record_is_of_what_was_issued_in_its_round(eviction: str, planner: str) -> None:
    engine = device_engine(eviction, planner)
    generation = engine.generate(PROMPT, 40)
    assert generation.tokens == expected(40)
    payload = engine.costs.payload_bytes
    for record in generation.rounds:
        num_copies = (record.prefetch_bytes + record.fetch_bytes) // payload
        assert record.link_busy_ms == pytest.approx(COPY_MS * num_copies)
        assert num_copies == record.num_prefetched + record.num_misses
    totals = engine.timeline.totals()
    assert totals.copied_bytes == generation.prefill_bytes + sum(
        r.prefetch_bytes + r.fetch_bytes for r in generation.rounds
    )
    busy_ms = COPY_MS * generation.prefill_bytes / payload + sum(record.link_busy_ms for record in generation.rounds)
    assert totals.link_busy_ns == pytest.approx(busy_ms * 1e6)
    assert sum(record.need_ms for record in generation.rounds) > 0


@pytest.mark.parametrize("number", [44, 52, 60])
def test_finished_rounds_are_written_down_when_a_copy_fails(number: int) -> None:
    engine = device_engine("retain", "deadline")
    assert isinstance(engine.model, CopyingModel)
    engine.model.num_left = number
    commits: list[list[int]] = []
    with pytest.raises(SpecterError, match="CUDA error: out of order"):
        engine.generate(PROMPT, 40, commits.append)
    assert engine.generation is not None and len(commits) > 1
    assert [record.new_len for record in engine.generation.rounds] == [len(tokens) for tokens in commits[1:]]
    assert engine.generate(PROMPT, 40).tokens == expected(40)


def test_the_next_draft_is_launched_before_the_round_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = device_engine("retain", "deadline")
    order: list[str] = []
    totals_at, draft_step = engine.timeline.totals_at, engine.model.draft_step
    monkeypatch.setattr(engine.timeline, "totals_at", lambda mark: (order.append("written"), totals_at(mark))[1])
    monkeypatch.setattr(engine.model, "draft_step", lambda: (order.append("draft"), draft_step())[1])
    engine.generate(PROMPT, 40)
    first = order.index("written")
    assert order[:first] == ["draft"] * 8, "two rounds of four are launched before the first is written down"


def test_the_next_plain_pass_is_launched_before_the_round_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = device_engine("lru", "none", draft_len=0)
    order: list[str] = []
    totals_at, compute = engine.timeline.totals_at, engine.timeline.compute

    def launch(work: Work, run: Callable[[], Any], after: Iterable[Event] = ()) -> tuple[Any, Event]:
        order.append(work.name)
        return compute(work, run, after)

    monkeypatch.setattr(engine.timeline, "totals_at", lambda mark: (order.append("written"), totals_at(mark))[1])
    monkeypatch.setattr(engine.timeline, "compute", launch)
    engine.generate(PROMPT, 4)
    passes = " ".join(order).split("head")
    assert [one.split().count("written") for one in passes] == [0, 0, 2, 2, 2], "prefill, three rounds, the end"
    assert all(one.split()[:3] == ["attend_and_route", "written", "written"] for one in passes[2:4])


class InterruptedList(list[RoundRecord]):
    """Appends, and is interrupted before it says so."""

    def append(self, record: RoundRecord) -> None:
        super().append(record)
        raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["settled", "appended"])
def test_an_interruption_while_a_round_is_written_down_writes_it_once_at_most_and_wholly(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    whole = device_engine("retain", "deadline").generate(PROMPT, 40).rounds
    engine = device_engine("retain", "deadline")
    settle = engine.cache.queue.settle

    def interrupt(num_met: int) -> int:
        monkeypatch.setattr(engine.cache.queue, "settle", settle)  # once
        settle(num_met)
        raise KeyboardInterrupt

    def on_commit(tokens: list[int]) -> None:
        assert engine.generation is not None
        if len(engine.generation.rounds) == 1:
            if where == "settled":
                monkeypatch.setattr(engine.cache.queue, "settle", interrupt)
            else:
                engine.generation.rounds = InterruptedList(engine.generation.rounds)

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPT, 40, on_commit)
    assert engine.generation is not None
    written = [(record.index, record.need_ms) for record in engine.generation.rounds]
    assert written == [(record.index, record.need_ms) for record in whole[: 1 if where == "settled" else 2]]
    assert whole[1].need_ms > 0
