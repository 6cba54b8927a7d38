"""The virtual clock: runs the numerics at once and charges their time by a roofline (docs/decisions/0001).

Host, compute lane and link lane have a clock each, in whole nanoseconds. Work on a lane starts as soon as the host has
issued it, the lane is free and everything in `after` has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specter.timeline.base import Clock, Event, LaneTotals, Mark, T, Work
from specter.timeline.hardware import Hardware
from specter.timeline.trace import TraceOp


@dataclass(slots=True)  # not frozen: a replay makes a million of them, and freezing triples their cost
class VirtualEvent:
    """The end of one piece of work on the virtual clock."""

    end_ns: int
    is_copy: bool

    def __deepcopy__(self, memo: object) -> VirtualEvent:
        return self  # never modified


class VirtualTimeline:
    """A `Timeline` that charges instead of measuring; the same calls give the same nanoseconds.

    Args:
        hardware: the machine charged for.
        trace: keep every operation in `ops`, for `trace.write_chrome_trace`.
    """

    clock: Clock = "virtual"

    def __init__(self, hardware: Hardware, trace: bool = False) -> None:
        self.hardware = hardware
        self.ops: list[TraceOp] | None = [] if trace else None
        self._host_ns = 0
        self._compute_free_ns = 0
        self._link_free_ns = 0
        self._compute_busy_ns = 0
        self._link_busy_ns = 0
        self._stall_ns = 0
        self._copied_bytes = 0
        self._num_copies = 0
        self._work_ns: dict[Work, tuple[int, int]] = {}  # charges of the host and of the lane
        self._copy_ns: dict[int, int] = {}  # by bytes

    def now_ns(self) -> int:
        return self._host_ns

    def compute(self, work: Work, run: Callable[[], T], after: Iterable[Event] = ()) -> tuple[T, VirtualEvent]:
        """Charges `work` behind `after` and runs `run` now.

        Stall is the wait that copies alone cause: start minus the latest of host, lane and other `after` events.
        """
        charged = self._work_ns.get(work)
        if charged is None:
            hardware = self.hardware
            charged = self._work_ns[work] = hardware.host_ns(work), hardware.compute_ns(work)
        launch, duration = charged
        issued = self._host_ns
        self._host_ns = host = issued + launch
        ready = self._compute_free_ns
        if host > ready:
            ready = host
        arrived = 0
        for event in after:
            assert isinstance(event, VirtualEvent)
            end = event.end_ns
            if event.is_copy:
                if end > arrived:
                    arrived = end
            elif end > ready:
                ready = end
        stall = arrived - ready if arrived > ready else 0
        start = ready + stall
        end = start + duration
        self._compute_free_ns = end
        self._compute_busy_ns += duration
        self._stall_ns += stall
        if self.ops is not None:
            self.ops.append(TraceOp("host", f"launch {work.name}", issued, host))
            self.ops.append(TraceOp("compute", work.name, start, end, work.hbm_bytes, work.flops, stall))
        return run(), VirtualEvent(end, is_copy=False)

    def decode(self, work: Work, run: Callable[[], T], after: Iterable[Event] = ()) -> tuple[T, VirtualEvent]:
        """Charges `work` on the compute lane: it takes the device from compute."""
        return self.compute(work, run, after)

    def copy(
        self, num_bytes: int, run: Callable[[], None], after: Iterable[Event] = (), label: str = ""
    ) -> VirtualEvent:
        """Charges one host-to-device copy behind `after` and runs `run` now."""
        issued = self._host_ns
        self._host_ns = start = issued + self.hardware.launch_ns
        if self._link_free_ns > start:
            start = self._link_free_ns
        for event in after:
            assert isinstance(event, VirtualEvent)
            if event.end_ns > start:
                start = event.end_ns
        duration = self._copy_ns.get(num_bytes)
        if duration is None:
            duration = self._copy_ns[num_bytes] = self.hardware.copy_ns(num_bytes)
        end = start + duration
        self._link_free_ns = end
        self._link_busy_ns += duration
        self._copied_bytes += num_bytes
        self._num_copies += 1
        if self.ops is not None:
            self.ops.append(TraceOp("host", f"launch {label or 'copy'}", issued, self._host_ns))
            self.ops.append(TraceOp("link", label or "copy", start, end, num_bytes))
        run()
        return VirtualEvent(end, is_copy=True)

    def wait(self, event: Event) -> None:
        assert isinstance(event, VirtualEvent)
        issued = self._host_ns
        self._host_ns = max(issued, event.end_ns) + self.hardware.sync_ns
        if self.ops is not None:
            self.ops.append(TraceOp("host", "wait", issued, self._host_ns))

    def wait_first(self, events: Sequence[Event]) -> None:
        """Moves the host to the earliest end. Polling is free; `wait` charges the read of a result."""
        issued = self._host_ns
        earliest = min(event.end_ns for event in events if isinstance(event, VirtualEvent))
        if earliest > issued:
            self._host_ns = earliest
            if self.ops is not None:
                self.ops.append(TraceOp("host", "wait first", issued, earliest))

    def is_done(self, event: Event) -> bool:
        assert isinstance(event, VirtualEvent)
        return event.end_ns <= self._host_ns

    def elapsed_ns(self, start: Event, end: Event) -> int:
        """See `Timeline`; raises RuntimeError, as a device does, if either has not happened at the host's time."""
        assert isinstance(start, VirtualEvent) and isinstance(end, VirtualEvent)
        if max(start.end_ns, end.end_ns) > self._host_ns:
            raise RuntimeError("elapsed_ns of an event that the host has not waited for")
        return end.end_ns - start.end_ns

    def drain(self) -> None:
        self._host_ns = max(self._host_ns, self._compute_free_ns, self._link_free_ns)

    def totals(self) -> LaneTotals:
        return LaneTotals(
            self._compute_busy_ns, self._link_busy_ns, self._stall_ns, self._copied_bytes, self._num_copies
        )

    mark = totals

    def totals_at(self, mark: Mark) -> LaneTotals:
        assert isinstance(mark, LaneTotals)
        return mark
