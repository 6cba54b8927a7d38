"""The slots on a device: one flat allocation within the device budget. `specter.experts.residency` assigns them."""

from __future__ import annotations

import torch
from torch import Tensor

from specter.experts.slots import SlotArena, stride_bytes
from specter.experts.store import RawCodec
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.store import PinnedStore


class DeviceArena(SlotArena):
    """Slots side by side on the device, poisoned until written."""

    @property
    def flat(self) -> Tensor:
        """All slots, uint8 [num_slots, stride_bytes]: a payload, then padding to the alignment."""
        return self._bytes

    def write_run(self, first_slot: int, payloads: Tensor) -> None:
        """Copies payloads uint8 [n, payload_bytes] into the n slots from `first_slot` on, in one copy."""
        slots = self._bytes[first_slot : first_slot + payloads.shape[0], : self.codec.payload_bytes]
        slots.copy_(payloads, non_blocking=True)

    def fill(self, store: PinnedStore, num_layers: int) -> Tensor:
        """Copies every expert of the first MoE layers into slot layer * E + expert.

        Returns this slot table, int32 [num_layers, E] on the device.
        """
        for layer in range(num_layers):
            self.write_run(layer * store.num_experts, store.arena(layer))
        slots = torch.arange(num_layers * store.num_experts, dtype=torch.int32)
        return slots.view(num_layers, -1).to(self.flat.device)


def open_arena(num_slots: int, codec: RawCodec, budget: DeviceBudget) -> DeviceArena:
    """Allocates `num_slots` slots on the budget's device.
    Raises SpecterError: the slots do not fit the budget, or the device refuses them."""
    budget.check(num_slots * stride_bytes(codec), f"an arena of {num_slots} experts")
    return DeviceArena(num_slots, codec, budget.device)
