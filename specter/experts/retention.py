"""Eviction by what is known: this round's demand is protected, and beyond it the often used stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from specter.model.spec import ExpertId


class RetainEviction:
    """Displaces the resident with the lowest score, whichever layer it is of: one pool for all layers.

    The score of an expert is its rows in target passes, weighted by DECAY per round of age, which orders experts by the
    chance that the next round needs them. Layers are visited in turn, so every expert's next use is one round away,
    and that chance is all that counts (LRU would displace just what comes next). Experts that the draft has counted and
    that the round has not used yet are protected by the plan, so among the others the layers already verified give up
    their low-scored experts first, and an expert that merely streams through displaces its own like.

    Args:
        quotas: slots per MoE layer; only their number matters.
        num_staging: prefetched experts at a time that have not been used yet. A prefetch beyond them is put off, so
            that all but `num_staging` slots hold the best-scored experts.
        decay: weight of a round against the next one.
    """

    keeps = True
    DECAY = 0.7
    # Candidates looked at for one whose last use has ended; a copy into another's slot holds up the link until then.
    NUM_TRIES = 4

    def __init__(self, quotas: Sequence[int], num_experts: int, num_staging: int, decay: float = DECAY) -> None:
        self._scores = np.zeros((len(quotas), num_experts))
        self._num_staging = num_staging
        self._decay = decay
        self.clear()

    def clear(self) -> None:
        self._residents: dict[ExpertId, None] = {}  # least recently used first
        self._by_layer: list[set[int]] = [set() for _ in self._scores]
        self._staged: set[ExpertId] = set()  # prefetched and not used since
        # Residents by score. An entry is stale once its expert has left or its score has changed. Who was refused is
        # not in it until told of again, so that protected residents are not looked at once more for every load.
        self._heap: list[tuple[float, ExpertId]] = []

    def begin_round(self) -> None:
        self._scores *= self._decay
        self.reconsider()

    def demand(self, layer: int, counts: NDArray[np.int64]) -> None:
        self._scores[layer] += counts
        for expert in self._by_layer[layer]:
            if counts[expert] == 0:  # the others are told of when they have been used
                self._push(ExpertId(layer, expert))

    def loaded(self, expert: ExpertId, is_prefetch: bool) -> None:
        self._residents[expert] = None
        self._by_layer[expert.layer].add(expert.expert)
        if is_prefetch:
            self._staged.add(expert)

    def used(self, expert: ExpertId) -> None:
        self._residents.pop(expert)
        self._residents[expert] = None
        self._staged.discard(expert)
        self._push(expert)

    def forget(self, expert: ExpertId) -> None:
        self._residents.pop(expert, None)
        self._by_layer[expert.layer].discard(expert.expert)
        self._staged.discard(expert)

    def victim(
        self,
        layer: int,
        is_prefetch: bool,
        may_evict: Callable[[ExpertId], bool],
        is_idle: Callable[[ExpertId], bool],
    ) -> ExpertId | None:
        if is_prefetch and len(self._staged) >= self._num_staging:
            return None
        busy: list[tuple[float, ExpertId]] = []
        chosen: ExpertId | None = None
        while chosen is None and self._heap and len(busy) < self.NUM_TRIES:
            score, expert = heappop(self._heap)
            if expert not in self._residents or score != self._scores[expert] or not may_evict(expert):
                continue
            if is_idle(expert):
                chosen = expert
            else:
                busy.append((score, expert))
        if chosen is None and busy:
            chosen = busy.pop(0)[1]
        for entry in busy:
            heappush(self._heap, entry)
        return chosen

    def reconsider(self) -> None:
        self._heap = [(float(self._scores[expert]), expert) for expert in self._residents]
        heapify(self._heap)

    def order(self) -> list[ExpertId]:
        return list(self._residents)

    def _push(self, expert: ExpertId) -> None:
        heappush(self._heap, (float(self._scores[expert]), expert))
