"""Eviction by what is known: this round's demand is protected, and beyond it the often used stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from specter.models.spec import ExpertId


class RetainEviction:
    """Displaces the resident with the lowest score, whichever layer it is of: one pool for all layers.

    The score of an expert is its rows in target passes, weighted by DECAY per round of age, which orders experts by the
    chance that the next round needs them. Layers are visited in turn, so every expert's next use is one round away,
    and that chance is all that counts (LRU would displace just what comes next). Experts that the draft has counted and
    that the round has not used yet are protected by the plan, so among the others the layers already verified give up
    their low-scored experts first, and an expert that merely streams through displaces its own like.

    Args:
        quotas: slots per MoE layer; only their sum matters.
        num_staging: experts at a time that have been loaded and not been used yet; at most half of the slots. A load
            beyond them waits until one of them has been used, so that the other slots hold the best-scored experts.
        decay: weight of a round against the next one.
    """

    keeps = True
    DECAY = 0.7  # swept from 0 to 0.95, flat between 0.5 and 0.8: decision 0007

    def __init__(self, quotas: Sequence[int], num_experts: int, num_staging: int, decay: float = DECAY) -> None:
        self._scores = np.zeros((len(quotas), num_experts))
        self._num_staging = min(num_staging, sum(quotas) // 2)
        self._decay = decay
        self.clear()

    def clear(self) -> None:
        self._residents: dict[ExpertId, None] = {}  # least recently used first
        self._by_layer: list[set[ExpertId]] = [set() for _ in self._scores]
        self._staged: set[ExpertId] = set()  # loaded and not used since
        # Residents by score. An entry is stale once its expert has left or its score has changed. Who was refused is
        # not in it until told of again, so that protected residents are not looked at once more for every load.
        self._heap: list[tuple[float, ExpertId]] = []

    def begin_round(self) -> None:
        self.reconsider()

    def demand(self, layer: int, counts: NDArray[np.int64]) -> None:
        # At the layer's own turn: earlier, a layer still to come would lose a round's worth to those behind it.
        self._scores[layer] *= self._decay
        self._scores[layer] += counts
        num_rows = counts.tolist()
        for expert in self._by_layer[layer]:
            if num_rows[expert.expert] == 0:  # the others will be used
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

    def order(self) -> list[ExpertId]:
        return list(self._residents)

    def _push(self, expert: ExpertId) -> None:
        heappush(self._heap, (float(self._scores[expert]), expert))
