"""`on_demand`: plain decoding without a cache, the floor of offloading.

Faithful to: fetching every routed expert when the router names it and giving it up after use. The budget's slots
serve as staging buffers only, so copies of one layer still overlap with its compute.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specter.models.spec import ExpertId


class DropEviction:
    """Keeps nothing: the slots are staging buffers."""

    keeps = False

    def begin_round(self) -> None:
        pass

    def demand(self, layer: int, counts: NDArray[np.int64]) -> None:
        pass

    def loaded(self, expert: ExpertId) -> None:
        pass

    def used(self, expert: ExpertId) -> None:
        pass

    def reconsider(self) -> None:
        pass

    def clear(self) -> None:
        pass

    def forget(self, expert: ExpertId) -> None:
        pass

    def victim(self, layer: int, may_evict: Callable[[ExpertId], bool], is_urgent: bool) -> ExpertId | None:
        return None

    def order(self) -> list[ExpertId]:
        return []
