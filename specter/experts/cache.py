"""The expert cache: residency, eviction and transfer put together, for verification and for prefetching.

Words: prefetch (before need), fetch (after); hit (resident when needed), late hit (loading), miss (absent). A layer's
experts are needed from its routing on, or from the planner's barrier on.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specter.experts.policies.base import Eviction, Plan
from specter.experts.queue import LoadQueue
from specter.experts.residency import Residency, Slot, State
from specter.experts.transfer import Transfer
from specter.models.spec import ExpertId
from specter.timeline.base import Event


@dataclass(slots=True)
class CacheCounters:
    """Running counts; see `timeline.base.difference`."""

    num_hits: int = 0
    num_late_hits: int = 0
    num_misses: int = 0
    num_prefetched: int = 0
    num_prefetched_used: int = 0
    prefetch_bytes: int = 0
    fetch_bytes: int = 0
    num_experts: int = 0  # distinct experts routed to, summed over layers and passes


@functools.cache
def _experts_of(layer: int, num_experts: int) -> list[ExpertId]:
    """A layer's experts: made once, since a pass names hundreds of them."""
    return [ExpertId(layer, expert) for expert in range(num_experts)]


@dataclass(slots=True)
class Wave:
    """Experts of one layer that can be computed together once `after` has happened."""

    slots: list[Slot]
    after: list[Event]

    @property
    def experts(self) -> list[int]:
        return [slot.expert.expert for slot in self.slots if slot.expert is not None]

    @property
    def indices(self) -> list[int]:
        return [slot.index for slot in self.slots]


class ExpertCache:
    """Slots of the device, filled by need and by plan, displaced by the eviction policy.

    Args:
        max_wave: the most experts of a wave; None: any number.
    """

    def __init__(
        self, residency: Residency, eviction: Eviction, transfer: Transfer, max_wave: int | None = None
    ) -> None:
        self.residency = residency
        self.counters = CacheCounters()
        self._max_wave = len(residency.slots) if max_wave is None else max_wave
        self._eviction = eviction
        self._transfer = transfer
        self._timeline = transfer.timeline
        self.queue = LoadQueue(transfer.timeline)
        # By the last plan, until its layer's verification [MoE layers, E]. Lists: they are read one by one.
        self._protected: list[list[bool]] = []

    # -- before need ---------------------------------------------------------------------------

    def is_present(self, expert: ExpertId) -> bool:
        """Whether the expert is resident or loading."""
        return self.residency.find(expert) is not None

    def present(self, num_layers: int, num_experts: int) -> NDArray[np.bool_]:
        """The experts that are resident or loading, [MoE layers, E]."""
        mask = np.zeros((num_layers, num_experts), np.bool_)
        for expert in self.residency.experts():
            mask[expert] = True
        return mask

    def submit(self, plan: Plan, known: Event) -> list[Event]:
        """Takes a plan in place of the last one; returns the copies issued now, those of a plan `at_once`.

        A load for which no slot can be freed is left out, and fetched when it is needed. Other plans wait for `feed`.

        Args:
            known: the event that made the plan possible.
        """
        self._protected = plan.protect.tolist()
        if not plan.at_once:
            self.queue.replace(plan.loads, known)
            return []
        copies = [event for expert in plan.loads if (event := self._prefetch(expert)) is not None]
        if copies:
            self.queue.open(known)
            self.queue.close()
        return copies

    def feed(self) -> Event | None:
        """Issues planned copies while few enough are under way and slots can be freed, at most a full link of them: a
        host that needs longer for a copy than the link does would never return.

        Returns:
            The event to wait for before the next call; None if nothing is planned or no slot can be freed.
        """
        queue, issued = self.queue, None
        if not queue.planned:
            queue.close()
            return None
        for _ in range(queue.depth):
            while queue.planned and self.is_present(queue.planned[0]):
                queue.planned.popleft()
            queue.close()
            if not queue.planned or not queue.has_room():
                break
            if (issued := self._prefetch(queue.planned[0])) is None:
                return None
            queue.planned.popleft()
        queue.close()
        return (queue.oldest() or issued) if queue.planned else None

    def note_barrier(self) -> None:
        """Verification waits for all copies under way: their experts count as late hits."""
        for slot in self.residency.slots:
            slot.is_late = slot.state is State.LOADING and not self._has_arrived(slot)

    # -- at need -------------------------------------------------------------------------------

    def waves(self, layer: int, counts: NDArray[np.int64], known: Event) -> Iterator[Wave]:
        """Yields every expert of the target's routing once: all hits together, then each arrival when its copy is due.

        Compute each wave and release it before the next one, since a miss may need its slots:

            for wave in cache.waves(layer, counts, known):
                _, done = timeline.compute(work, run_experts, after=wave.after)
                cache.release(wave, done)

        Misses are issued as slots allow, some at once and the others as waves are released; two slots are enough.
        Plans and protections of the layer end here.

        Args:
            counts: rows of the pass that chose each expert [E].
            known: the event of the routing.
        """
        experts = _experts_of(layer, len(counts))
        wanted = [experts[index] for index in counts.nonzero()[0].tolist()]
        if layer < len(self._protected):
            self._protected[layer] = [False] * len(counts)
        self.queue.drop_layer(layer)
        self._eviction.demand(layer, counts)
        self.counters.num_experts += len(wanted)
        hits, arriving, missing = self._sort(wanted)
        if missing:
            self.queue.open(known)
            self._fetch(missing, arriving, may_wait=True)
        for first in range(0, len(hits), self._max_wave):
            yield Wave(hits[first : first + self._max_wave], [])
        while missing or arriving:
            if missing:
                self._fetch(missing, arriving, may_wait=False)
                if not arriving:
                    self._make_room()
                    continue
            slots = [arriving.popleft()]
            while len(slots) < self._max_wave and arriving and all(map(self._has_arrived, (slots[-1], arriving[0]))):
                slots.append(arriving.popleft())  # the host is late: one launch for all that have arrived
            assert slots[0].ready is not None
            yield Wave(slots, [slots[0].ready])
        self.queue.close(known)

    def release(self, wave: Wave, done: Event) -> None:
        """Lets the slots of a wave be displaced behind its compute, which was issued and ends at `done`."""
        residency, eviction = self.residency, self._eviction
        for slot in wave.slots:
            expert = slot.expert
            assert expert is not None
            slot.last_use = done
            residency.end_use(slot)  # its compute is queued behind its copy
            if eviction.keeps:
                eviction.used(expert)
            else:
                residency.evict(expert)

    def begin_round(self) -> None:
        """A round, or prefill, begins."""
        self._eviction.begin_round()

    # -- starting state ------------------------------------------------------------------------

    def clear(self) -> None:
        """Empties the cache in whatever state an interrupted round has left it; both lanes must be idle."""
        self.residency.clear()
        self._eviction.clear()
        self.queue.clear()
        self._unprotect()

    def place(self, experts: Sequence[ExpertId]) -> None:
        """Empties the cache and fills it with `experts`, least recently used first, outside the timeline."""
        self.clear()
        for expert in experts:
            slot = self.residency.begin_load(expert)
            self._transfer.place(expert, slot)
            self.residency.end_load(slot)
            self._eviction.loaded(expert)
            self._eviction.used(expert)

    # -- inside --------------------------------------------------------------------------------

    def _sort(self, wanted: Sequence[ExpertId]) -> tuple[list[Slot], deque[Slot], deque[ExpertId]]:
        """Counts and splits needed experts: resident, loading (in order of need) and absent; pins those with slots."""
        hits: list[Slot] = []
        arriving: deque[Slot] = deque()
        missing: deque[ExpertId] = deque()
        num_late = 0
        counters, find, pin = self.counters, self.residency.find, self.residency.pin
        for expert in wanted:
            slot = find(expert)
            if slot is None:
                missing.append(expert)
                continue
            pin(slot)
            has_arrived = slot.state is State.RESIDENT or self._has_arrived(slot)
            (hits if has_arrived else arriving).append(slot)
            num_late += slot.is_late or not has_arrived
            counters.num_prefetched_used += slot.is_prefetch
            slot.is_prefetch = slot.is_late = False
        counters.num_hits += len(hits) + len(arriving) - num_late
        counters.num_late_hits += num_late
        counters.num_misses += len(missing)
        return hits, arriving, missing

    def _has_arrived(self, slot: Slot) -> bool:
        if slot.state is State.LOADING and slot.ready is not None and self._timeline.is_done(slot.ready):
            self.residency.end_load(slot)
        return slot.state is State.RESIDENT

    def _may_evict(self, expert: ExpertId) -> bool:
        slot = self.residency.find(expert)
        if slot is None or slot.pins:
            return False
        layer, index = expert
        if layer < len(self._protected) and self._protected[layer][index]:
            return False
        return slot.state is State.RESIDENT or self._has_arrived(slot)

    def _unprotect(self) -> None:
        self._protected = [[False] * len(row) for row in self._protected]

    def _prefetch(self, expert: ExpertId) -> Event | None:
        slot = self._take_slot(expert, is_urgent=False)
        if slot is None:
            return None
        self._protected[expert.layer][expert.expert] = True
        self.counters.num_prefetched += 1
        return self._start_load(slot, is_prefetch=True)

    def _fetch(self, missing: deque[ExpertId], arriving: deque[Slot], may_wait: bool) -> None:
        while missing:
            slot = self._take_slot(missing[0], is_urgent=not (may_wait or arriving))
            if slot is None:
                return
            missing.popleft()
            self.residency.pin(slot)
            self._start_load(slot, is_prefetch=False)
            arriving.append(slot)

    def _make_room(self) -> None:
        """All slots are protected or loading for later layers: drops the protections, or waits for one of the loads."""
        self._unprotect()
        self._eviction.reconsider()
        for slot in self.residency.slots:
            if slot.state is State.LOADING and slot.ready is not None:
                self._timeline.wait(slot.ready)
                return
        if all(slot.pins for slot in self.residency.slots):
            raise RuntimeError("every slot is pinned: a wave was not released")

    def _take_slot(self, expert: ExpertId, is_urgent: bool) -> Slot | None:
        if self.residency.num_free == 0:
            victim = self._eviction.victim(expert.layer, self._may_evict, is_urgent)
            if victim is None:
                return None
            self.residency.evict(victim)
            self._eviction.forget(victim)
        return self.residency.begin_load(expert)

    def _start_load(self, slot: Slot, is_prefetch: bool) -> Event:
        assert slot.expert is not None
        slot.ready = self._transfer.load(slot.expert, slot, is_prefetch)
        slot.is_prefetch = is_prefetch
        num_bytes = self._transfer.num_bytes(slot.expert)
        self.counters.prefetch_bytes += num_bytes if is_prefetch else 0
        self.counters.fetch_bytes += 0 if is_prefetch else num_bytes
        self.queue.issued(slot.ready)
        self._eviction.loaded(slot.expert)
        return slot.ready
