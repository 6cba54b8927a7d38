"""The slots of a GPU runtime: one flat device allocation, within the device budget.

Which expert lies where, generations and events are `specter.experts.residency`'s; streams are the timeline's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.experts.slots import SLOT_ALIGNMENT_BYTES, SlotArena
from specter.experts.store import RawCodec
from specter.gpu.memory import DeviceBudget


class DeviceArena(SlotArena):
    """Slots side by side on the device, poisoned until written."""

    @property
    def flat(self) -> Tensor:
        """All slots, uint8 [num_slots, stride_bytes]; the payload first, then padding to the alignment."""
        return self._bytes

    def write_run(self, first_slot: int, payloads: Tensor) -> None:
        """Copies payloads uint8 [n, payload_bytes] into n slots from `first_slot` on, in one copy."""
        self._bytes[first_slot : first_slot + payloads.shape[0], : self.codec.payload_bytes].copy_(
            payloads, non_blocking=True
        )


def stride_bytes(codec: RawCodec) -> int:
    """Bytes from one slot to the next."""
    return -(-codec.payload_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def open_arena(num_slots: int, codec: RawCodec, budget: DeviceBudget) -> DeviceArena:
    """Allocates `num_slots` slots on the budget's device.

    Raises:
        SpecterError: the slots do not fit the budget.
    """
    budget.check(num_slots * stride_bytes(codec), f"an arena of {num_slots} experts")
    try:
        return DeviceArena(num_slots, codec, budget.device)
    except torch.OutOfMemoryError as error:
        raise SpecterError(
            f"an arena of {num_slots} experts, {num_slots * stride_bytes(codec)} bytes, was refused by the device "
            f"({str(error).splitlines()[0]})",
            "hold fewer experts on the device, or end what else runs on it",
        ) from None
