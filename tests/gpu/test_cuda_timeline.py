"""The device clock against a fake CUDA that keeps streams as queues on one simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from specter.timeline.base import LaneTotals, Work
from specter.timeline.cuda import CudaTimeline

WORK = Work("any", 0, 0, 1, 1)


class FakeStream:
    def __init__(self, device: object = None) -> None:
        self.free_ms = 0.0

    def wait_event(self, event: FakeEvent) -> None:
        assert event.at_ms is not None, "waits for an event that was never recorded"
        self.free_ms = max(self.free_ms, event.at_ms)

    def synchronize(self) -> None: ...


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms: float | None = None
        self.is_late = False  # has not happened yet when the host asks

    def record(self, stream: FakeStream) -> None:
        self.at_ms = stream.free_ms

    def query(self) -> bool:
        return not self.is_late

    def synchronize(self) -> None:
        self.is_late = False

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.at_ms is not None and end.at_ms is not None
        return end.at_ms - self.at_ms


class FakeCuda:
    Event, Stream = FakeEvent, FakeStream

    def __init__(self) -> None:
        self.current = FakeStream()

    def current_stream(self, device: object) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def busy(self, duration_ms: float) -> str:
        self.current.free_ms += duration_ms
        return "result"


def copying(cuda: FakeCuda, duration_ms: float) -> Callable[[], None]:
    def run() -> None:
        cuda.busy(duration_ms)

    return run


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def timeline(cuda: FakeCuda) -> CudaTimeline:
    return CudaTimeline("cpu", cuda)


def test_a_compute_waits_for_its_copy_and_the_wait_is_its_stall(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    arrived = timeline.copy(1000, copying(cuda, 5))
    result, done = timeline.compute(WORK, lambda: cuda.busy(2), after=[arrived])
    assert result == "result"
    assert timeline.elapsed_ns(arrived, done) == 2_000_000
    assert timeline.totals() == LaneTotals(2_000_000, 5_000_000, 5_000_000, 1000, 1)


def test_lanes_run_side_by_side(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    timeline.copy(1, copying(cuda, 5))
    _, done = timeline.compute(WORK, lambda: cuda.busy(2))
    assert done.end.at_ms == 2
    assert timeline.totals().stall_ns == 0


def test_a_copy_waits_for_the_last_use_of_its_slot(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    _, used = timeline.compute(WORK, lambda: cuda.busy(3))
    arrived = timeline.copy(1, copying(cuda, 1), after=[used])
    assert arrived.end.at_ms == 4 and arrived.is_copy and not used.is_copy
    assert timeline.totals().link_busy_ns == 1_000_000  # its wait is not link time


def test_waiting_for_compute_alone_is_no_stall(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    _, first = timeline.compute(WORK, lambda: cuda.busy(3))
    timeline.compute(WORK, lambda: cuda.busy(3), after=[first])
    assert timeline.totals().stall_ns == 0


def test_totals_count_only_what_has_ended(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    _, done = timeline.compute(WORK, lambda: cuda.busy(3))
    done.end.is_late = True
    assert not timeline.is_done(done)
    assert timeline.totals().compute_busy_ns == 0
    timeline.wait(done)
    assert timeline.is_done(done)
    assert timeline.totals().compute_busy_ns == timeline.totals().compute_busy_ns == 3_000_000


def test_work_runs_on_its_own_stream(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    seen: list[object] = []
    timeline.copy(1, lambda: seen.append(cuda.current))
    timeline.compute(WORK, lambda: seen.append(cuda.current))
    assert seen == [timeline.link_stream, timeline.compute_stream]
