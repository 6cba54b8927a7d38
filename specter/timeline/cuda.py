"""The device clock: issues work to two CUDA streams and measures it with events.

The compute lane is the stream that is current when the timeline is made; the link lane is another stream.
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
    """The end of one piece of work on a stream, or another point of it.

    When this is collected, the driver's event returns to `pool`: a wait on the device is fixed when it is issued.
    """

    end: Any  # torch.cuda.Event, with timing
    is_copy: bool  # or decodes one: a wait for it is a stall
    label: str
    pool: list[Any]
    has_happened: bool = False  # as of the host's last query

    def __del__(self) -> None:
        self.pool.append(self.end)


@dataclass(slots=True)
class _Span:
    """Work whose times are not read yet: one piece, or several without a gap between them."""

    lane: Lane
    label: str
    issued: CudaEvent  # before the waits for other lanes
    start: CudaEvent  # after them
    end: CudaEvent
    num_bytes: int  # of a copy; 0: compute
    waits_for_copy: bool


@dataclass(slots=True, eq=False)
class CudaMark:
    """A point in both lanes, after the work issued so far; holds the totals up to it."""

    copied_bytes: int
    num_copies: int
    compute_ns: int = 0
    decode_ns: int = 0
    stall_ns: int = 0
    link_ns: int = 0
    num_lanes: int = 3  # lanes that have not reached it


class CudaTimeline:
    """A `Timeline` that measures. Not thread-safe; `totals` counts the work that has ended, decoding as compute: where
    both run at once, both count.

    The stall of a compute is its lane's idle time between `issued` and `start`, if a copy is among its `after`.

    Args:
        trace: record every piece of work in `ops`; `totals` and `drain` add the work that has ended.
        is_serial: one stream for both lanes, so nothing overlaps.
        timeout_s: longest wait of the host for an event.
        cuda: the framework's CUDA module, or a fake in tests.
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
        self.link_stream, self.decode_stream = (
            self.compute_stream if is_serial else cuda.Stream(self.device) for _ in range(2)
        )
        self._pool: list[Any] = []  # free events; making one costs as much as recording it
        self._ends: dict[Any, deque[CudaEvent]] = {}  # of the last two pieces of work, by stream
        self._pending: dict[Lane, deque[_Span | CudaMark]] = {"compute": deque(), "decode": deque(), "link": deque()}
        self._compute_ns = self._decode_ns = self._link_ns = self._stall_ns = 0
        self._copied_bytes = self._num_copies = 0
        self.ops: list[TraceOp] | None = [] if trace else None
        self._origin = self._record(self.compute_stream, "origin")  # of the trace: an event and a host time
        self._origin.end.synchronize()
        self._origin_ns = time.perf_counter_ns()

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def compute(self, work: Work, run: Callable[[], T], after: Iterable[Event] = ()) -> tuple[T, CudaEvent]:
        """Issues `run` to the compute stream; its cost is measured, not taken from `work`."""
        span = self._begin("compute", work.name, self.compute_stream, after)
        result = run()  # the compute stream is the current one
        return result, self._end(span, self.compute_stream)

    def decode(self, work: Work, run: Callable[[], T], after: Iterable[Event] = ()) -> tuple[T, CudaEvent]:
        """Issues `run` to the decode stream, which runs beside compute and link."""
        span = self._begin("decode", work.name, self.decode_stream, after)
        self._cuda.set_stream(self.decode_stream)
        try:
            result = run()
        finally:
            self._cuda.set_stream(self.compute_stream)
        return result, self._end(span, self.decode_stream)

    def copy(self, num_bytes: int, run: Callable[[], None], after: Iterable[Event] = (), label: str = "") -> CudaEvent:
        """Issues one copy to the link stream. Unless payloads are page-locked, the host blocks during the copy.

        Raises:
            SpecterError: the driver refuses the copy.
        """
        label, stream = label or "copy", self.link_stream
        span = self._begin("link", label, stream, after, num_bytes)
        self._cuda.set_stream(stream)
        try:
            run()
        except RuntimeError as error:
            raise _device_error(label, error) from None
        finally:
            self._cuda.set_stream(self.compute_stream)
        self._copied_bytes += num_bytes
        self._num_copies += 1
        return self._end(span, stream)

    def wait(self, event: Event) -> None:
        self.wait_first((event,))

    def wait_first(self, events: Sequence[Event]) -> None:
        """As in `Timeline`; the host spins, since a wake-up takes longer than most waits.

        Raises:
            SpecterError: no event happens in time, or the device reports an error.
        """
        start = time.perf_counter_ns()
        limit = start + round(self._timeout_s * 1e9)
        while not any(self.is_done(event) for event in events):
            self._collect()
            if time.perf_counter_ns() > limit:
                names = ", ".join(event.label for event in events if isinstance(event, CudaEvent))
                raise SpecterError(
                    f"the device did not finish {names} within {self._timeout_s:g} s",
                    "see the system's log for a driver error, and restart the process",
                )
        if self.ops is not None:
            end = time.perf_counter_ns()
            self.ops.append(TraceOp("host", "wait", start - self._origin_ns, end - self._origin_ns))

    def is_done(self, event: Event) -> bool:
        assert isinstance(event, CudaEvent)
        if not event.has_happened:
            try:
                event.has_happened = bool(event.end.query())
            except RuntimeError as error:  # of any earlier kernel or copy
                raise _device_error(event.label, error) from None
        return event.has_happened

    def elapsed_ns(self, start: Event, end: Event) -> int:
        assert isinstance(start, CudaEvent) and isinstance(end, CudaEvent)
        return round(float(start.end.elapsed_time(end.end)) * 1e6)

    def drain(self) -> None:
        for stream in (self.compute_stream, self.decode_stream, self.link_stream):
            stream.synchronize()
        self.totals()

    def totals(self) -> LaneTotals:
        while self._collect():
            pass
        return LaneTotals(
            self._compute_ns + self._decode_ns, self._link_ns, self._stall_ns, self._copied_bytes, self._num_copies
        )

    def mark(self) -> CudaMark:
        if self._cuda.current_stream(self.device) != self.compute_stream:  # its events would not see the work issued
            raise RuntimeError("the current stream is not the one that this timeline was made on")
        mark = CudaMark(self._copied_bytes, self._num_copies)
        for lane in self._pending.values():
            lane.append(mark)
        return mark

    def totals_at(self, mark: Mark) -> LaneTotals:
        """As in `Timeline`. Raises SpecterError as `wait_first`."""
        assert isinstance(mark, CudaMark)
        while mark.num_lanes:
            if not self._collect():
                lane = next(lane for lane in self._pending.values() if mark in lane)
                assert isinstance(lane[0], _Span)
                self.wait(lane[0].end)
        busy_ns = mark.compute_ns + mark.decode_ns
        return LaneTotals(busy_ns, mark.link_ns, mark.stall_ns, mark.copied_bytes, mark.num_copies)

    # -- inside --------------------------------------------------------------------------------

    def _collect(self) -> bool:
        """Reads the times of one piece of ended work; False if there is none."""
        for name, lane in self._pending.items():
            if not lane:
                continue
            if isinstance(first := lane[0], CudaMark):
                first.num_lanes -= 1
                if name == "link":
                    first.link_ns = self._link_ns
                elif name == "decode":
                    first.decode_ns = self._decode_ns
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
        elif span.lane == "decode":
            self._decode_ns += busy_ns
        else:
            self._compute_ns += busy_ns
            self._stall_ns += stalled_ns
        if self.ops is not None:
            start_ns = self.elapsed_ns(self._origin, span.start)
            self.ops.append(
                TraceOp(span.lane, span.label, start_ns, start_ns + busy_ns, span.num_bytes, 0, stalled_ns)
            )  # fmt: skip

    def _begin(self, lane: Lane, label: str, stream: Any, after: Iterable[Event], num_bytes: int = 0) -> _Span:
        """Makes `stream` wait for `after`; returns the work that starts after the wait.

        If the stream has not finished its last piece but one, the end of the last piece serves as the event before the
        wait: a query costs less than an event. Rarely, that end comes before this piece is issued, and the host's gap
        counts as busy.
        """
        ends = self._ends.setdefault(stream, deque(maxlen=2))
        is_far_behind = len(ends) == 2 and not self.is_done(ends[0])
        issued = start = ends[1] if is_far_behind else self._record(stream, "issue")
        is_waiting = waits_for_copy = False
        for event in after:
            if self.is_done(event):
                continue
            assert isinstance(event, CudaEvent)
            stream.wait_event(event.end)
            waits_for_copy |= event.is_copy
            is_waiting = True
        if is_waiting:
            start = self._record(stream, "start")
        return _Span(lane, label, issued, start, start, num_bytes, waits_for_copy and lane != "link")

    def _end(self, span: _Span, stream: Any) -> CudaEvent:
        """Records the end of the work, and queues it for its times; work without a gap before it joins the last."""
        is_copy = span.lane == "link" or (span.lane == "decode" and span.waits_for_copy)
        end = span.end = self._record(stream, span.label, is_copy=is_copy)
        self._ends[stream].append(end)
        pending = self._pending[span.lane]
        before = pending[-1] if pending and self.ops is None else None
        if isinstance(before, _Span) and before.end is span.start:
            before.end = end
        else:
            pending.append(span)
        return end

    def _record(self, stream: Any, label: str, *, is_copy: bool = False) -> CudaEvent:
        event = self._pool.pop() if self._pool else self._cuda.Event(enable_timing=True)
        event.record(stream)
        return CudaEvent(event, is_copy, label, self._pool)


def _device_error(label: str, error: RuntimeError) -> SpecterError:
    return SpecterError(
        f"the device failed at or before {label}: {str(error).splitlines()[0]}",
        "records of finished inputs are kept; restart the process",
    )
