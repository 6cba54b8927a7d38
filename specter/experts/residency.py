"""Which expert is in which slot, and whether it may be displaced. Pure bookkeeping: no tensors, no time.

States of an expert: ABSENT (no slot), LOADING (a slot, its copy not known to have ended), RESIDENT. A pinned slot is
about to be read, or being filled by a fetch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from specter.models.spec import ExpertId
from specter.timeline.base import Event


class State(Enum):
    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(slots=True)
class Slot:
    """One device buffer for one expert."""

    index: int
    expert: ExpertId | None = None
    state: State = State.ABSENT
    pins: int = 0
    generation: int = 0  # experts that the slot has received since the cache was cleared
    ready: Event | None = None  # end of the copy that fills it
    last_use: Event | None = None  # end of the last compute that read it
    is_prefetch: bool = False  # filled before need and not used since
    is_late: bool = False  # a barrier waited for its copy

    def __deepcopy__(self, memo: object) -> Slot:
        return replace(self)  # its fields are immutable


class Residency:
    """The slots of one pool and the experts in them.

    Invariants (property-tested): an expert has at most one slot; a slot has at most one expert; a pinned slot
    is never displaced; free slots hold nothing.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.clear()

    def clear(self) -> None:
        """Frees every slot, whatever its state."""
        self.slots = [Slot(index) for index in range(self._num_slots)]
        self._free = self.slots[::-1]  # taken from the end: slot 0 first
        self._slot_of: dict[ExpertId, Slot] = {}

    def find(self, expert: ExpertId) -> Slot | None:
        """The expert's slot, loading or resident; None if absent."""
        return self._slot_of.get(expert)

    def state(self, expert: ExpertId) -> State:
        slot = self._slot_of.get(expert)
        return slot.state if slot else State.ABSENT

    @property
    def num_free(self) -> int:
        return len(self._free)

    def experts(self) -> Iterator[ExpertId]:
        return iter(self._slot_of)

    def begin_load(self, expert: ExpertId) -> Slot:
        """Takes a free slot for `expert`. The caller attaches the copy's event."""
        if expert in self._slot_of:
            raise ValueError(f"{expert} already has slot {self._slot_of[expert].index}")
        slot = self._free.pop()
        slot.expert, slot.state = expert, State.LOADING
        slot.generation += 1
        self._slot_of[expert] = slot
        return slot

    def end_load(self, slot: Slot) -> None:
        slot.state = State.RESIDENT

    def pin(self, slot: Slot) -> None:
        slot.pins += 1

    def end_use(self, slot: Slot) -> None:
        """Unpins after use; the slot is resident from here on. Raises ValueError if it is not pinned."""
        if slot.pins == 0:
            raise ValueError(f"slot {slot.index} is not pinned")
        slot.pins -= 1
        slot.state = State.RESIDENT

    def evict(self, expert: ExpertId) -> None:
        """Frees the expert's slot. Raises ValueError if it is absent or pinned."""
        slot = self._slot_of.get(expert)
        if slot is None or slot.pins:
            raise ValueError(f"{expert} is {'absent' if slot is None else 'pinned'} and cannot be evicted")
        del self._slot_of[expert]
        slot.expert, slot.state, slot.is_prefetch, slot.is_late = None, State.ABSENT, False, False
        self._free.append(slot)
