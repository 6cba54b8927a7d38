"""Moves payloads between the store and the slots, over the link lane. Mechanism only: no policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specter.experts.residency import Slot
from specter.models.spec import ExpertId
from specter.registry import Registry
from specter.timeline.base import Event, Timeline

Mover = Callable[[ExpertId, int], None]  # copies an expert's payload into the slot with this index
SendBack = Callable[[int], None]  # copies the payload of the slot with this index to the host


def move_nothing(expert: ExpertId, slot: int) -> None:
    """The mover of a replay, which has no payloads."""


def open_nothing(num_buffers: int) -> SendBack:
    """The write-back of the virtual clock, which charges bytes without moving them."""
    return lambda slot: None


@dataclass(frozen=True, slots=True)
class Backend:
    """Where a run executes: its clock, and the copies behind it.

    move: copies payloads into slots · open_write_back: makes the copies back to the host, given a number of host
    buffers of one expert each; only a transfer that writes back calls it.
    """

    timeline: Timeline
    move: Mover = move_nothing
    open_write_back: Callable[[int], SendBack] = open_nothing


class Transfer:
    """One-way copies, host to device; store copies are never written back.

    Attributes:
        timeline: the one to issue all other work on.
    """

    def __init__(self, backend: Backend, num_bytes: Callable[[ExpertId], int], num_buffers: int = 0) -> None:
        """
        Args:
            num_bytes: returns the bytes of an expert's copy.
            num_buffers: spare device buffers of the system, of one expert each.
        """
        self.num_bytes = num_bytes
        self.timeline = backend.timeline
        self._move = backend.move

    def load(self, expert: ExpertId, slot: Slot, is_prefetch: bool, after: Iterable[Event] = ()) -> Event:
        """Issues the copy behind `after` and the last compute that reads the slot's old content."""
        if slot.last_use is not None:
            after = (*after, slot.last_use)
        label = f"{'prefetch' if is_prefetch else 'fetch'} L{expert.layer} E{expert.expert}"
        num_bytes = self.num_bytes(expert)
        return self.timeline.copy(num_bytes, lambda: self._move(expert, slot.index), after=after, label=label)

    def place(self, expert: ExpertId, slot: Slot) -> None:
        """Fills a slot outside the timeline, to set up a run's starting state."""
        self._move(expert, slot.index)


TRANSFERS: Registry[type[Transfer]] = Registry("system.transfer")
TRANSFERS.register("copy_stream")(Transfer)
