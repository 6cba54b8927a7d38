"""The device clock: issues work to two CUDA streams and measures it with events.

The compute lane is the stream that was current when the timeline began, the link lane a stream of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specter.errors import SpecterError
from specter.timeline.base import Clock, Event, LaneTotals, Mark, T, Work
from specter.timeline.trace import Lane, TraceOp

# Longer than any pass: the whole store crosses PCIe 3.0 in 3 s.
TIMEOUT_S = 60.0


@dataclass(slots=True)
class CudaEvent:
    """The end of one piece of work on a stream, or another point of it. The driver's event goes back to `pool` with
    the last who holds this one: whatever waits for it on a device has been told what to wait for when it was issued."""

    end: Any  # torch.cuda.Event, with timing
    is_copy: bool
    label: str
    pool: list[Any]
    has_happened: bool = False  # as far as the host has asked

    def __del__(self) -> None:
        self.pool.append(self.end)


@dataclass(slots=True)
class _Span:
    """Work whose times have not been read yet: one piece, or several without a gap between them."""

    lane: Lane
    label: str
    issued: CudaEvent  # before the waits for other lanes
    start: CudaEvent  # after them
    end: CudaEvent
    num_bytes: int  # of a copy; 0: compute
    waits_for_copy: bool


@dataclass(slots=True, eq=False)
class CudaMark:
    """Stands in both lanes behind what was issued before it, and takes the totals there."""

    copied_bytes: int
    num_copies: int
    compute_ns: int = 0
    stall_ns: int = 0
    link_ns: int = 0
    num_lanes: int = 2  # that have not come to it


class CudaTimeline:
    """A `Timeline` that measures. Not thread-safe; `totals` reads what has ended so far.

    A compute's stall is the time that its lane stood between `issued` and `start` with a copy among its `after`.

    Args:
        trace: keep what ran when in `ops`; `totals` and `drain` add what has ended.
        is_serial: one stream for both lanes, so that nothing overlaps: to read, to test, and to see what overlap gives.
        timeout_s: how long the host waits for an event before it gives up.
        cuda: the framework's CUDA module; tests put a fake in its place.
    """

    clock: Clock = "device"

    def __init__(
        self,
        device: torch.device | str = "cuda",
        trace: bool = False,
        is_serial: bool = False,
        timeout_s: float = TIMEOUT_S,
        cuda: Any = torch.cuda,
    ) -> None:
        self.device = torch.device(device)
        self._cuda = cuda
        self._timeout_s = timeout_s
        self.compute_stream = cuda.current_stream(self.device)
        self.link_stream = self.compute_stream if is_serial else cuda.Stream(self.device)
        self._pool: list[Any] = []  # events that nobody holds; making one costs as much as recording it
        self._ends: dict[Any, deque[CudaEvent]] = {}  # of the two last pieces of work, by stream
        self._pending: tuple[deque[_Span | CudaMark], deque[_Span | CudaMark]] = deque(), deque()  # compute, link
        self._compute_ns = self._link_ns = self._stall_ns = 0
        self._copied_bytes = self._num_copies = 0
        self.ops: list[TraceOp] | None = [] if trace else None
        self._origin = self._record(self.compute_stream, False, "origin")  # of the trace: this event and this host
        self._origin.end.synchronize()  # time are one moment
        self._origin_ns = time.perf_counter_ns()

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def compute(self, work: Work, run: Callable[[], T], after: Iterable[Event] = ()) -> tuple[T, CudaEvent]:
        """Issues `run` to the compute stream; what it costs is measured, not taken from `work`."""
        issued, start, waits_for_copy = self._begin(self.compute_stream, after)
        result = run()  # the compute stream is the current one
        return result, self._end("compute", work.name, self.compute_stream, issued, start, 0, waits_for_copy)

    def copy(self, num_bytes: int, run: Callable[[], None], after: Iterable[Event] = (), label: str = "") -> CudaEvent:
        """Issues one copy to the link stream. Payloads must be page-locked, or the host blocks meanwhile.

        Raises:
            SpecterError: the driver refuses the copy.
        """
        label, stream = label or "copy", self.link_stream
        issued, start, _ = self._begin(stream, after)
        self._cuda.set_stream(stream)
        try:
            run()
        except RuntimeError as error:
            raise _device_error(label, error) from None
        finally:
            self._cuda.set_stream(self.compute_stream)
        self._copied_bytes += num_bytes
        self._num_copies += 1
        return self._end("link", label, stream, issued, start, num_bytes, False)

    def wait(self, event: Event) -> None:
        """As in `Timeline`; the host spins, since a wake-up costs more than most waits.

        Raises:
            SpecterError: the event does not come, or the device reports an error.
        """
        self.wait_first((event,))

    def wait_first(self, events: Sequence[Event]) -> None:
        """Blocks the host until at least one of `events` has happened. Raises SpecterError as `wait`."""
        start = time.perf_counter_ns()
        limit = start + round(self._timeout_s * 1e9)
        while not any(self.is_done(event) for event in events):
            self._collect()  # while there is nothing else to do
            if time.perf_counter_ns() > limit:
                names = ", ".join(event.label for event in events if isinstance(event, CudaEvent))
                raise SpecterError(
                    f"the device did not finish {names} within {self._timeout_s:g} s",
                    "see the system's log for a driver error; the process must be started anew",
                )
        if self.ops is not None:
            end = time.perf_counter_ns()
            self.ops.append(TraceOp("host", "wait", start - self._origin_ns, end - self._origin_ns))

    def is_done(self, event: Event) -> bool:
        assert isinstance(event, CudaEvent)
        if not event.has_happened:
            try:
                event.has_happened = bool(event.end.query())
            except RuntimeError as error:  # a failed kernel or copy shows at the next question
                raise _device_error(event.label, error) from None
        return event.has_happened

    def elapsed_ns(self, start: Event, end: Event) -> int:
        assert isinstance(start, CudaEvent) and isinstance(end, CudaEvent)
        return round(float(start.end.elapsed_time(end.end)) * 1e6)

    def drain(self) -> None:
        self.compute_stream.synchronize()
        self.link_stream.synchronize()
        self.totals()

    def totals(self) -> LaneTotals:
        while self._collect():
            pass
        return LaneTotals(self._compute_ns, self._link_ns, self._stall_ns, self._copied_bytes, self._num_copies)

    def mark(self) -> CudaMark:
        mark = CudaMark(self._copied_bytes, self._num_copies)
        for lane in self._pending:
            lane.append(mark)
        return mark

    def totals_at(self, mark: Mark) -> LaneTotals:
        """As in `Timeline`. Raises SpecterError as `wait`."""
        assert isinstance(mark, CudaMark)
        while mark.num_lanes:
            if not self._collect():
                lane = self._pending[0 if mark in self._pending[0] else 1]
                assert isinstance(lane[0], _Span)
                self.wait(lane[0].end)
        return LaneTotals(mark.compute_ns, mark.link_ns, mark.stall_ns, mark.copied_bytes, mark.num_copies)

    # -- inside --------------------------------------------------------------------------------

    def _collect(self) -> bool:
        """Reads the times of one piece of work that has ended; False if there is none."""
        for is_link, lane in enumerate(self._pending):
            if not lane:
                continue
            if isinstance(first := lane[0], CudaMark):
                first.num_lanes -= 1
                if is_link:
                    first.link_ns = self._link_ns
                else:
                    first.compute_ns, first.stall_ns = self._compute_ns, self._stall_ns
            elif self.is_done(first.end):
                self._count(first)
            else:
                continue
            lane.popleft()
            return True
        return False

    def _count(self, span: _Span) -> None:
        busy_ns = self.elapsed_ns(span.start, span.end)
        stalled_ns = self.elapsed_ns(span.issued, span.start) if span.waits_for_copy else 0
        if span.lane == "link":
            self._link_ns += busy_ns
        else:
            self._compute_ns += busy_ns
            self._stall_ns += stalled_ns
        if self.ops is not None:
            start_ns = self.elapsed_ns(self._origin, span.start)
            self.ops.append(
                TraceOp(span.lane, span.label, start_ns, start_ns + busy_ns, span.num_bytes, 0, stalled_ns)
            )  # fmt: skip

    def _begin(self, stream: Any, after: Iterable[Event]) -> tuple[CudaEvent, CudaEvent, bool]:
        """Makes `stream` wait; returns events before and after that, and whether it waits for a copy.

        Where the stream is at work on the last piece but one, the last one's end is the first of them, since a question
        costs less than an event. It hardly ever comes before this piece is issued; then a host gap counts as busy.
        """
        ends = self._ends.setdefault(stream, deque(maxlen=2))
        is_far_behind = len(ends) == 2 and not self.is_done(ends[0])
        issued = start = ends[1] if is_far_behind else self._record(stream, False, "issue")
        is_waiting = waits_for_copy = False
        for event in after:
            if self.is_done(event):
                continue
            assert isinstance(event, CudaEvent)
            stream.wait_event(event.end)
            waits_for_copy |= event.is_copy
            is_waiting = True
        if is_waiting:
            start = self._record(stream, False, "start")
        return issued, start, waits_for_copy

    def _end(
        self,
        lane: Lane,
        label: str,
        stream: Any,
        issued: CudaEvent,
        start: CudaEvent,
        num_bytes: int,
        waits_for_copy: bool,
    ) -> CudaEvent:
        end = self._record(stream, lane == "link", label)
        self._ends[stream].append(end)
        pending = self._pending[lane == "link"]
        before = pending[-1] if pending and self.ops is None else None
        if isinstance(before, _Span) and before.end is start:
            before.end = end
        else:
            pending.append(_Span(lane, label, issued, start, end, num_bytes, waits_for_copy))
        return end

    def _record(self, stream: Any, is_copy: bool, label: str) -> CudaEvent:
        event = self._pool.pop() if self._pool else self._cuda.Event(enable_timing=True)
        event.record(stream)
        return CudaEvent(event, is_copy, label, self._pool)


def _device_error(label: str, error: RuntimeError) -> SpecterError:
    return SpecterError(
        f"the device failed at or before {label}: {str(error).splitlines()[0]}",
        "records of finished inputs are kept; start the process anew",
    )
