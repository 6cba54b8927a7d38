"""The way back of a swap on the device: payloads that leave their slots."""

from __future__ import annotations

import torch

from specter.errors import SpecterError
from specter.kernels import pinned_io
from specter.models.cuda.arena import DeviceArena


class WriteBack:
    """Copies a slot's payload into one of a few page-locked buffers, in turn, on the current stream.

    Nobody reads them: the store keeps every expert, and experts never change. What counts is that the link carries the
    bytes, as it must where an expert lies on one side only.

    Attributes:
        buffers: uint8 [num_buffers, payload_bytes].
    Raises:
        SpecterError: no buffers.
    """

    def __init__(self, arena: DeviceArena, num_buffers: int) -> None:
        if num_buffers < 1:
            raise SpecterError("swaps without a buffer on the host", "set system.num_buffers to 1 or more")
        self.buffers = pinned_io.pinned_zeros((num_buffers, arena.codec.payload_bytes), torch.uint8, arena.flat.device)
        self._payloads = arena.flat[:, : arena.codec.payload_bytes].unbind(0)
        self._num_copied = 0

    def __call__(self, slot: int) -> None:
        buffer = self.buffers[self._num_copied % len(self.buffers)]
        buffer.copy_(self._payloads[slot], non_blocking=True)
        self._num_copied += 1
