"""Payloads of varying size: what of an expert crosses the link, and what of it lies in a slot.

All slots have one size, so that any expert fits any slot and nothing fragments. Blobs differ in size, so what a blob
has beyond the slot, its *tail*, stays on the device for good; one copy moves the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ALIGN_BYTES = 64
# A tail begins with the block that straddles the end of the slot, which is so far kept twice: at most 8192 weights of
# 16 bits and less than that in practice.
STRADDLE_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Slots:
    """A pool of `num` slots of `num_bytes` each, and the tails of all experts beside them."""

    num: int
    num_bytes: int
    tail_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.num * self.num_bytes + self.tail_bytes


class Blobs:
    """The bytes of every expert's blob, by MoE layer and expert."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.mean_bytes = sum(sizes) / len(sizes)
        self._ascending = np.sort(np.array(sizes, np.int64))

    def in_bytes(self, num_bytes: int) -> Slots:
        """The most slots that fit `num_bytes` with their tails, by choice of the slot's size."""
        candidates = np.unique(-(-self._ascending // ALIGN_BYTES) * ALIGN_BYTES)
        best = Slots(0, int(candidates[-1]))
        for size in candidates.tolist():
            tails = self._tail_bytes(size)
            num = min(max(num_bytes - tails, 0) // size, len(self.sizes))
            if num > best.num or (num == best.num and num * size + tails < best.total_bytes):
                best = Slots(num, size, tails)
        return best

    def for_experts(self, num: int) -> Slots:
        """`num` slots of the size that takes the fewest bytes with their tails."""
        candidates = np.unique(-(-self._ascending // ALIGN_BYTES) * ALIGN_BYTES).tolist()
        return min((Slots(num, size, self._tail_bytes(size)) for size in candidates), key=lambda one: one.total_bytes)

    def link_bytes(self, slot_bytes: int) -> tuple[int, ...]:
        """Bytes of the one copy of each expert."""
        return tuple(min(size, slot_bytes) for size in self.sizes)

    def _tail_bytes(self, slot_bytes: int) -> int:
        beyond = self._ascending[self._ascending > slot_bytes]
        return int((beyond - slot_bytes + STRADDLE_BYTES).sum())
