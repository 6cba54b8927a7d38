"""The decoder's own promises: slots, cache, draft, bad calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specter.errors import SpecterError
from specter.experts.slots import SLOT_ALIGNMENT_BYTES, SlotArena
from specter.experts.store import ExpertStore, RawCodec
from specter.models.checkpoint import Checkpoint
from specter.models.cpu.decoder import Decoder
from specter.models.spec import ExpertId, ModelSpec
from specter.models.weights import DecoderWeights, DraftExperts
from tests.helpers import FAMILIES, TINY, Live, quantize, random_live, run_pass, write_random

TOKENS = [1, 2, 3, 5, 8, 13, 21]


@pytest.fixture
def live(tmp_path: Path) -> Live:
    return random_live(tmp_path)


def test_payload_round_trip_and_aligned_slots() -> None:
    codec = RawCodec(torch.float32, 3, 5)
    gate_up, down = torch.randn(2, 6, 5), torch.randn(2, 5, 3)
    store = ExpertStore(codec, [(gate_up, down)])
    arena = SlotArena(3, codec)
    assert arena.gate_up.isnan().all() and arena.down.isnan().all()
    arena.write(2, store.payload(ExpertId(0, 1)))
    assert torch.equal(arena.gate_up[2], gate_up[1]) and torch.equal(arena.down[2], down[1])
    assert torch.equal(arena.gate_up_t[2], gate_up[1].t()) and torch.equal(arena.down_t[2], down[1].t())
    assert arena.gate_up[:2].isnan().all()
    assert arena.gate_up[1].data_ptr() % SLOT_ALIGNMENT_BYTES == 0
    arena.poison(2)
    assert arena.gate_up.isnan().all() and arena.down.isnan().all()


def test_unloaded_slot_shows(live: Live) -> None:
    target = live.decoder.target_pass(TOKENS, 0, 1)
    assert target.attend_and_route(0) is None
    routing = target.attend_and_route(1)
    assert routing is not None
    experts = np.unique(routing).tolist()
    target.run_experts(1, experts, list(range(len(experts))))
    target.combine(1)
    assert target.outputs()[0].isnan().all()


def test_forgotten_expert_shows(live: Live) -> None:
    target = live.decoder.target_pass(TOKENS, 0, 1)
    target.attend_and_route(0)
    target.attend_and_route(1)
    with pytest.raises(AssertionError, match="results of experts are missing"):
        target.combine(1)


def test_outputs_are_the_last_rows(live: Live) -> None:
    tokens = TOKENS * 5  # three tiles
    everything = run_pass(live.decoder, live.store, tokens, 0).outputs
    for num_outputs in (0, 1, 2, 18, 35):
        live.decoder.reset()
        some = run_pass(live.decoder, live.store, tokens, 0, num_outputs).outputs
        assert len(some) == num_outputs
        assert all(torch.equal(a, b) for a, b in zip(some, everything[len(tokens) - num_outputs :], strict=True))


def test_padding_is_written_nowhere(live: Live) -> None:
    run_pass(live.decoder, live.store, TOKENS, 0)
    latents = live.decoder.cache.entries
    assert latents[:, : len(TOKENS)].any(dim=-1).all()
    assert not latents[:, len(TOKENS) :].any()


@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES.keys())
def test_draft_follows_a_target_with_int4_experts(spec: ModelSpec, tmp_path: Path) -> None:
    """The draft is the target with other experts: a store of the dequantised ones makes them agree."""
    live = random_live(tmp_path, spec)
    draft = DraftExperts(quantize(spec, live.store), torch.float32, "cpu")
    store = ExpertStore(live.store.codec, zip(draft.gate_up, draft.down_t.transpose(2, 3), strict=True))
    passed = run_pass(live.decoder, store, TOKENS, 0)
    live.decoder.reset()
    for i, token in enumerate(TOKENS):
        step = live.decoder.draft_row(token, i)
        assert step.routing.dtype == np.int16
        np.testing.assert_array_equal(step.routing, np.stack([rows[i] for rows in passed.routing]))
        torch.testing.assert_close(step.output, passed.outputs[i], rtol=1e-4, atol=1e-4)


def test_positions_outside_the_cache(tmp_path: Path) -> None:
    decoder = random_live(tmp_path, capacity=6).decoder
    with pytest.raises(SpecterError, match="7 positions do not fit the KV cache of 6"):
        decoder.target_pass(TOKENS, 0, 1)
    with pytest.raises(SpecterError, match="position 3 lies beyond the 0 cached ones"):
        decoder.draft_row(1, 3)
    with pytest.raises(SpecterError, match="0 tokens"):
        decoder.target_pass([], 0, 0)


def test_mismatched_settings(tmp_path: Path) -> None:
    write_random(tmp_path, TINY)
    checkpoint = Checkpoint.open(tmp_path)
    arena = SlotArena(2, RawCodec(torch.bfloat16, TINY.expert_inter, TINY.hidden))
    with pytest.raises(SpecterError, match="slots hold torch.bfloat16"):
        Decoder(TINY, DecoderWeights.load(checkpoint), arena, None)
    with pytest.raises(SpecterError, match="compute in torch.bfloat16"):
        Decoder(TINY, DecoderWeights.load(checkpoint, torch.bfloat16), arena, None)
    arena = SlotArena(2, RawCodec(torch.float32, TINY.expert_inter, TINY.hidden))
    with pytest.raises(SpecterError, match="KV capacity 4096 is outside"):
        Decoder(TINY, DecoderWeights.load(checkpoint), arena, None, capacity=4096)
    decoder = Decoder(TINY, DecoderWeights.load(checkpoint), arena, None)
    with pytest.raises(SpecterError, match="no draft"):
        decoder.draft_row(0, 0)
