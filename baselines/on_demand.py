"""`on_demand`: plain decoding without a cache, the floor of offloading.

Faithful to: fetching every routed expert when the router names it and giving it up after use. The budget's slots
serve as staging buffers only, so copies of one layer still overlap with its compute.
"""

from __future__ import annotations

from specter.experts.policies.base import EVICTIONS, Eviction


@EVICTIONS.register("drop")
class DropEviction(Eviction):
    """Keeps nothing: the slots are staging buffers."""

    keeps = False
