"""Moves payloads from the store into slots over the link lane. Mechanism only: told what goes where."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from specter.experts.residency import Slot
from specter.models.spec import ExpertId
from specter.timeline.base import Event, Timeline

Mover = Callable[[ExpertId, int], None]  # copies an expert's payload into the slot with this index


def move_nothing(expert: ExpertId, slot: int) -> None:
    """The mover of a replay, which has no payloads."""


SendBack = Callable[[int], None]  # copies the payload of the slot with this index to the host


def keep_nothing(slot: int) -> None:
    """The way back on the virtual clock, which charges bytes without moving them."""


def open_nothing(num_buffers: int) -> SendBack:
    """What opens that way."""
    return keep_nothing


class Transfer:
    """One-way copies, host to device; store copies are never written back."""

    def __init__(self, timeline: Timeline, payload_bytes: int, mover: Mover) -> None:
        self.payload_bytes = payload_bytes  # as charged on the link
        self._timeline = timeline
        self._mover = mover

    def load(self, expert: ExpertId, slot: Slot, is_prefetch: bool, after: Iterable[Event] = ()) -> Event:
        """Issues the copy behind `after` and the last compute that reads the slot's old content."""
        if slot.last_use is not None:
            after = (*after, slot.last_use)
        label = f"{'prefetch' if is_prefetch else 'fetch'} L{expert.layer} E{expert.expert}"
        return self._timeline.copy(
            self.payload_bytes, lambda: self._mover(expert, slot.index), after=after, label=label
        )

    def place(self, expert: ExpertId, slot: Slot) -> None:
        """Fills a slot outside the timeline, when a run's starting state is set up."""
        self._mover(expert, slot.index)
