"""Stores of experts on the host: one page-locked arena per MoE layer, one flat payload per expert.

Memory is mapped in huge pages, faulted in by all threads, and then registered with the driver: a page-locked allocation
takes five times as long (5.1 s against 0.5 + 0.5 s for 8 GiB on an H200 machine). Several threads can open layers, so
one layer is registered while another is faulted in.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from specter import host_memory
from specter.errors import SpecterError
from specter.experts.store import RawCodec
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


class PinnedArenas:
    """Payloads of every routed expert in host memory. Each arena is opened once, filled, and then only read.

    `close` or the collection of the store unlocks the memory: a driver copies to unmapped pages that are registered.

    Attributes:
        is_pinned: all open arenas are page-locked; copies from other memory are slower and block the host.
        wait_s, fault_s, lock_s: time spent so far waiting for free memory, faulting pages in, and page-locking them;
            summed over threads.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        pin: Pin = "require",
        locker: PageLocker | None = None,
        available_bytes: Callable[[], int] = host_memory.available_bytes,
    ) -> None:
        """
        Args:
            pin: `require` page-locked memory, `prefer` it (ordinary memory where it is refused, which is logged and
                sets `is_pinned` to False), or `off`.
        """
        self.num_layers, self.num_experts = num_layers, num_experts
        self.is_pinned = pin != "off"
        self.wait_s = self.fault_s = self.lock_s = 0.0
        self._pin = pin
        self._locker = locker if locker is not None else PageLocker()
        self._available_bytes = available_bytes
        self._arenas: dict[int, Tensor] = {}  # uint8 [bytes of the layer]
        self._payloads: dict[int, tuple[Tensor, ...]] = {}  # parts of the arenas, sliced once
        self._locked: list[int] = []  # addresses
        # Not at exit: the driver frees everything, and may be unloaded first.
        weakref.finalize(self, _unlock, self._locker, self._locked).atexit = False
        self._faulting_bytes = 0  # of layers whose memory is claimed but not all faulted in
        self._guard = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of the open arenas."""
        return sum(arena.numel() for arena in self._arenas.values())

    def payload(self, expert: ExpertId) -> Tensor:
        """The payload of one expert, uint8 [its bytes]; a read-only view."""
        return self._payloads[expert.layer][expert.expert]

    def payloads(self, layer: int) -> tuple[Tensor, ...]:
        """The payloads of all experts of a layer."""
        return self._payloads[layer]

    def num_bytes_of(self, expert: ExpertId) -> int:
        """Bytes of one expert's payload: of one copy over the link."""
        return self._payloads[expert.layer][expert.expert].numel()

    def close(self) -> None:
        """Unregisters the page-locked memory. No copy may be in flight."""
        _unlock(self._locker, self._locked)
        self._arenas.clear()
        self._payloads.clear()

    def _open(self, layer: int, sizes: Sequence[int]) -> Tensor:
        """Opens the layer's arena, uint8 [bytes], for payloads of `sizes` bytes: poisoned, and page-locked as `pin`
        says. Thread-safe.
        Raises SpecterError: too little host memory, or page-locking is required and refused."""
        start = time.perf_counter()
        num_bytes = sum(sizes)
        self._claim_memory(layer, num_bytes)
        granted = time.perf_counter()
        try:
            memory = mmap.mmap(-1, num_bytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            arena = torch.frombuffer(memory, dtype=torch.uint8)
            arena.fill_(_POISON)  # faults every page in, on all threads
        finally:
            with self._guard:
                self._faulting_bytes -= num_bytes
        faulted = time.perf_counter()
        if self.is_pinned:
            self._lock(layer, arena)
        with self._guard:
            self.wait_s += granted - start
            self.fault_s += faulted - granted
            self.lock_s += time.perf_counter() - faulted
            self._arenas[layer] = arena
            self._payloads[layer] = arena.split(list(sizes))
        return arena

    def _lock(self, layer: int, arena: Tensor) -> None:
        try:
            self._locker.register(arena.data_ptr(), arena.numel())
            self._locked.append(arena.data_ptr())
        except OSError as error:
            what = (
                f"page-locking layer {layer} of the expert store was refused ({error}); "
                f"the store needs {self._whole_bytes(arena.numel())} bytes of page-locked host memory"
            )
            if self._pin == "require":
                raise SpecterError(what, "free host memory, or allow ordinary memory with pin=prefer") from None
            _log.warning("%s: using ordinary memory, copies to the device will be slow", what)
            self.is_pinned = False

    def _whole_bytes(self, layer_bytes: int) -> int:
        """Bytes of the whole store, as the open layers and one of `layer_bytes` tell."""
        return (self.num_bytes + layer_bytes) * self.num_layers // (len(self._arenas) + 1)

    def _claim_memory(self, layer: int, num_bytes: int) -> None:
        """Waits until there is memory for this layer and those being opened. Raises SpecterError if there still is not
        after `_GROWTH_WAIT_S` in which no other layer was being opened."""
        deadline = time.monotonic() + _GROWTH_WAIT_S
        while True:
            with self._guard:
                others_bytes = self._faulting_bytes
                available = self._available_bytes()
                if available >= others_bytes + num_bytes + _RESERVE_BYTES:
                    self._faulting_bytes += num_bytes
                    return
            if others_bytes:
                deadline = time.monotonic() + _GROWTH_WAIT_S
            elif time.monotonic() > deadline:
                raise SpecterError(
                    f"the expert store needs {self._whole_bytes(num_bytes)} bytes of host memory; at layer {layer} of "
                    f"{self.num_layers} only {available} are left for its {num_bytes}",
                    "free host memory, or run on a machine with more",
                )
            time.sleep(_GROWTH_POLL_S)


class PinnedStore(PinnedArenas):
    """16-bit experts: payloads of one size, laid out by `codec`."""

    def __init__(self, codec: RawCodec, num_layers: int, num_experts: int, *options: Any, **named: Any) -> None:
        """Options as in `PinnedArenas`."""
        super().__init__(num_layers, num_experts, *options, **named)
        self.codec = codec

    @property
    def layer_bytes(self) -> int:
        return self.num_experts * self.codec.payload_bytes

    def open_layer(self, layer: int) -> Tensor:
        """Opens the layer's arena, uint8 [E, payload_bytes]; see `PinnedArenas`."""
        self._open(layer, [self.codec.payload_bytes] * self.num_experts)
        return self.arena(layer)

    def arena(self, layer: int) -> Tensor:
        """All payloads of a layer, uint8 [E, payload_bytes]; a view, read-only once filled."""
        return self._arenas[layer].view(self.num_experts, -1)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2F, D] and down [E, D, F] of one MoE layer; read-only views."""
        return self.codec.views(self.arena(layer))


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Times of loading; `seconds` is from the first allocation to the last byte."""

    num_bytes: int
    seconds: float
    layer_s: tuple[float, ...]  # by layer
    wait_s: float  # waiting for free memory, summed over threads; overlaps the copies
    fault_s: float  # faulting pages in, likewise
    lock_s: float  # page-locking, likewise
    is_pinned: bool

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9

    @classmethod
    def of(cls, store: PinnedArenas, ends: Sequence[float]) -> LoadReport:
        """`ends`: the time of the first allocation, then of each layer's last byte, s."""
        layer_s = tuple(end - begin for begin, end in itertools.pairwise(ends))
        times = store.wait_s, store.fault_s, store.lock_s
        return cls(store.num_bytes, ends[-1] - ends[0], layer_s, *times, store.is_pinned)
