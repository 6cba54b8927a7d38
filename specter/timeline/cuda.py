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
from specter.timeline.base import Clock, Event, LaneTotals, T, Work
from specter.timeline.trace import Lane, TraceOp

# Longer than any pass: the whole store crosses PCIe 3.0 in 3 s.
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class CudaEvent:
    """The end of one piece of work on a stream."""

    end: Any  # torch.cuda.Event, with timing
    is_copy: bool
    label: str


@dataclass(frozen=True, slots=True)
class _Span:
    """One piece of work whose times have not been read yet."""

    lane: Lane
    label: str
    issued: Any  # before the waits for other lanes
    start: Any  # after them
    end: Any
    num_bytes: int  # of a copy; 0: compute
    waits_for_copy: bool


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
        self._on_link = cuda.stream(self.link_stream)  # entering it again is cheaper than making it
        self._pending: tuple[deque[_Span], deque[_Span]] = deque(), deque()  # compute, link; each ends in order
        self._compute_ns = self._link_ns = self._stall_ns = 0
        self._copied_bytes = self._num_copies = 0
        self.ops: list[TraceOp] | None = [] if trace else None
        self._origin = self._event()  # of the trace: this event and this host time are one moment
        if trace:
            self._origin.record(self.compute_stream)
            self._origin.synchronize()
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
        label = label or "copy"
        issued, start, _ = self._begin(self.link_stream, after)
        try:
            with self._on_link:
                run()
        except RuntimeError as error:
            raise _device_error(label, error) from None
        self._copied_bytes += num_bytes
        self._num_copies += 1
        return self._end("link", label, self.link_stream, issued, start, num_bytes, False)

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
        try:
            return bool(event.end.query())
        except RuntimeError as error:  # a failed kernel or copy shows at the next question
            raise _device_error(event.label, error) from None

    def elapsed_ns(self, start: Event, end: Event) -> int:
        assert isinstance(start, CudaEvent) and isinstance(end, CudaEvent)
        return _ns(start.end, end.end)

    def drain(self) -> None:
        self.compute_stream.synchronize()
        self.link_stream.synchronize()
        self.totals()

    def totals(self) -> LaneTotals:
        while self._collect():
            pass
        return LaneTotals(self._compute_ns, self._link_ns, self._stall_ns, self._copied_bytes, self._num_copies)

    # -- inside --------------------------------------------------------------------------------

    def _collect(self) -> bool:
        """Reads the times of one piece of work that has ended; False if there is none."""
        for lane in self._pending:
            if lane and lane[0].end.query():
                self._count(lane.popleft())
                return True
        return False

    def _count(self, span: _Span) -> None:
        busy_ns = _ns(span.start, span.end)
        stalled_ns = _ns(span.issued, span.start) if span.waits_for_copy else 0
        if span.lane == "link":
            self._link_ns += busy_ns
        else:
            self._compute_ns += busy_ns
            self._stall_ns += stalled_ns
        if self.ops is not None:
            start_ns = _ns(self._origin, span.start)
            self.ops.append(
                TraceOp(span.lane, span.label, start_ns, start_ns + busy_ns, span.num_bytes, 0, stalled_ns)
            )  # fmt: skip

    def _begin(self, stream: Any, after: Iterable[Event]) -> tuple[Any, Any, bool]:
        """Makes `stream` wait; returns events before and after that, and whether it waits for a copy."""
        issued = start = self._event()
        issued.record(stream)
        waits_for_copy = False
        for event in after:
            assert isinstance(event, CudaEvent)
            stream.wait_event(event.end)
            waits_for_copy |= event.is_copy
            start = None
        if start is None:
            start = self._event()
            start.record(stream)
        return issued, start, waits_for_copy

    def _end(
        self, lane: Lane, label: str, stream: Any, issued: Any, start: Any, num_bytes: int, waits_for_copy: bool
    ) -> CudaEvent:
        end = self._event()
        end.record(stream)
        self._pending[lane == "link"].append(_Span(lane, label, issued, start, end, num_bytes, waits_for_copy))
        return CudaEvent(end, lane == "link", label)

    def _event(self) -> Any:
        return self._cuda.Event(enable_timing=True)


def _device_error(label: str, error: RuntimeError) -> SpecterError:
    return SpecterError(
        f"the device failed at or before {label}: {str(error).splitlines()[0]}",
        "records of finished inputs are kept; start the process anew",
    )


def _ns(start: Any, end: Any) -> int:
    return round(start.elapsed_time(end) * 1e6)
