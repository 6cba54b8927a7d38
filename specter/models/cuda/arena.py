"""The slots on a device: one flat allocation within the device budget. `specter.experts.residency` assigns them.

Expert copies go through the driver's own call, with addresses computed once: a round issues hundreds, and
`Tensor.copy_` inspects both tensors at every call. The driver library has one name in every CUDA version, unlike the
runtime library, and is loaded in every process that uses a device.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.experts.slots import SlotArena, poisoned, stride_bytes
from specter.experts.store import RawCodec
from specter.experts.transfer import Mover
from specter.kernels.pinned_io import pinned_zeros
from specter.kernels.residual import SlotMemory
from specter.models.cuda.blobs import BlobStore
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.store import PinnedArenas, PinnedStore
from specter.models.spec import ExpertId


class DeviceArena(SlotArena):
    """Slots side by side on the device, poisoned until written."""

    @property
    def payload_bytes(self) -> int:
        return self.codec.payload_bytes

    @property
    def flat(self) -> Tensor:
        """All slots, uint8 [num_slots, stride_bytes]: a payload, then padding to the alignment."""
        return self._bytes

    def write_run(self, first_slot: int, payloads: Tensor) -> None:
        """Copies payloads uint8 [n, payload_bytes] into the n slots from `first_slot` on, in one copy."""
        slots = self._bytes[first_slot : first_slot + payloads.shape[0], : self.codec.payload_bytes]
        slots.copy_(payloads, non_blocking=True)

    def fill(self, store: PinnedStore, num_layers: int) -> Tensor:
        """Copies every expert of the first MoE layers into slot layer * E + expert; returns this slot table, int32
        [num_layers, E] on the device."""
        for layer in range(num_layers):
            self.write_run(layer * store.num_experts, store.arena(layer))
        slots = torch.arange(num_layers * store.num_experts, dtype=torch.int32)
        return slots.view(num_layers, -1).to(self.flat.device)


class BlobSlots:
    """Slots of residual blobs, poisoned until written: an unwritten slot decodes to NaN.

    Attributes:
        memory: the slots and the tails. flat: the slots, uint8 [num_slots, slot_bytes].
        payload_bytes: at most, of one copy: slot_bytes.
    """

    def __init__(self, num_slots: int, memory: SlotMemory) -> None:
        self.num_slots, self.memory, self.flat = num_slots, memory, memory.flat
        self.payload_bytes = self.flat.shape[1]

    def write(self, slot: int, payload: Tensor) -> None:
        """Copies payload uint8 [n], or as much of it as a slot holds, into `slot`."""
        kept = payload[: self.payload_bytes]
        self.flat[slot, : len(kept)].copy_(kept, non_blocking=True)


Slots = DeviceArena | BlobSlots
_OVERRUN_BYTES = 64  # after the last slot: a decoder reads a few words past the end of a stream


def open_blob_slots(num_slots: int, slot_bytes: int, store: BlobStore, budget: DeviceBudget) -> BlobSlots:
    """Allocates slots, and copies the tails of all blobs that are longer than a slot to the device.
    Raises SpecterError: they do not fit the budget, or the device refuses them."""
    tails = store.tails(slot_bytes)
    num_bytes = num_slots * slot_bytes + tails.num_bytes
    budget.check(num_bytes, f"an arena of {num_slots} experts and what their blobs have beyond it")
    flat = poisoned(1, num_slots * slot_bytes + _OVERRUN_BYTES, budget.device)[0, : num_slots * slot_bytes]
    parts = poisoned(1, tails.num_bytes + _OVERRUN_BYTES, budget.device)[0]
    for begin, tail in tails.parts:
        parts[begin : begin + len(tail)].copy_(tail)
    beyond = torch.tensor(tails.beyond, dtype=torch.int64, device=budget.device)
    return BlobSlots(num_slots, SlotMemory(flat.view(num_slots, slot_bytes), parts, beyond))


def open_arena(num_slots: int, codec: RawCodec, budget: DeviceBudget) -> DeviceArena:
    """Allocates `num_slots` slots on the budget's device.
    Raises SpecterError: the slots do not fit the budget, or the device refuses them."""
    budget.check(num_slots * stride_bytes(codec), f"an arena of {num_slots} experts")
    return DeviceArena(num_slots, codec, budget.device)


_DRIVER = "libcuda.so.1"


def load_driver(name: str = _DRIVER) -> Any:
    """The loaded driver library. Raises SpecterError if there is none, or if it lacks the copy."""
    try:
        # Not CDLL: it releases the interpreter lock for a call of microseconds, and regaining it can take longer.
        driver = ctypes.PyDLL(name)
        driver.cuMemcpyHtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64)
        driver.cuMemcpyHtoDAsync_v2.restype = ctypes.c_int
        driver.cuGetErrorName.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
    except (OSError, AttributeError) as error:
        remedy = "install a driver of CUDA 12 or later"
        raise SpecterError(f"the CUDA driver {name} cannot copy: {error}", remedy) from None
    return driver


class DriverMover:
    """A `Mover`: one asynchronous copy of a payload, or of what a slot holds of it, on the current stream. Tests give
    a fake `driver`."""

    def __init__(self, arena: Slots, store: PinnedArenas, driver: Any = None) -> None:
        self._slots = [row.data_ptr() for row in arena.flat.unbind(0)]
        self._payloads = [
            [(payload.data_ptr(), min(payload.numel(), arena.payload_bytes)) for payload in store.payloads(layer)]
            for layer in range(store.num_layers)
        ]
        self._held = arena.flat, store  # keeps the memory behind the addresses
        self._device = arena.flat.device
        self._driver = driver if driver is not None else load_driver()
        self._copy = self._driver.cuMemcpyHtoDAsync_v2

    def __call__(self, expert: ExpertId, slot: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        status = self._copy(self._slots[slot], *self._payloads[expert.layer][expert.expert], stream)
        if status:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(status, ctypes.byref(name))
            raise RuntimeError(f"the driver refused a copy: {(name.value or b'').decode() or status}")


def make_mover(arena: Slots, store: PinnedArenas) -> Mover:
    """Moves payloads from the store into the arena, asynchronously on the current stream of the arena's device."""
    if arena.flat.is_cuda:
        return DriverMover(arena, store)
    return lambda expert, slot: arena.write(slot, store.payload(expert))


class WriteBack:
    """Copies a slot's payload into the next of `buffers` (page-locked, uint8 [num_buffers, payload_bytes]), on the
    current stream. They are never read: the copies load the link as those of a system without copies on the host.
    Raises SpecterError: no buffers."""

    def __init__(self, arena: Slots, num_buffers: int) -> None:
        if num_buffers < 1:
            raise SpecterError("swaps without a buffer on the host", "set system.num_buffers to 1 or more")
        self.buffers = pinned_zeros((num_buffers, arena.payload_bytes), torch.uint8, arena.flat.device)
        self._payloads = arena.flat[:, : arena.payload_bytes].unbind(0)
        self._num_copied = 0

    def __call__(self, slot: int) -> None:
        buffer = self.buffers[self._num_copied % len(self.buffers)]
        buffer.copy_(self._payloads[slot], non_blocking=True)
        self._num_copied += 1
