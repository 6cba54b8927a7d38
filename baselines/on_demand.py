"""`on_demand`: plain decoding without a cache, the floor of offloading.

Faithful to: fetching every routed expert when its layer has routed, and dropping it after use. The budget's slots are
staging buffers only, so copies of one layer still overlap with its compute.
"""

from __future__ import annotations

from specter.experts.policies.base import EVICTIONS, Eviction


@EVICTIONS.register("drop")
class DropEviction(Eviction):
    """Keeps nothing: the slots are staging buffers."""

    keeps = False
