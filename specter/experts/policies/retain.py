"""Eviction by expected reuse: this round's demand is protected, and beyond it the most used experts stay."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from specter.experts.policies.base import EVICTIONS, Eviction, Pool
from specter.models.spec import ExpertId

DECAY = 0.7  # swept from 0 to 0.95, flat between 0.5 and 0.8: decision 0007


@EVICTIONS.register("retain")
class RetainEviction(Eviction):
    """Displaces the resident with the lowest score, of whatever layer: one pool for all layers.

    The score of an expert is its rows in target passes, weighted by `decay` per round of age, which orders experts by
    the chance that the next round needs them. Layers run in turn, so the next use of every expert is one round away and
    that chance is all that counts (LRU would displace just what comes next). The plan protects experts that the draft
    has counted and the round has not used yet. Among the others the verified layers give up their low-scored experts
    first, and an expert that merely streams through displaces another one of that kind.

    Args:
        pool: only the sum of its quotas matters. At most `num_staging` experts at a time (and at most half of the
            slots) are loaded and not used yet; a further load waits until one of them has been used, so that the other
            slots hold the best-scored experts.
        decay: weight of a round against the next one.
    """

    uses_staging = True

    def __init__(self, pool: Pool, decay: float = DECAY) -> None:
        self._scores = np.zeros((len(pool.quotas), pool.num_experts))
        self._num_staging = min(pool.num_staging, sum(pool.quotas) // 2)
        self._decay = decay
        self.clear()

    def clear(self) -> None:
        self._residents: dict[ExpertId, None] = {}  # least recently used first
        self._by_layer: list[set[ExpertId]] = [set() for _ in self._scores]
        self._staged: set[ExpertId] = set()  # loaded and not used since
        # Residents by score. An entry is stale once its expert has left or its score has changed. A refused resident
        # leaves the heap until `reconsider` or a new score, so that later loads do not visit it again.
        self._heap: list[tuple[float, ExpertId]] = []

    def begin_round(self) -> None:
        self.reconsider()

    def demand(self, layer: int, counts: NDArray[np.int64]) -> None:
        # At the layer's own turn: decaying all layers at once would favour those that have already run.
        self._scores[layer] *= self._decay
        self._scores[layer] += counts
        num_rows = counts.tolist()
        for expert in self._by_layer[layer]:
            if num_rows[expert.expert] == 0:  # the others are pushed once they have been used
                self._staged.discard(expert)
                self._push(expert)

    def loaded(self, expert: ExpertId) -> None:
        self._residents[expert] = None
        self._by_layer[expert.layer].add(expert)
        self._staged.add(expert)

    def used(self, expert: ExpertId) -> None:
        self._residents.pop(expert)
        self._residents[expert] = None
        self._staged.discard(expert)
        self._push(expert)

    def forget(self, expert: ExpertId) -> None:
        self._residents.pop(expert, None)
        self._by_layer[expert.layer].discard(expert)
        self._staged.discard(expert)

    def victim(self, layer: int, may_evict: Callable[[ExpertId], bool], is_urgent: bool) -> ExpertId | None:
        if len(self._staged) >= self._num_staging and not is_urgent:
            return None
        while self._heap:
            score, expert = heappop(self._heap)
            if expert in self._residents and score == self._scores[expert] and may_evict(expert):
                return expert
        return None

    def reconsider(self) -> None:
        self._heap = [(float(self._scores[expert]), expert) for expert in self._residents]
        heapify(self._heap)

    def _push(self, expert: ExpertId) -> None:
        heappush(self._heap, (float(self._scores[expert]), expert))
