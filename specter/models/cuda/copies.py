"""Expert copies by the driver's own call: addresses are known in advance, and a round has hundreds to issue.

`Tensor.copy_` finds out about both tensors anew every time. The driver library is used, not the runtime's: it has one
name in every CUDA version, and it is in the process as soon as a device is.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from specter.errors import SpecterError
from specter.experts.transfer import Mover
from specter.models.cuda.arena import DeviceArena
from specter.models.cuda.store import PinnedStore
from specter.models.spec import ExpertId

_DRIVER = "libcuda.so.1"


def load_driver(name: str = _DRIVER) -> Any:
    """The driver library that the process has loaded. Raises SpecterError if there is none, or one without the copy."""
    try:
        # Not CDLL: nobody else needs the interpreter for the microseconds of a call, and getting it back may take long.
        driver = ctypes.PyDLL(name)
        driver.cuMemcpyHtoDAsync_v2.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64)
        driver.cuMemcpyHtoDAsync_v2.restype = ctypes.c_int
        driver.cuGetErrorName.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
    except (OSError, AttributeError) as error:
        remedy = "install a driver of CUDA 12 or later"
        raise SpecterError(f"the CUDA driver {name} cannot copy: {error}", remedy) from None
    return driver


class DriverMover:
    """A `Mover`: one asynchronous copy on the current stream. Both sides must outlive it.

    Args:
        driver: tests put their own in its place.
    """

    def __init__(self, arena: DeviceArena, store: PinnedStore, driver: Any = None) -> None:
        self._num_bytes = arena.codec.payload_bytes
        self._slots = [row.data_ptr() for row in arena.flat.unbind(0)]
        self._payloads = [[row.data_ptr() for row in store.arena(layer).unbind(0)] for layer in range(store.num_layers)]
        self._held = arena.flat, store  # what the addresses are of
        self._device = arena.flat.device
        self._driver = driver if driver is not None else load_driver()
        self._copy = self._driver.cuMemcpyHtoDAsync_v2

    def __call__(self, expert: ExpertId, slot: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        status = self._copy(self._slots[slot], self._payloads[expert.layer][expert.expert], self._num_bytes, stream)
        if status:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(status, ctypes.byref(name))
            raise RuntimeError(f"the driver refused a copy: {(name.value or b'').decode() or status}")


def make_mover(arena: DeviceArena, store: PinnedStore) -> Mover:
    """Moves payloads from the store into the arena, asynchronously on the current stream of the arena's device."""
    if arena.flat.is_cuda:
        return DriverMover(arena, store)
    return lambda expert, slot: arena.write(slot, store.payload(expert))
