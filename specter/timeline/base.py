"""The clock of the engine: a host, and two lanes that it issues work to.

The host issues and sometimes waits. The compute lane and the link lane (host memory to device memory) run work in issue
order; `after` adds waits between the lanes. `virtual` runs the numerics at once and charges time by a roofline; `cuda`
issues to streams and measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from specter.timeline.trace import TraceOp

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Totals = TypeVar("Totals", bound="DataclassInstance")
Clock = Literal["virtual", "device"]


class Event(Protocol):
    """The end of one piece of issued work."""


class Mark(Protocol):
    """A point in the order of issue, for `Timeline.totals_at`."""

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies issued before it."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The cost of one piece of compute. Compared by identity, which a clock uses as a key of its charges.

    hbm_bytes: bytes read and written in device memory · flops: floating-point operations ·
    kernels: device kernels in it · launches: host launches (a captured graph is one launch of many kernels) ·
    int_ops: integer operations · waves: of experts.
    """

    name: str
    hbm_bytes: int
    flops: int
    kernels: int
    launches: int
    int_ops: int = 0
    waves: int = 0


@dataclass(frozen=True, slots=True)
class LaneTotals:
    """Running totals since the timeline began, ns; see `difference`."""

    compute_busy_ns: int = 0
    link_busy_ns: int = 0
    stall_ns: int = 0  # compute lane idle only because a copy had not arrived
    copied_bytes: int = 0
    num_copies: int = 0


def difference(later: Totals, earlier: Totals) -> Totals:
    """Field by field, of two snapshots of a dataclass of counts."""
    return type(later)(*(getattr(later, one.name) - getattr(earlier, one.name) for one in fields(later)))


class Timeline(Protocol):
    clock: Clock
    ops: list[TraceOp] | None  # spans on the lanes, if the timeline traces

    def now_ns(self) -> int:
        """The host's time."""

    def compute(self, work: Work, run: Callable[[], T], after: Iterable[Event] = ()) -> tuple[T, Event]:
        """Issues `run` on the compute lane behind `after`; returns its result and its end."""

    def decode(self, work: Work, run: Callable[[], T], after: Iterable[Event] = ()) -> tuple[T, Event]:
        """As `compute`, on a lane of its own where the clock has one."""

    def copy(self, num_bytes: int, run: Callable[[], None], after: Iterable[Event] = (), label: str = "") -> Event:
        """Issues one host-to-device copy on the link lane behind `after`."""

    def wait(self, event: Event) -> None:
        """Blocks the host until `event`; charged as one sync, the read of a result."""

    def wait_first(self, events: Sequence[Event]) -> None:
        """Blocks the host until at least one of `events`, which is not empty, has happened."""

    def is_done(self, event: Event) -> bool:
        """Whether `event` has happened at the host's time."""

    def elapsed_ns(self, start: Event, end: Event) -> int:
        """Time between the ends of two events; the host must have waited for both."""

    def drain(self) -> None:
        """Blocks the host until both lanes are empty."""

    def totals(self) -> LaneTotals:
        """Totals of all work issued so far."""

    def mark(self) -> Mark:
        """The current point in the order of issue. Cheap: `totals_at` computes the totals later."""

    def totals_at(self, mark: Mark) -> LaneTotals:
        """Totals of the work issued before `mark`; blocks the host until it has ended."""
