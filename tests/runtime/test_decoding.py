"""Payloads that are decoded before use: waves of the staging area, slots free behind the decode, bytes of each blob."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specter.engine import Engine
from specter.errors import SpecterError
from specter.experts.cache import ExpertCache
from specter.experts.residency import Residency
from specter.experts.transfer import Backend, Transfer
from specter.floors import RoundAccess, floor_ideal
from specter.models.spec import ExpertId
from specter.timeline.trace import TraceOp
from specter.timeline.virtual import VirtualTimeline
from tests.runtime.fakes import COSTS, MACHINE, TINY, FakeModel, make_engine, make_eviction

CODED = replace(COSTS, coded_bytes=COSTS.expert_bytes // 2)
DECODES = replace(MACHINE, int_ops=10**13)


def num_bytes(expert: ExpertId) -> int:
    """Every blob has a size of its own."""
    return 1_000_000 + 10_000 * expert.layer + 1000 * expert.expert


def coded_engine(num_slots: int, draft_len: int, max_wave: int) -> Engine:
    model = FakeModel()
    plain = make_engine(model, num_slots, draft_len, timeline=VirtualTimeline(DECODES, trace=True))
    transfer = Transfer(Backend(plain.timeline, model.move), num_bytes)
    cache = ExpertCache(Residency(num_slots), make_eviction("lru", num_slots), transfer, max_wave)
    return replace(plain, cache=cache, costs=CODED)


def compute(engine: Engine) -> list[TraceOp]:
    return [op for op in engine.timeline.ops or [] if op.lane == "compute"]


@pytest.mark.parametrize("draft_len", [0, 3])
@pytest.mark.parametrize(("num_slots", "max_wave"), [(2, 2), (24, 2), (24, 3)])
def test_tokens_stay_and_every_wave_is_decoded_before_it_runs(num_slots: int, max_wave: int, draft_len: int) -> None:
    """`FakePass` checks that the places hold what was decoded from the slots, each once."""
    engine = coded_engine(num_slots, draft_len, max_wave)
    tokens = engine.generate([1, 2, 3], 20).tokens
    assert tokens == make_engine(FakeModel(), 24, 0).generate([1, 2, 3], 20).tokens
    labels = [op.label for op in compute(engine)]
    decodes = [index for index, label in enumerate(labels) if label == "decode"]
    assert decodes and all(labels[index + 1] == "experts" for index in decodes)
    assert labels.count("experts") == len(decodes)
    one = CODED.decode(1).hbm_bytes
    sizes = [op.num_bytes // one for op in compute(engine) if op.label == "decode"]
    assert min(sizes) >= 1 and max(sizes) <= max_wave
    if num_slots == 24 and draft_len:  # hits of a layer are more than a wave, and are split
        assert max(sizes) == max_wave


def test_a_slot_is_free_when_its_blob_is_decoded_and_not_when_its_expert_has_run() -> None:
    """Two slots: the third expert's copy starts at the end of a decode, while that expert is computed."""
    engine = coded_engine(2, 0, 2)
    engine.generate([1, 2, 3], 8)
    ends = {op.end_ns for op in compute(engine) if op.label == "decode"}
    starts = {op.start_ns for op in engine.timeline.ops or [] if op.lane == "link"}
    assert ends & starts
    assert not {op.end_ns for op in compute(engine) if op.label == "experts"} & starts


@pytest.mark.parametrize("draft_len", [0, 3])
def test_records_count_the_bytes_of_each_blob(draft_len: int) -> None:
    engine = coded_engine(6, draft_len, 2)
    generation = engine.generate([1, 2, 3], 20)
    copied = [op.num_bytes for op in engine.timeline.ops or [] if op.lane == "link"]
    known = {num_bytes(ExpertId(layer, expert)) for layer in range(3) for expert in range(8)}
    assert set(copied) <= known and len(set(copied)) > 1
    assert all(record.writeback_bytes == 0 for record in generation.rounds)
    of_rounds = sum(record.prefetch_bytes + record.fetch_bytes for record in generation.rounds)
    assert generation.prefill_bytes + of_rounds == sum(copied)


def test_floors_charge_decoding() -> None:
    """Everything resident: what is left is the decode of 6 experts, bound by integer operations."""
    access = [RoundAccess(0, 1, [[0, 1]] * 3)]
    num_slots = TINY.num_moe_layers * TINY.num_experts
    slow = replace(DECODES, int_ops=10**11)
    floor = floor_ideal(access, num_slots, CODED, slow)
    assert floor.tpot_ms == pytest.approx(CODED.decode(6).int_ops / 10**11 * 1e3, rel=1e-6)
    assert floor.tpot_ms > floor_ideal(access, num_slots, COSTS, slow).tpot_ms


def test_a_machine_without_an_integer_rate_is_refused() -> None:
    from harness.plan import compose

    with pytest.raises(SpecterError, match=r"(?s)int_ops.*hardware.int_ops"):
        compose(["system=lru_residual", "hardware.int_ops=0"])
