"""Least-recently-used eviction, as the paper has it."""

from __future__ import annotations

from collections.abc import Callable

from specter.experts.policies.base import EVICTIONS, Eviction, Pool
from specter.models.spec import ExpertId


@EVICTIONS.register("lru")
class LruEviction(Eviction):
    """Displaces the least recently used expert of the same layer; a layer without a quota of its own (fewer slots than
    layers) displaces the least recently used expert of all layers."""

    def __init__(self, pool: Pool) -> None:
        self._quotas = pool.quotas
        self._layers: list[dict[ExpertId, int]] = [{} for _ in pool.quotas]  # time of last use, oldest first
        self._clock = 0

    def loaded(self, expert: ExpertId) -> None:
        self._clock += 1
        self._layers[expert.layer][expert] = self._clock  # it was absent, so it is the last

    def used(self, expert: ExpertId) -> None:
        self._clock += 1
        residents = self._layers[expert.layer]
        residents.pop(expert, None)
        residents[expert] = self._clock

    def forget(self, expert: ExpertId) -> None:
        self._layers[expert.layer].pop(expert, None)

    def clear(self) -> None:
        for residents in self._layers:
            residents.clear()

    def victim(self, layer: int, may_evict: Callable[[ExpertId], bool], is_urgent: bool) -> ExpertId | None:
        if len(self._layers[layer]) >= self._quotas[layer] > 0:
            return self._oldest(layer, may_evict)
        # Below the quota with no slot free: another layer holds more than its quota. If none does, take from any.
        for over_quota in (True, False):
            oldest = [
                found
                for other, residents in enumerate(self._layers)
                if not over_quota or len(residents) > self._quotas[other]
                if (found := self._oldest(other, may_evict)) is not None
            ]
            if oldest:
                return min(oldest, key=lambda expert: self._layers[expert.layer][expert])
        return None

    def _oldest(self, layer: int, may_evict: Callable[[ExpertId], bool]) -> ExpertId | None:
        return next(filter(may_evict, self._layers[layer]), None)


# Every expert has a slot from the start (`specter.session`), so nothing is ever displaced.
EVICTIONS.register("resident")(LruEviction)
