"""Copies by the driver's own call: the right bytes to the right place, on the stream that is current."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specter.errors import SpecterError
from specter.experts.store import RawCodec
from specter.models.cuda.arena import DeviceArena, DriverMover, load_driver, make_mover
from specter.models.cuda.store import PinnedStore
from specter.models.spec import ExpertId
from tests.cuda.fakes import FakeLocker

NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS = 3, 8, 5
SMALL = RawCodec(torch.bfloat16, 5, 7)  # slots are longer than payloads
BIG = RawCodec(torch.bfloat16, 1408, 2048)  # of DeepSeek-V2-Lite: a copy takes longer than its launch
on_device = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def filled_store(codec: RawCodec, locker: FakeLocker | None) -> PinnedStore:
    store = PinnedStore(codec, NUM_LAYERS, NUM_EXPERTS, "require", locker)
    for layer in range(NUM_LAYERS):
        generator = torch.Generator().manual_seed(layer)
        arena = store.open_layer(layer)
        arena.copy_(torch.randint(0, 255, arena.shape, dtype=torch.uint8, generator=generator))
    return store


class FakeDriver:
    """Copies within the host."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.streams: list[int] = []

    def cuMemcpyHtoDAsync_v2(self, target: int, source: int, num_bytes: int, stream: int) -> int:  # noqa: N802
        self.streams.append(stream)
        if self.status == 0:
            ctypes.memmove(target, source, num_bytes)
        return self.status

    def cuGetErrorName(self, status: int, name: Any) -> None:  # noqa: N802
        ctypes.cast(name, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_INVALID_VALUE"


@pytest.fixture
def on_stream_7(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))


@pytest.mark.usefixtures("on_stream_7")
def test_every_payload_goes_to_its_slot_and_nowhere_else() -> None:
    store, arena, driver = filled_store(SMALL, FakeLocker()), DeviceArena(NUM_SLOTS, SMALL), FakeDriver()
    before = arena.flat.clone()
    DriverMover(arena, store, driver)(ExpertId(2, 5), 3)
    assert driver.streams == [7]
    assert torch.equal(arena.flat[3, : SMALL.payload_bytes], store.payload(ExpertId(2, 5)))
    before[3, : SMALL.payload_bytes] = store.payload(ExpertId(2, 5))
    assert torch.equal(arena.flat, before), "padding or another slot was written"


@pytest.mark.usefixtures("on_stream_7")
def test_a_refused_copy_names_the_drivers_reason() -> None:
    mover = DriverMover(DeviceArena(NUM_SLOTS, SMALL), filled_store(SMALL, FakeLocker()), FakeDriver(status=1))
    with pytest.raises(RuntimeError, match="refused a copy: CUDA_ERROR_INVALID_VALUE"):
        mover(ExpertId(0, 0), 0)


def test_without_a_device_the_framework_copies() -> None:
    store, arena = filled_store(SMALL, FakeLocker()), DeviceArena(NUM_SLOTS, SMALL)
    make_mover(arena, store)(ExpertId(1, 2), 4)
    assert torch.equal(arena.flat[4, : SMALL.payload_bytes], store.payload(ExpertId(1, 2)))


def test_a_driver_that_is_not_there_is_named() -> None:
    with pytest.raises(SpecterError, match=r"libnone.so.1 cannot copy") as caught:
        load_driver("libnone.so.1")
    assert "install a driver" in caught.value.remedy
    with pytest.raises(SpecterError, match="cannot copy"):
        load_driver("libc.so.6")  # a library without the call


class TestOnDevice:
    pytestmark = on_device

    @pytest.fixture
    def store(self) -> Iterator[PinnedStore]:
        store = filled_store(BIG, None)
        yield store
        store.close()  # or the next mapping at its address could not be page-locked

    def test_every_payload_arrives(self, store: PinnedStore) -> None:
        arena = DeviceArena(NUM_SLOTS, BIG, "cuda")
        mover = make_mover(arena, store)
        assert isinstance(mover, DriverMover)
        for layer in range(NUM_LAYERS):
            for expert in range(NUM_EXPERTS):
                mover(ExpertId(layer, expert), expert % NUM_SLOTS)
                arrived = arena.flat[expert % NUM_SLOTS, : BIG.payload_bytes].cpu()
                assert torch.equal(arrived, store.payload(ExpertId(layer, expert)))

    def test_it_is_in_order_on_the_current_stream(self, store: PinnedStore) -> None:
        arena = DeviceArena(2, BIG, "cuda")
        mover, link = make_mover(arena, store), torch.cuda.Stream()
        assert arena.flat[0, : BIG.payload_bytes].amin() == 255  # now: a kernel's first use waits for all that runs
        torch.cuda.synchronize()
        slept, copied = torch.cuda.Event(), torch.cuda.Event()
        with torch.cuda.stream(link):
            torch.cuda._sleep(400_000_000)  # 0.2 s at the highest clock
            slept.record()
            mover(ExpertId(1, 1), 0)
            copied.record()
        assert arena.flat[0, : BIG.payload_bytes].amin() == 255, "still poison: read on another stream"
        assert not slept.query() and not copied.query(), "asynchronous, and behind what its own stream does"
        copied.synchronize()
        assert torch.equal(arena.flat[0, : BIG.payload_bytes].cpu(), store.payload(ExpertId(1, 1)))
        mover(ExpertId(1, 2), 0)  # on the default stream
        assert torch.equal(arena.flat[0, : BIG.payload_bytes].cpu(), store.payload(ExpertId(1, 2)))

    def test_it_returns_before_the_bytes_have_moved(self, store: PinnedStore) -> None:
        arena = DeviceArena(2, BIG, "cuda")
        mover, done = make_mover(arena, store), torch.cuda.Event()
        mover(ExpertId(0, 0), 0)
        torch.cuda.synchronize()
        for index in range(50):
            mover(ExpertId(0, index % NUM_EXPERTS), index % 2)
        done.record()
        assert not done.query()
        torch.cuda.synchronize()
