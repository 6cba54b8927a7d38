"""The slot arena: device buffers of one expert each, side by side in one allocation."""

from __future__ import annotations

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.experts.store import RawCodec

# Slots begin on a cache line: a matrix product may take another path, with other bits, at another alignment.
SLOT_ALIGNMENT_BYTES = 64
_POISON = 0xFF  # a float of any width with all bits set is NaN


def stride_bytes(codec: RawCodec) -> int:
    """Bytes from one slot to the next."""
    return -(-codec.payload_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def poisoned(num_slots: int, slot_bytes: int, device: torch.device | str) -> Tensor:
    """Memory for slots, uint8 [num_slots, slot_bytes], all bits set. Raises SpecterError: it cannot be allocated."""
    try:
        return torch.full((num_slots, slot_bytes), _POISON, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        raise SpecterError(
            f"{num_slots} slots of {slot_bytes} bytes cannot be allocated on {device}: "
            f"{str(error).partition(chr(10))[0]}",
            "choose a smaller budget: budget=low, or budget.experts_per_layer=...",
        ) from None


class SlotArena:
    """`num_slots` slots, filled with NaN until written, so that a residency bug shows.

    Attributes:
        gate_up: [num_slots, 2F, D], down: [num_slots, D, F]; strided views over the arena.
        gate_up_t, down_t: transposed views, slot by slot, [D, 2F] and [F, D].
    Raises:
        SpecterError: the memory cannot be allocated.
    """

    def __init__(self, num_slots: int, codec: RawCodec, device: torch.device | str = "cpu") -> None:
        self.num_slots = num_slots
        self.codec = codec
        self._bytes = poisoned(num_slots, stride_bytes(codec), device)
        self._payloads = self._bytes[:, : codec.payload_bytes].unbind(0)  # slicing at every copy costs more
        self.gate_up, self.down = codec.views(self._bytes)
        self.gate_up_t: tuple[Tensor, ...] = self.gate_up.transpose(1, 2).unbind(0)
        self.down_t: tuple[Tensor, ...] = self.down.transpose(1, 2).unbind(0)

    def write(self, slot: int, payload: Tensor) -> None:
        """Copies payload uint8 [payload_bytes] into `slot`."""
        self._payloads[slot].copy_(payload, non_blocking=True)

    def poison(self, slot: int) -> None:
        """Fills the slot with NaN again."""
        self._bytes[slot].fill_(_POISON)
