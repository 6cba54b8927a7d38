"""Which resident to displace. Pure policy: told of every use, asked for a victim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specter.models.spec import ExpertId


class Eviction(Protocol):
    keeps: bool  # False: an expert is given up as soon as it has been used

    def begin_round(self) -> None:
        """A round, or prefill, begins."""

    def demand(self, layer: int, counts: NDArray[np.int64]) -> None:
        """The router has spoken for `layer`: rows of the pass that chose each expert [E]."""

    def loaded(self, expert: ExpertId) -> None:
        """The expert got a slot."""

    def used(self, expert: ExpertId) -> None:
        """The expert, which has a slot, was computed with."""

    def forget(self, expert: ExpertId) -> None:
        """The expert lost its slot."""

    def victim(self, layer: int, may_evict: Callable[[ExpertId], bool], is_urgent: bool) -> ExpertId | None:
        """Whom to displace for an expert of `layer`; None if nobody may go, or if the policy would rather wait.

        Args:
            is_urgent: there is nothing to wait for.
        """

    def reconsider(self) -> None:
        """`may_evict` may allow now what it has refused."""

    def clear(self) -> None:
        """Every expert lost its slot."""

    def order(self) -> list[ExpertId]:
        """All residents, least recently used first: the recency that a snapshot keeps."""


def layer_quotas(num_slots: int, num_layers: int) -> list[int]:
    """Splits a flat pool evenly over the MoE layers; the first layers take the remainder."""
    share, extra = divmod(num_slots, num_layers)
    return [share + (layer < extra) for layer in range(num_layers)]


class LruEviction:
    """Least recently used within the layer, as published; a layer without a quota of its own
    (fewer slots than layers) displaces the least recently used of all."""

    keeps = True

    def __init__(self, quotas: Sequence[int]) -> None:
        self._quotas = quotas
        self._layers: list[dict[ExpertId, int]] = [{} for _ in quotas]  # when used last, the oldest first
        self._clock = 0

    def begin_round(self) -> None:
        pass

    def demand(self, layer: int, counts: NDArray[np.int64]) -> None:
        pass

    def reconsider(self) -> None:
        pass

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
        # Below its quota with no slot free: somebody holds more than its share; failing that, take from anybody.
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

    def order(self) -> list[ExpertId]:
        ages = {expert: age for residents in self._layers for expert, age in residents.items()}
        return sorted(ages, key=ages.__getitem__)
