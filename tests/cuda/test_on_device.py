"""Store, slots and timeline on a real device."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
from rich.console import Console
from torch import Tensor

from specter.errors import SpecterError
from specter.experts.slots import stride_bytes
from specter.experts.store import RawCodec
from specter.models.cuda.arena import DeviceArena, open_arena
from specter.models.cuda.loaded_model import load_store
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.store import PinnedStore
from specter.models.spec import ExpertId
from specter.timeline.base import Event, Work
from specter.timeline.cuda import CudaTimeline
from tests.cuda.fakes import FakeLocker
from tests.helpers import TINY

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CODEC = RawCodec(torch.bfloat16, TINY.expert_inter, TINY.hidden)
BIG = RawCodec(torch.bfloat16, 256, 2048)  # 3 MB: a copy takes longer than its launch
WORK = Work("read", 0, 0, 1, 1)


class DeviceSource:
    """Random experts made on the device, as the inflation makes them."""

    spec = TINY

    def experts(self, layer: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator("cuda").manual_seed(layer)
        shape = (TINY.num_experts, 2 * TINY.expert_inter, TINY.hidden)
        down = (TINY.num_experts, TINY.hidden, TINY.expert_inter)
        return (
            torch.randn(shape, generator=generator, device="cuda"),
            torch.randn(down, generator=generator, device="cuda"),
        )


@pytest.fixture
def budget() -> Iterator[DeviceBudget]:
    yield DeviceBudget()
    torch.cuda.empty_cache()
    DeviceBudget()  # lifts whatever cap a test imposed


def test_loading_from_the_device_into_page_locked_memory() -> None:
    store, report = load_store(DeviceSource(), CODEC, Console(file=io.StringIO()))
    assert report.is_pinned and store.arena(0).is_pinned()
    for layer in range(TINY.num_moe_layers):
        for ours, made in zip(store.layer(layer), DeviceSource().experts(layer), strict=True):
            assert torch.equal(ours, made.bfloat16().cpu())
    arena = store.arena(0)
    store.close()
    assert not arena.is_pinned()


def test_ordinary_memory_works_too() -> None:
    store = PinnedStore(CODEC, TINY.num_moe_layers, TINY.num_experts, "prefer", FakeLocker(num_allowed=0))
    load_store(DeviceSource(), CODEC, Console(file=io.StringIO()), store=store)
    arena = DeviceArena(1, CODEC, "cuda")
    arena.write(0, store.payload(ExpertId(1, 3)))
    assert not store.is_pinned
    assert torch.equal(arena.gate_up[0].cpu(), store.layer(1)[0][3])


def test_a_slot_is_never_overwritten_while_it_is_read() -> None:
    num_experts, num_slots = 64, 2
    store = torch.randint(0, 255, (num_experts, BIG.payload_bytes), dtype=torch.uint8).pin_memory()
    arena = DeviceArena(num_slots, BIG, "cuda")
    seen = torch.zeros(num_experts, BIG.payload_bytes, dtype=torch.uint8, device="cuda")
    timeline = CudaTimeline()
    last_use: list[Event | None] = [None] * num_slots
    for expert in range(num_experts):
        slot = expert % num_slots

        def write(slot: int = slot, expert: int = expert) -> None:
            arena.write(slot, store[expert])

        def read(slot: int = slot, expert: int = expert) -> None:
            for _ in range(8):  # slower than the copy
                seen[expert].copy_(arena.flat[slot])

        used = last_use[slot]
        arrived = timeline.copy(BIG.payload_bytes, write, after=() if used is None else (used,))
        _, last_use[slot] = timeline.compute(WORK, read, after=(arrived,))
    timeline.drain()
    assert torch.equal(seen.cpu(), store)
    totals = timeline.totals()
    assert totals.num_copies == num_experts and totals.copied_bytes == store.numel()
    assert totals.link_busy_ns > 0 and totals.compute_busy_ns > 0


def test_elapsed_and_done() -> None:
    timeline = CudaTimeline()
    _, first = timeline.compute(WORK, lambda: None)
    _, second = timeline.compute(WORK, lambda: torch.cuda._sleep(10_000_000), after=(first,))
    assert not timeline.is_done(second)
    timeline.wait(second)
    assert timeline.is_done(second)
    assert timeline.elapsed_ns(first, second) > 1_000_000


def test_a_cap_is_enforced_and_its_peak_recorded(budget: DeviceBudget) -> None:
    torch.cuda.empty_cache()
    cap = torch.cuda.memory_reserved() + 2**28
    capped = DeviceBudget(cap_bytes=cap)
    num_slots = 2**29 // stride_bytes(BIG)
    with pytest.raises(SpecterError, match=f"an arena of {num_slots} experts"):
        open_arena(num_slots, BIG, capped)
    with pytest.raises(torch.OutOfMemoryError):  # also for those who did not ask first
        torch.empty(2**29, dtype=torch.uint8, device="cuda")
    arena = open_arena(8, BIG, capped)
    use = capped.use()
    assert arena.flat.numel() <= use.peak_allocated_bytes <= use.peak_reserved_bytes <= use.cap_bytes == cap
    with pytest.raises(SpecterError, match="more than the"):
        DeviceBudget(cap_bytes=2 * use.total_bytes)
