"""The two lanes that the engine issues work on, and what a clock must answer about them.

One engine, two clocks. A `Timeline` has a host (which issues and sometimes waits), a compute lane and a
link lane (host memory to device memory). Work on a lane runs in issue order; `after` adds cross-lane waits.
`virtual` runs the numerics at once and charges time by a roofline; `cuda` issues to streams and measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from specter.timeline.trace import TraceOp

T = TypeVar("T")
Clock = Literal["virtual", "device"]


class Event(Protocol):
    """The end of one piece of issued work."""


class Mark(Protocol):
    """A point in the order of issue, for `Timeline.totals_at`."""

    @property
    def copied_bytes(self) -> int:
        """Of the copies issued before it."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What one piece of compute costs on the machine that it stands for. Itself, not its numbers, is a key: a clock
    looks up by it what it charges.

    hbm_bytes: bytes read and written in device memory · flops: floating-point operations ·
    kernels: device kernels in it · launches: host launches (a captured graph is one launch of many kernels).
    """

    name: str
    hbm_bytes: int
    flops: int
    kernels: int
    launches: int


@dataclass(frozen=True, slots=True)
class LaneTotals:
    """Running totals since the timeline began, ns. Subtract two snapshots for a window."""

    compute_busy_ns: int = 0
    link_busy_ns: int = 0
    stall_ns: int = 0  # compute lane idle only because a copy had not arrived
    copied_bytes: int = 0
    num_copies: int = 0

    def minus(self, earlier: LaneTotals) -> LaneTotals:
        return LaneTotals(
            self.compute_busy_ns - earlier.compute_busy_ns,
            self.link_busy_ns - earlier.link_busy_ns,
            self.stall_ns - earlier.stall_ns,
            self.copied_bytes - earlier.copied_bytes,
            self.num_copies - earlier.num_copies,
        )


class Timeline(Protocol):
    clock: Clock
    ops: list[TraceOp] | None  # what ran when, if the timeline was asked to trace

    def now_ns(self) -> int:
        """The host's time."""

    def compute(self, work: Work, run: Callable[[], T], after: Iterable[Event] = ()) -> tuple[T, Event]:
        """Issues `run` on the compute lane behind `after`; returns its result and its end."""

    def copy(self, num_bytes: int, run: Callable[[], None], after: Iterable[Event] = (), label: str = "") -> Event:
        """Issues one host-to-device copy on the link lane behind `after`."""

    def wait(self, event: Event) -> None:
        """Blocks the host until `event` (a device-to-host read of a result costs one sync)."""

    def wait_first(self, events: Sequence[Event]) -> None:
        """Blocks the host until at least one of `events` (not none of them) has happened."""

    def is_done(self, event: Event) -> bool:
        """Whether `event` has happened at the host's time."""

    def elapsed_ns(self, start: Event, end: Event) -> int:
        """Time between the ends of two events; the host must have waited for both."""

    def drain(self) -> None:
        """Blocks the host until both lanes are empty."""

    def totals(self) -> LaneTotals:
        """Totals so far."""

    def mark(self) -> Mark:
        """Now, in the order of issue; costs next to nothing, so that totals can be asked for at leisure."""

    def totals_at(self, mark: Mark) -> LaneTotals:
        """Totals of what was issued before `mark`; blocks the host until that has ended."""
