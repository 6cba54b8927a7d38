"""Layer-major prefill through two half arenas, with the CPU decoder on the virtual clock."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specter.errors import SpecterError
from specter.experts.store import RawCodec
from specter.models.cuda.arena import DeviceArena
from specter.models.cuda.prefill import LayerStream
from specter.models.cuda.store import PinnedStore
from specter.timeline.hardware import Hardware
from specter.timeline.virtual import VirtualTimeline
from tests.cuda.fakes import FakeLocker
from tests.helpers import TINY, Live, random_live, run_pass

HARDWARE = Hardware("test", 10**9, 1, 10**9, 10**9, 0, 0, 0, 0, "test")
TOKENS = [(7 * i + 3) % TINY.vocab for i in range(70)]  # five tiles of 16


def pinned(live: Live) -> PinnedStore:
    store = PinnedStore(live.store.codec, TINY.num_moe_layers, TINY.num_experts, locker=FakeLocker())
    for layer in range(TINY.num_moe_layers):
        for place, value in zip(store.codec.views(store.open_layer(layer)), live.store.layer(layer), strict=True):
            place.copy_(value)
    return store


def test_same_bits_as_any_other_pass_and_one_copy_per_layer(tmp_path: Path) -> None:
    live = random_live(tmp_path, num_slots=TINY.num_experts)
    expected = run_pass(live.decoder, live.store, TOKENS, 0, num_outputs=1)
    live.decoder.reset()
    arena = DeviceArena(2 * TINY.num_experts, live.store.codec)
    live.decoder.arena = arena
    timeline = VirtualTimeline(HARDWARE)
    stream = LayerStream(pinned(live), arena, timeline)
    for _ in range(2):  # the second time over used halves
        outputs = stream.prefill(TINY, live.decoder.target_pass(TOKENS, 0, 1))
        assert torch.equal(torch.stack([*outputs]), torch.stack(expected.outputs))
        live.decoder.reset()
    assert timeline.totals().num_copies == 2 * TINY.num_moe_layers
    assert timeline.totals().copied_bytes == 2 * TINY.experts_params * 4


def test_an_arena_of_less_than_two_layers_is_refused() -> None:
    codec = RawCodec(torch.float32, TINY.expert_inter, TINY.hidden)
    store = PinnedStore(codec, TINY.num_moe_layers, TINY.num_experts, locker=FakeLocker())
    with pytest.raises(SpecterError, match="needs 16 slots; there are 15"):
        LayerStream(store, DeviceArena(15, codec), VirtualTimeline(HARDWARE))
