"""The device clock against a fake CUDA that keeps streams as queues on one simulated clock."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from baselines.mixtral_offloading import OneStream
from specter.errors import SpecterError
from specter.timeline.base import LaneTotals, Work
from specter.timeline.cuda import CudaTimeline

WORK = Work("any", 0, 0, 1, 1)


class FakeStream:
    def __init__(self, device: object = None) -> None:
        self.free_ms = 0.0
        self.events: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        assert event.at_ms is not None, "waits for an event that was never recorded"
        self.free_ms = max(self.free_ms, event.at_ms)

    def synchronize(self) -> None:
        for event in self.events:
            event.synchronize()


class FakeEvent:
    num_made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms: float | None = None
        self.num_late = 0  # questions of the host until it has happened
        FakeEvent.num_made += 1
        self.error: str | None = None

    def record(self, stream: FakeStream) -> None:
        self.at_ms = stream.free_ms
        self.num_late = math.ceil(self.at_ms)  # a millisecond a question
        stream.events.append(self)

    def query(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        self.num_late -= 1
        return self.num_late < 0

    def synchronize(self) -> None:
        self.num_late = 0

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.at_ms is not None and end.at_ms is not None
        return end.at_ms - self.at_ms


class FakeCuda:
    Event, Stream = FakeEvent, FakeStream

    def __init__(self) -> None:
        self.current = FakeStream()

    def current_stream(self, device: object) -> FakeStream:
        return self.current

    def set_stream(self, stream: FakeStream) -> None:
        self.current = stream

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
    return CudaTimeline("cpu", cuda=cuda)


def test_a_compute_waits_for_its_copy_and_the_wait_is_its_stall(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    arrived = timeline.copy(1000, copying(cuda, 5))
    result, done = timeline.compute(WORK, lambda: cuda.busy(2), after=[arrived])
    assert result == "result"
    assert timeline.elapsed_ns(arrived, done) == 2_000_000
    timeline.drain()
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
    timeline.drain()
    assert timeline.totals().link_busy_ns == 1_000_000  # its wait is not link time


def test_waiting_for_compute_alone_is_no_stall(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    _, first = timeline.compute(WORK, lambda: cuda.busy(3))
    timeline.compute(WORK, lambda: cuda.busy(3), after=[first])
    timeline.drain()
    assert timeline.totals().stall_ns == 0


def test_totals_count_only_what_has_ended(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    _, done = timeline.compute(WORK, lambda: cuda.busy(3))
    done.end.num_late = 2
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


def test_decoding_runs_beside_compute_and_behind_its_copy(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    seen: list[object] = []
    arrived = timeline.copy(1, copying(cuda, 2))
    timeline.compute(WORK, lambda: cuda.busy(4))
    _, decoded = timeline.decode(WORK, lambda: (seen.append(cuda.current), cuda.busy(3)), after=[arrived])
    _, ran = timeline.compute(WORK, lambda: (seen.append(cuda.current), cuda.busy(1)), after=[decoded])
    assert seen == [timeline.decode_stream, timeline.compute_stream]
    assert decoded.end.at_ms == 5 and ran.end.at_ms == 6
    assert decoded.is_copy, "compute that waits for it waits for its copy"
    timeline.drain()
    totals = timeline.totals()
    assert totals.compute_busy_ns == 8_000_000 and totals.stall_ns == 1_000_000
    _, hit = timeline.decode(WORK, lambda: cuda.busy(1))
    assert not hit.is_copy


def test_the_host_goes_on_at_the_first_event(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    _, slow = timeline.compute(WORK, lambda: cuda.busy(3))
    soon = timeline.copy(1, copying(cuda, 1))
    slow.end.num_late, soon.end.num_late = 1000, 3
    timeline.wait_first((slow, soon))
    assert slow.end.num_late > 900 and timeline.is_done(soon)


def test_an_event_that_never_comes_ends_the_wait_and_is_named(cuda: FakeCuda) -> None:
    timeline = CudaTimeline("cpu", timeout_s=0.01, cuda=cuda)
    stuck = timeline.copy(1, copying(cuda, 1), label="fetch L3 E5")
    stuck.end.num_late = 1 << 60
    with pytest.raises(SpecterError, match="did not finish fetch L3 E5 within 0.01 s"):
        timeline.wait(stuck)


def test_a_failed_copy_is_named_when_it_is_issued_and_when_it_is_waited_for(
    cuda: FakeCuda, timeline: CudaTimeline
) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA error: invalid argument\nmore")

    with pytest.raises(SpecterError, match="at or before fetch L1 E2: CUDA error: invalid argument"):
        timeline.copy(1, refuse, label="fetch L1 E2")
    late = timeline.copy(1, copying(cuda, 1), label="fetch L1 E3")
    late.end.error = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(SpecterError, match="at or before fetch L1 E3: CUDA error: an illegal"):
        timeline.wait(late)


def test_what_has_happened_is_not_waited_for(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    arrived = timeline.copy(1, copying(cuda, 5))
    timeline.drain()
    _, done = timeline.compute(WORK, lambda: cuda.busy(2), after=[arrived])
    assert done.end.at_ms == 2 and timeline.compute_stream.free_ms == 2
    timeline.drain()
    assert timeline.totals().stall_ns == 0


def test_work_issued_far_ahead_needs_one_event_a_piece_and_counts_the_same(cuda: FakeCuda) -> None:
    timeline = CudaTimeline("cpu", cuda=cuda)
    before = FakeEvent.num_made
    ends = [timeline.copy(1, copying(cuda, 5)) for _ in range(10)]
    assert FakeEvent.num_made - before == 10 + 2, "the first two are not behind two others"
    timeline.drain()
    assert timeline.totals() == LaneTotals(0, 50_000_000, 0, 10, 10)
    assert timeline.elapsed_ns(ends[2], ends[5]) == 15_000_000


def test_the_stall_of_work_issued_far_ahead_is_all_that_the_copy_cost(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    for _ in range(3):
        timeline.compute(WORK, lambda: cuda.busy(2))
    arrived = timeline.copy(1, copying(cuda, 10))
    for _ in range(2):
        timeline.compute(WORK, lambda: cuda.busy(1), after=[arrived])
    timeline.drain()
    totals = timeline.totals()
    assert (totals.compute_busy_ns, totals.stall_ns) == (8_000_000, 4_000_000)


def test_events_that_nobody_holds_are_used_again(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    for _ in range(5):
        timeline.copy(1, copying(cuda, 1))
        timeline.drain()
    num_made = FakeEvent.num_made
    for _ in range(50):
        timeline.copy(1, copying(cuda, 1))
        timeline.drain()
    assert FakeEvent.num_made == num_made
    held = [timeline.copy(1, copying(cuda, 1)) for _ in range(20)]
    assert len({id(event.end) for event in held}) == 20


def test_totals_at_a_mark_are_of_what_was_issued_before_it(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    arrived = timeline.copy(10, copying(cuda, 5))
    timeline.compute(WORK, lambda: cuda.busy(2), after=[arrived])
    mark = timeline.mark()
    for _ in range(3):
        timeline.copy(10, copying(cuda, 5))
    timeline.compute(WORK, lambda: cuda.busy(2))
    later = timeline.mark()
    timeline.drain()
    assert timeline.totals_at(mark) == LaneTotals(2_000_000, 5_000_000, 5_000_000, 10, 1)
    assert timeline.totals_at(later) == timeline.totals() == LaneTotals(4_000_000, 20_000_000, 5_000_000, 40, 4)


def test_totals_at_a_mark_wait_for_what_is_under_way(cuda: FakeCuda) -> None:
    timeline = CudaTimeline("cpu", timeout_s=0.01, cuda=cuda)
    timeline.copy(10, copying(cuda, 5))
    assert timeline.totals_at(timeline.mark()).link_busy_ns == 5_000_000
    timeline.copy(10, copying(cuda, 5), label="fetch L3 E5").end.num_late = 1 << 60
    with pytest.raises(SpecterError, match="did not finish fetch L3 E5"):
        timeline.totals_at(timeline.mark())


def test_a_serial_timeline_overlaps_nothing(cuda: FakeCuda) -> None:
    timeline = CudaTimeline("cpu", is_serial=True, cuda=cuda)
    timeline.copy(1, copying(cuda, 5))
    _, done = timeline.compute(WORK, lambda: cuda.busy(2))
    assert done.end.at_ms == 7


def test_one_stream_of_two_orders_all_but_what_runs_beside_it(cuda: FakeCuda, timeline: CudaTimeline) -> None:
    stream = OneStream(timeline)
    ends = [
        stream.copy(1, copying(cuda, 5)),
        stream.compute(WORK, lambda: cuda.busy(2))[1],
        stream.compute(WORK, lambda: cuda.busy(1))[1],
        stream.copy(1, copying(cuda, 3)),
        stream.copy(1, copying(cuda, 4)),
        timeline.copy(1, copying(cuda, 20)),  # beside it
        stream.compute(WORK, lambda: cuda.busy(2))[1],
    ]
    assert [end.end.at_ms for end in ends] == [5, 7, 8, 11, 15, 35, 17]  # type: ignore[attr-defined]
    assert stream.totals() == timeline.totals()


def test_a_trace_keeps_lanes_labels_and_stalls(cuda: FakeCuda) -> None:
    timeline = CudaTimeline("cpu", trace=True, cuda=cuda)
    arrived = timeline.copy(1000, copying(cuda, 5), label="prefetch L0 E1")
    _, done = timeline.compute(WORK, lambda: cuda.busy(2), after=[arrived])
    timeline.wait(done)
    timeline.drain()
    assert timeline.ops is not None
    lanes = {op.lane: op for op in timeline.ops}
    assert lanes["link"][:5] == ("link", "prefetch L0 E1", 0, 5_000_000, 1000)
    assert lanes["compute"][:4] == ("compute", "any", 5_000_000, 7_000_000) and lanes["compute"].stall_ns == 5_000_000
    assert lanes["host"].label == "wait"
