"""The device clock: issues work to two CUDA streams and measures it with events.

The compute lane is the stream that was current when the timeline began, the link lane a stream of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from specter.timeline.base import Clock, Event, LaneTotals, T, Work
from specter.timeline.trace import TraceOp


@dataclass(frozen=True, slots=True)
class CudaEvent:
    """The end of one piece of work on a stream."""

    end: Any  # torch.cuda.Event, with timing
    is_copy: bool


@dataclass(frozen=True, slots=True)
class _Span:
    """One piece of work whose times have not been read yet."""

    issued: Any  # before the waits for other lanes
    start: Any  # after them
    end: Any
    num_bytes: int  # of a copy; 0: compute
    waits_for_copy: bool


class CudaTimeline:
    """A `Timeline` that measures. Not thread-safe; `totals` reads what has ended so far.

    A compute's stall is the time that its lane stood between `issued` and `start` with a copy among its `after`.

    Args:
        cuda: the framework's CUDA module; tests put a fake in its place.
    """

    clock: Clock = "device"

    def __init__(self, device: torch.device | str = "cuda", cuda: Any = torch.cuda) -> None:
        self.device = torch.device(device)
        self.ops: list[TraceOp] | None = None  # the device's own profiler traces better
        self._cuda = cuda
        self.compute_stream = cuda.current_stream(self.device)
        self.link_stream = cuda.Stream(self.device)
        self._pending: deque[_Span] = deque()
        self._compute_ns = 0
        self._link_ns = 0
        self._stall_ns = 0
        self._copied_bytes = 0
        self._num_copies = 0

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def compute(self, work: Work, run: Callable[[], T], after: Iterable[Event] = ()) -> tuple[T, CudaEvent]:
        """Issues `run` to the compute stream; what it costs is measured, not taken from `work`."""
        return self._issue(self.compute_stream, run, after, 0)

    def copy(self, num_bytes: int, run: Callable[[], None], after: Iterable[Event] = (), label: str = "") -> CudaEvent:
        """Issues one copy to the link stream. Payloads must be page-locked, or the host blocks meanwhile."""
        _, event = self._issue(self.link_stream, run, after, num_bytes)
        self._copied_bytes += num_bytes
        self._num_copies += 1
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.end.synchronize()

    def is_done(self, event: Event) -> bool:
        assert isinstance(event, CudaEvent)
        return bool(event.end.query())

    def elapsed_ns(self, start: Event, end: Event) -> int:
        assert isinstance(start, CudaEvent) and isinstance(end, CudaEvent)
        return _ns(start.end, end.end)

    def drain(self) -> None:
        self.compute_stream.synchronize()
        self.link_stream.synchronize()

    def totals(self) -> LaneTotals:
        waiting: deque[_Span] = deque()
        for span in self._pending:
            if not span.end.query():
                waiting.append(span)
            elif span.num_bytes:
                self._link_ns += _ns(span.start, span.end)
            else:
                self._compute_ns += _ns(span.start, span.end)
                if span.waits_for_copy:
                    self._stall_ns += _ns(span.issued, span.start)
        self._pending = waiting
        return LaneTotals(self._compute_ns, self._link_ns, self._stall_ns, self._copied_bytes, self._num_copies)

    def _issue(self, stream: Any, run: Callable[[], T], after: Iterable[Event], num_bytes: int) -> tuple[T, CudaEvent]:
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
        self._pending.append(_Span(issued, start, end, num_bytes, waits_for_copy))
        return result, CudaEvent(end, num_bytes > 0)

    def _event(self) -> Any:
        return self._cuda.Event(enable_timing=True)


def _ns(start: Any, end: Any) -> int:
    return round(start.elapsed_time(end) * 1e6)
