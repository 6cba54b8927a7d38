"""The store of experts on the host: one page-locked arena per MoE layer, one flat payload per expert.

Memory is mapped in huge pages, faulted in by all threads, and then registered with the driver: a page-locked allocation
takes five times as long (5.1 s against 0.5 + 0.5 s for 8 GiB on an H200 machine). Several threads can open layers, so
one layer is registered while another is faulted in.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, get_args

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.experts.store import RawCodec
from specter.models.cuda.memory import host_available_bytes
from specter.models.spec import ExpertId

Pin = Literal["require", "prefer", "off"]
_POISON = 0xFF  # NaN in every float width, so use of a payload that was never loaded shows
_RESERVE_BYTES = 512 * 2**20  # left to other processes
_GROWTH_WAIT_S = 2.0  # some virtual machines get memory only as they use it
_GROWTH_POLL_S = 0.002
_log = logging.getLogger(__name__)


def as_pin(text: str) -> Pin:
    """Raises SpecterError for an unknown way to page-lock."""
    pin: Pin
    for pin in get_args(Pin):
        if pin == text:
            return pin
    raise SpecterError(f"pin={text} is unknown", "use pin=require, pin=prefer or pin=off")


class PageLocker:
    """Registers host memory with the driver; both methods raise OSError if it refuses."""

    def register(self, address: int, num_bytes: int) -> None:
        try:
            _check(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
        except OSError:
            with suppress(RuntimeError):  # clears the error, which the runtime reports again at the next kernel
                torch.zeros(1, device="cuda")
            raise

    def unregister(self, address: int) -> None:
        _check(torch.cuda.cudart().cudaHostUnregister(address))


def _check(status: object) -> None:
    if int(status) != 0:  # type: ignore[call-overload]
        raise OSError(f"CUDA runtime status {status}")


def _unlock(locker: PageLocker, addresses: list[int]) -> None:
    while addresses:
        locker.unregister(addresses[-1])
        addresses.pop()


class PinnedStore:
    """Payloads of every routed expert in host memory. Each arena is opened once, filled, and then only read.

    `close` or the collection of the store unlocks the memory: a driver copies to unmapped pages that are registered.

    Attributes:
        is_pinned: all open arenas are page-locked; copies from other memory are slower and block the host.
        wait_s, fault_s, lock_s: time spent so far waiting for free memory, faulting pages in, and page-locking them;
            summed over threads.
    """

    def __init__(
        self,
        codec: RawCodec,
        num_layers: int,
        num_experts: int,
        pin: Pin = "require",
        locker: PageLocker | None = None,
        available_bytes: Callable[[], int] = host_available_bytes,
    ) -> None:
        """
        Args:
            pin: `require` page-locked memory, `prefer` it (ordinary memory where it is refused, which is logged and
                sets `is_pinned` to False), or `off`.
        """
        self.codec, self.num_layers, self.num_experts = codec, num_layers, num_experts
        self.is_pinned = pin != "off"
        self.wait_s = self.fault_s = self.lock_s = 0.0
        self._pin = pin
        self._locker = locker if locker is not None else PageLocker()
        self._available_bytes = available_bytes
        self._arenas: dict[int, Tensor] = {}
        self._payloads: dict[int, tuple[Tensor, ...]] = {}  # rows of the arenas, sliced once
        self._locked: list[int] = []  # addresses
        # Not at exit: the driver frees everything, and may be unloaded first.
        weakref.finalize(self, _unlock, self._locker, self._locked).atexit = False
        self._num_faulting = 0  # layers whose memory is claimed but not all faulted in
        self._guard = threading.Lock()

    @property
    def layer_bytes(self) -> int:
        return self.num_experts * self.codec.payload_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole store, open or not."""
        return self.num_layers * self.layer_bytes

    def open_layer(self, layer: int) -> Tensor:
        """Opens the layer's arena, uint8 [E, payload_bytes]: poisoned, and page-locked as `pin` says. Thread-safe.
        Raises SpecterError: too little host memory, or page-locking is required and refused."""
        start = time.perf_counter()
        self._claim_memory(layer)
        granted = time.perf_counter()
        try:
            memory = mmap.mmap(-1, self.layer_bytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            arena = torch.frombuffer(memory, dtype=torch.uint8).view(self.num_experts, -1)
            arena.fill_(_POISON)  # faults every page in, on all threads
        finally:
            with self._guard:
                self._num_faulting -= 1
        faulted = time.perf_counter()
        if self.is_pinned:
            self._lock(layer, arena)
        with self._guard:
            self.wait_s += granted - start
            self.fault_s += faulted - granted
            self.lock_s += time.perf_counter() - faulted
            self._arenas[layer] = arena
            self._payloads[layer] = arena.unbind(0)
        return arena

    def arena(self, layer: int) -> Tensor:
        """All payloads of a layer, uint8 [E, payload_bytes]; a view, read-only once filled."""
        return self._arenas[layer]

    def payload(self, expert: ExpertId) -> Tensor:
        """The payload of one expert, uint8 [payload_bytes]; a read-only view."""
        return self._payloads[expert.layer][expert.expert]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2F, D] and down [E, D, F] of one MoE layer; read-only views."""
        return self.codec.views(self._arenas[layer])

    def close(self) -> None:
        """Unregisters the page-locked memory. No copy may be in flight."""
        _unlock(self._locker, self._locked)
        self._arenas.clear()
        self._payloads.clear()

    def _lock(self, layer: int, arena: Tensor) -> None:
        try:
            self._locker.register(arena.data_ptr(), arena.numel())
            self._locked.append(arena.data_ptr())
        except OSError as error:
            what = (
                f"page-locking layer {layer} of the expert store was refused ({error}); "
                f"the store needs {self.num_bytes} bytes of page-locked host memory"
            )
            if self._pin == "require":
                raise SpecterError(what, "free host memory, or allow ordinary memory with pin=prefer") from None
            _log.warning("%s: using ordinary memory, copies to the device will be slow", what)
            self.is_pinned = False

    def _claim_memory(self, layer: int) -> None:
        """Waits until there is memory for this layer and those being opened. Raises SpecterError if there still is not
        after `_GROWTH_WAIT_S` in which no other layer was being opened."""
        deadline = time.monotonic() + _GROWTH_WAIT_S
        while True:
            with self._guard:
                others_bytes = self._num_faulting * self.layer_bytes
                available = self._available_bytes()
                if available >= others_bytes + self.layer_bytes + _RESERVE_BYTES:
                    self._num_faulting += 1
                    return
            if others_bytes:
                deadline = time.monotonic() + _GROWTH_WAIT_S
            elif time.monotonic() > deadline:
                raise SpecterError(
                    f"the expert store needs {self.num_bytes} bytes of host memory; at layer {layer} of "
                    f"{self.num_layers} only {available} are left for its {self.layer_bytes}",
                    "free host memory, or run on a machine with more",
                )
            time.sleep(_GROWTH_POLL_S)
