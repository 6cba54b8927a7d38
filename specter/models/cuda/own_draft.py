"""What a draft that shares only the experts takes on the device: a second copy, really allocated."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.weights import GpuKVCache, GpuWeights


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """A copy of the non-expert weights, in their type, and a KV cache."""

    weights: GpuWeights
    cache: GpuKVCache

    @classmethod
    def allocate(cls, weights: GpuWeights, kv_capacity: int, budget: DeviceBudget) -> OwnMemory:
        """
        Raises:
            SpecterError: the copy and its KV do not fit the budget.
        """
        spec = weights.spec
        num_bytes = weights.num_bytes + spec.num_layers * kv_capacity * spec.kv_width * weights.dtype.itemsize
        budget.check(num_bytes, "the draft's own weights and KV cache")
        return cls(copy.deepcopy(weights), GpuKVCache(spec, kv_capacity, weights.dtype, weights.device))

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """Parts as in `specter.memory.PARTS`."""
        return {"draft_shared": self.weights.num_bytes, "draft_kv": self.cache.entries.nbytes}
