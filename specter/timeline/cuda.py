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
        self._pending: deque[_Span] = deque()
        self._totals = LaneTotals()
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
        return self._issue("compute", work.name, self.compute_stream, run, after, 0)

    def copy(self, num_bytes: int, run: Callable[[], None], after: Iterable[Event] = (), label: str = "") -> CudaEvent:
        """Issues one copy to the link stream. Payloads must be page-locked, or the host blocks meanwhile.

        Raises:
            SpecterError: the driver refuses the copy.
        """
        try:
            _, event = self._issue("link", label or "copy", self.link_stream, run, after, num_bytes)
        except RuntimeError as error:
            raise _device_error(label or "a copy", error) from None
        return event

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
        waiting: deque[_Span] = deque()
        compute_ns = link_ns = stall_ns = 0
        for span in self._pending:
            if not span.end.query():
                waiting.append(span)
                continue
            busy_ns = _ns(span.start, span.end)
            stalled_ns = _ns(span.issued, span.start) if span.waits_for_copy else 0
            if span.lane == "link":
                link_ns += busy_ns
            else:
                compute_ns += busy_ns
                stall_ns += stalled_ns
            if self.ops is not None:
                start_ns = _ns(self._origin, span.start)
                op = TraceOp(span.lane, span.label, start_ns, start_ns + busy_ns, span.num_bytes, 0, stalled_ns)
                self.ops.append(op)
        self._pending = waiting
        before = self._totals
        self._totals = LaneTotals(
            before.compute_busy_ns + compute_ns,
            before.link_busy_ns + link_ns,
            before.stall_ns + stall_ns,
            before.copied_bytes,
            before.num_copies,
        )
        return self._totals

    def _issue(
        self, lane: Lane, label: str, stream: Any, run: Callable[[], T], after: Iterable[Event], num_bytes: int
    ) -> tuple[T, CudaEvent]:
        issued, end = self._event(), self._event()
        issued.record(stream)
        start, waits_for_copy = issued, False
        for event in after:
            assert isinstance(event, CudaEvent)
            stream.wait_event(event.end)
            waits_for_copy |= event.is_copy
            start = None
        if start is None:
            start = self._event()
            start.record(stream)
        with self._cuda.stream(stream):
            result = run()
        end.record(stream)
        is_copy = lane == "link"
        self._pending.append(_Span(lane, label, issued, start, end, num_bytes, waits_for_copy and not is_copy))
        if is_copy:
            before = self._totals
            self._totals = LaneTotals(
                before.compute_busy_ns,
                before.link_busy_ns,
                before.stall_ns,
                before.copied_bytes + num_bytes,
                before.num_copies + 1,
            )
        return result, CudaEvent(end, is_copy, label)

    def _event(self) -> Any:
        return self._cuda.Event(enable_timing=True)


def _device_error(label: str, error: RuntimeError) -> SpecterError:
    return SpecterError(
        f"the device failed at or before {label}: {str(error).splitlines()[0]}",
        "records of finished inputs are kept; start the process anew",
    )


def _ns(start: Any, end: Any) -> int:
    return round(start.elapsed_time(end) * 1e6)
