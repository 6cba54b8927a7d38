"""Planned loads, copies under way, and the time during which demand was known and unmet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import takewhile

from specter.models.spec import ExpertId
from specter.timeline.base import Event, Timeline

# Copies on the link at a time while loads are only planned: one moves bytes, one is queued so that the link never waits
# for the host, and one is slack for a late host. More commit slots and order too early (swept from 1 to 16: decision
# 0007).
LINK_DEPTH = 3


class LoadQueue:
    """Planned loads in order of issue, copies under way in the same order, and the needs behind them.

    A need lasts from the event that made it known (of a draft step or a router) to the end of its copy: while a planned
    load waits, or a layer waits for a fetch, or one of their copies is under way.

    Args:
        depth: copies under way at a time; fetches, which do not pass through here, may exceed it.
    """

    def __init__(self, timeline: Timeline, depth: int = LINK_DEPTH) -> None:
        self._timeline = timeline
        self.depth = depth
        self.clear()

    def clear(self) -> None:
        self.planned: deque[ExpertId] = deque()
        self._under_way: deque[Event] = deque()
        self._last_copy: Event | None = None
        self._opened: Event | None = None  # begin of the current need
        self._needs: deque[tuple[Event, Event]] = deque()  # begin and end
        self._num_settled = 0  # needs that `settle` has counted
        self._settled: Event | None = None  # end of the last one

    # -- loads ---------------------------------------------------------------------------------

    def replace(self, loads: Iterable[ExpertId], known: Event) -> None:
        """Replaces what is left of the last plan; the event `known` made the new one possible."""
        self.planned = deque(loads)
        if self.planned:
            self.open(known)
        else:
            self.close()

    def drop_layer(self, layer: int) -> None:
        """Drops the loads of a layer whose routing is known: they are fetched now, or not needed."""
        if self.planned:
            self.planned = deque(expert for expert in self.planned if expert.layer != layer)

    def issued(self, copy: Event) -> None:
        self._last_copy = copy
        self._under_way.append(copy)

    def oldest(self) -> Event | None:
        """The copy under way that ends first, or None."""
        under_way = self._under_way
        while under_way and self._timeline.is_done(under_way[0]):
            under_way.popleft()
        return under_way[0] if under_way else None

    def has_room(self) -> bool:
        """Whether another planned copy may be issued now."""
        self.oldest()
        return len(self._under_way) < self.depth

    # -- needs ---------------------------------------------------------------------------------

    def open(self, known: Event) -> None:
        """A need begins at `known`, unless one has begun already."""
        if self._opened is None:
            self._opened = known

    def close(self, known: Event | None = None) -> None:
        """The need ends, unless loads are planned: with the last copy, or at `known` if that shows the rest useless."""
        if self._opened is None or self.planned:
            return
        end = self._last_copy
        if known is not None and self.oldest() is None:  # all copies have ended, before `known` or after it
            end = known if end is None or self._timeline.elapsed_ns(known, end) <= 0 else end
        if end is not None:
            self._needs.append((self._opened, end))
        self._opened = None

    def num_met(self) -> int:
        """The number of needs, of all, that have ended. The host must have waited for the events that ended them."""
        is_done = self._timeline.is_done
        return self._num_settled + sum(1 for _ in takewhile(lambda need: is_done(need[1]), self._needs))

    def settle(self, num_met: int) -> int:
        """Time, ns, of known and unmet demand, in the needs since the last call and up to `num_met` of all."""
        total, elapsed = 0, self._timeline.elapsed_ns
        while self._num_settled < num_met:
            begin, end = self._needs.popleft()
            self._num_settled += 1
            if self._settled is not None and elapsed(begin, self._settled) > 0:
                begin = self._settled
            if (length := elapsed(begin, end)) > 0:
                total, self._settled = total + length, end
        return total
