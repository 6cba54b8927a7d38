"""The pinned store without a device: a page locker of our own stands for the driver."""

from __future__ import annotations

import dataclasses
import gc
import io
import logging
import threading
import time

import psutil
import pytest
import torch
from rich.console import Console
from torch import Tensor

from specter import host_memory
from specter.errors import SpecterError
from specter.experts.store import ExpertStore, RawCodec
from specter.models.cuda.loaded_model import load_store
from specter.models.cuda.memory import check_fits
from specter.models.cuda.store import PinnedStore
from specter.models.spec import ExpertId
from tests.cuda.fakes import FakeLocker
from tests.helpers import TINY

CODEC = RawCodec(torch.bfloat16, TINY.expert_inter, TINY.hidden)
PLENTY = 2**40


class Source:
    """Random experts, made anew at every call."""

    spec = TINY

    def experts(self, layer: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(layer)
        shape = (TINY.num_experts, 2 * TINY.expert_inter, TINY.hidden)
        down = (TINY.num_experts, TINY.hidden, TINY.expert_inter)
        return torch.randn(shape, generator=generator), torch.randn(down, generator=generator)


def empty_store(locker: FakeLocker, pin: str = "require", available: int = PLENTY) -> PinnedStore:
    return PinnedStore(CODEC, TINY.num_moe_layers, TINY.num_experts, pin, locker, lambda: available)


def load(locker: FakeLocker, pin: str = "require") -> tuple[PinnedStore, str]:
    text = io.StringIO()
    store, report = load_store(Source(), CODEC, Console(file=text, width=120), store=empty_store(locker, pin))
    assert report.num_bytes == TINY.experts_params * 2 and report.is_pinned == store.is_pinned
    return store, text.getvalue()


def test_every_payload_arrives_and_every_arena_is_locked() -> None:
    locker = FakeLocker()
    store, shown = load(locker)
    plain = ExpertStore(CODEC, (Source().experts(layer) for layer in range(TINY.num_moe_layers)))
    for layer in range(TINY.num_moe_layers):
        assert locker.locked[store.arena(layer).data_ptr()] == store.layer_bytes
        for expert in range(TINY.num_experts):
            assert torch.equal(store.payload(ExpertId(layer, expert)), plain.payload(ExpertId(layer, expert)))
        for ours, theirs in zip(store.layer(layer), plain.layer(layer), strict=True):
            assert torch.equal(ours, theirs)
    assert store.num_bytes == TINY.num_moe_layers * TINY.num_experts * plain.codec.payload_bytes
    assert "load experts" in shown
    store.close()
    assert not locker.locked


def test_a_store_that_nobody_closes_leaves_nothing_locked() -> None:
    locker = FakeLocker()
    store, _ = load(locker)
    assert locker.locked
    del store
    gc.collect()
    assert not locker.locked


def test_refused_page_locking_names_the_bytes_needed_and_leaves_nothing_locked() -> None:
    locker = FakeLocker(num_allowed=1)
    with pytest.raises(SpecterError, match=f"needs {TINY.experts_params * 2} bytes of page-locked"):
        load(locker)
    assert not locker.locked


def test_prefer_goes_on_in_ordinary_memory_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        store, _ = load(FakeLocker(num_allowed=1), pin="prefer")
    assert not store.is_pinned
    assert "ordinary memory" in caplog.text
    assert torch.equal(store.layer(2)[0], Source().experts(2)[0].bfloat16())


def test_off_locks_nothing() -> None:
    locker = FakeLocker()
    store, _ = load(locker, pin="off")
    assert not locker.locked and not store.is_pinned


def test_short_host_memory_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specter.models.cuda.store._GROWTH_WAIT_S", 0.0)
    with pytest.raises(SpecterError, match=f"needs {TINY.experts_params * 2} bytes of host memory"):
        empty_store(FakeLocker(), available=2**20).open_layer(0)


class Growing:
    """Available memory that grows with each query."""

    def __init__(self, bytes_a_question: int) -> None:
        self.bytes_a_question = bytes_a_question
        self.given = 0

    def __call__(self) -> int:
        self.given += self.bytes_a_question
        return self.given


def test_memory_that_comes_slowly_is_waited_for() -> None:
    store = PinnedStore(CODEC, TINY.num_moe_layers, TINY.num_experts, "require", FakeLocker(), Growing(2**27))
    load_store(Source(), CODEC, Console(file=io.StringIO()), store=store)
    assert store.wait_s > 0.0
    assert torch.equal(store.layer(1)[0], Source().experts(1)[0].bfloat16())


def test_layers_being_opened_count_as_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads that each see room for one layer must not take three."""
    most, under_way, guard = 0, 0, threading.Lock()

    def slow_fill(arena: Tensor, value: int) -> Tensor:
        nonlocal most, under_way
        with guard:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.02)
        with guard:
            under_way -= 1
        return arena

    monkeypatch.setattr(Tensor, "fill_", slow_fill)
    monkeypatch.setattr("specter.models.cuda.store._GROWTH_WAIT_S", 0.001)
    for num_layers in (1, 2):
        store = empty_store(FakeLocker())
        room = 512 * 2**20 + num_layers * store.layer_bytes
        store = empty_store(FakeLocker(), available=room)
        most = 0
        load_store(Source(), CODEC, Console(file=io.StringIO()), store=store)
        assert 1 <= most <= num_layers


def test_a_failing_source_leaves_nothing_locked() -> None:
    class Damaged(Source):
        def experts(self, layer: int) -> tuple[Tensor, Tensor]:
            if layer == 1:
                raise SpecterError("layer 1 is damaged", "make it anew")
            return super().experts(layer)

    locker = FakeLocker()
    with pytest.raises(SpecterError, match="layer 1 is damaged"):
        load_store(Damaged(), CODEC, Console(file=io.StringIO()), store=empty_store(locker))
    assert not locker.locked


def test_an_unfilled_payload_is_nan() -> None:
    gate_up, down = CODEC.views(empty_store(FakeLocker()).open_layer(0))
    assert gate_up.isnan().all() and down.isnan().all()


def test_available_memory_is_of_this_machine() -> None:
    assert 2**20 < host_memory.available_bytes() < psutil.virtual_memory().total


def test_the_device_budget_names_what_is_missing() -> None:
    check_fits(10, 10, "an arena", 40)
    with pytest.raises(SpecterError, match="an arena needs 11 bytes") as refused:
        check_fits(11, 10, "an arena", 40)
    assert "raise the device budget by 1 bytes" in refused.value.remedy


def test_reports_are_plain_data() -> None:
    _, report = load_store(Source(), CODEC, Console(file=io.StringIO()), store=empty_store(FakeLocker()))
    assert dataclasses.asdict(report)["seconds"] > 0 and report.gb_per_s > 0
