"""The slots of a GPU runtime: one flat device allocation, within the device budget.

Which expert lies where, generations and events are `specter.experts.residency`'s; streams are the timeline's.
"""

from __future__ import annotations

from torch import Tensor

from specter.experts.slots import SlotArena, stride_bytes
from specter.experts.store import RawCodec
from specter.models.cuda.memory import DeviceBudget


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


def open_arena(num_slots: int, codec: RawCodec, budget: DeviceBudget) -> DeviceArena:
    """Allocates `num_slots` slots on the budget's device.

    Raises:
        SpecterError: the slots do not fit the budget, or the device refuses them.
    """
    budget.check(num_slots * stride_bytes(codec), f"an arena of {num_slots} experts")
    return DeviceArena(num_slots, codec, budget.device)
