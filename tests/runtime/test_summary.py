"""Records, metrics and floors of a small model, every number worked out by hand.

On the machine `BY_HAND` a byte in device memory takes 1 ns, a copy of one expert 5000 ns, and nothing else any time:
flops, launches, kernels and syncs are free. Operations take their bytes in `tests.charges.tariff`:

    draft step 7916 · dense layer 2972 · attention, router, shared 3196 · n experts 192 n + 64 · combine 704 · head 832
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from specter.errors import SpecterError
from specter.experts.transfer import Backend
from specter.floors import Floor, RoundAccess, floor_ideal, floor_trace, min_loads
from specter.metrics import summarize
from specter.models.spec import ExpertId
from specter.records import Generation, PlanRecord, RoundRecord
from specter.resolve import ResolvedRun, resolve
from specter.session import build_engine
from specter.speculation.accept import TokenSampler
from specter.timeline.costs import CostModel
from specter.timeline.hardware import Hardware
from specter.timeline.payload import Slots
from specter.timeline.virtual import VirtualTimeline
from tests.charges.logged import BY_HAND as SCRIPT
from tests.charges.logged import LoggedTimeline, ScriptedModel
from tests.charges.runs import make_config
from tests.charges.tariff import KV_CAPACITY, SPEC, TILE_ROWS

COSTS = CostModel(SPEC, TILE_ROWS, KV_CAPACITY)
BY_HAND = Hardware(
    name="by hand",
    hbm_bytes_per_s=10**9,
    device_memory_bytes=10**6,
    bf16_flops=10**18,
    link_bytes_per_s=10**15,
    link_latency_ns=4999,  # and one for the bytes, rounded up
    launch_ns=0,
    kernel_ns=0,
    sync_ns=0,
    source="tests",
)

# -- records ----------------------------------------------------------------------------------
#
# `specter`, K = 3, three slots per MoE layer; what is issued is in tests/charges/rounds/specter-slow.txt. Prefill takes
# 2972 + 3196, two copies of 5000, 256 + 704 + 3196 (the first wave hides behind the second copy), two copies and
# 256 + 704 + 832: it ends at 32116.
#
# Round 1, all drafts right. Draft steps end at 40032, 47948 and 55864. Copies: three from 40032, two behind them until
# 65032, of which three have ended at 55864. The pass waits for the last one: dense until 68004, L0 routed at 71200.
# Wave of three until 71840, copy until 76840, wave until 77096, combine until 77800, L1 routed at 80996. Wave of three
# until 81636, copies until 86636 and 91636, wave until 91892, combine until 92596, head until 93428.
FIRST = RoundRecord(
    index=0,
    start_ms=0.032116,
    draft_end_ms=0.055864,
    end_ms=0.093428,
    draft_len=3,
    accepted_len=3,
    new_len=4,
    prefetch_bytes=5 * 192,
    fetch_bytes=3 * 192,
    writeback_bytes=0,
    num_hits=4,  # L0: E0, E2; L1: E2, E3
    num_late_hits=2,  # L0: E3; L1: E0, under way when the draft ended
    num_misses=3,  # L0: E5; L1: E1, E4
    num_prefetched=5,
    num_prefetched_used=5,
    union_mean=(4 + 5) / 2,
    stall_ms=0.023912,  # before the dense layer 65032 - 55864, in L0 5000, in L1 5000 and 91636 - 86892
    link_busy_ms=0.040000,
    need_ms=0.041280,  # 40032 to 65032, 71200 to 76840, 80996 to 91636
    compute_busy_ms=0.037400,  # all but the stall: the host takes no time
    plans=(PlanRecord(1, "initial", 3, 1), PlanRecord(2, "overlap", 2, 1)),
)
# Round 2, K = 2 of three tokens that remain; the second draft is wrong. Draft steps end at 101344 and 109260. Four
# copies from 101344 to 121344, of which one has ended at 109260. Dense until 124316, L0 routed at 127512, copy until
# 132512, wave of one until 132768, combine until 133472, L1 routed at 136668, copies until 141668 and 146668, wave
# until 146924, combine until 147628, head until 148460.
SECOND = RoundRecord(
    index=1,
    start_ms=0.093428,
    draft_end_ms=0.109260,
    end_ms=0.148460,
    draft_len=2,
    accepted_len=1,
    new_len=2,
    prefetch_bytes=4 * 192,
    fetch_bytes=3 * 192,
    writeback_bytes=0,
    num_hits=1,  # L0: E1
    num_late_hits=3,  # L0: E4; L1: E0, E5
    num_misses=3,  # L0: E2; L1: E1, E3
    num_prefetched=4,
    num_prefetched_used=4,
    union_mean=(3 + 4) / 2,
    stall_ms=0.025932,  # 121344 - 109260; 132512 - 127960; 141668 - 137116 and 146668 - 141924
    link_busy_ms=0.035000,
    need_ms=0.035000,  # 101344 to 121344, 127512 to 132512, 136668 to 146668
    compute_busy_ms=0.029100,
    plans=(PlanRecord(1, "initial", 4, 1),),  # the next boundary would be the last draft token
)


def test_records_of_two_rounds(tmp_path: Path) -> None:
    config = make_config("specter", tmp_path)
    model = ScriptedModel(LoggedTimeline(), replace(SCRIPT, wrong=frozenset({7})))
    engine = build_engine(resolve(config), model, TokenSampler(), Backend(VirtualTimeline(BY_HAND)))
    generation = engine.generate([0], 8)
    assert (generation.clock, generation.prompt_len, generation.prefill_bytes) == ("virtual", 1, 4 * 192)
    assert (generation.start_ms, generation.prefill_end_ms) == (0.0, 0.032116)
    assert generation.residents == RESIDENTS
    assert [asdict(record) for record in generation.rounds[:2]] == [asdict(FIRST), asdict(SECOND)]
    third = generation.rounds[2]
    assert (third.index, third.draft_len, third.accepted_len, third.new_len) == (2, 0, 0, 1)


def test_times_of_a_later_generation_count_from_the_same_origin(tmp_path: Path) -> None:
    """A run follows its warm-up on one clock; prefill finds in the cache what the warm-up left."""
    run, model = resolve(make_config("lru", tmp_path)), ScriptedModel(LoggedTimeline())
    engine = build_engine(run, model, TokenSampler(), Backend(VirtualTimeline(BY_HAND)))
    first = engine.generate([0], 1)
    second = engine.generate([0], 1)
    assert (first.start_ms, first.prefill_end_ms, first.prefill_bytes) == (0.0, 0.032116, 4 * 192)
    assert (second.start_ms, second.prefill_bytes) == (0.032116, 0)
    hits_ns = 2972 + 2 * (3196 + 448 + 704) + 832  # both experts of a layer in one wave
    assert second.prefill_end_ms == (32116 + hits_ns) / 1e6
    third = engine.generate(range(5), 1)  # L0 lacks 2, 3 and 5, L1 lacks 2, 3 and 4
    assert third.prefill_bytes == 6 * 192
    before = engine.timeline.totals().copied_bytes
    fourth = engine.generate(range(5), 1)
    assert fourth.prefill_bytes == engine.timeline.totals().copied_bytes - before > 0


# -- metrics ----------------------------------------------------------------------------------

ACCESSES = [
    RoundAccess(3, 4, [[0, 2, 3, 5], [0, 1, 2, 3, 4]]),
    RoundAccess(2, 2, [[1, 2, 4], [0, 1, 3, 5]]),
]
RESIDENTS = [ExpertId(layer, expert) for layer in (0, 1) for expert in (0, 1)]
# Device-memory bytes of a pass over no experts: layers, rows read by one wave per MoE layer, combines, head.
PASS = 2972 + 2 * 3196 + 2 * 64 + 2 * 704 + 832
DRAFTS = (3 * 7916, 2 * 7916)
ROUNDS = (DRAFTS[0] + PASS + 9 * 192, DRAFTS[1] + PASS + 7 * 192)
assert (PASS, ROUNDS) == (11732, (37208, 28908))
# The ideal loads 9 - 6 and 7 - 6 experts, which hide behind the device. The fewest loads possible on this trace are
# three for each layer of round 1 (L0: 2, 3, 5; L1: 2, 3, 4) and, with 1 and 2 of L0 and 0, 1 and 3 of L1 kept, one for
# each of round 2. Of the six loads of round 1 three have a free slot while it drafts: the others follow the draft.
IDEAL_MS = sum(ROUNDS) / 6 / 1e6
TRACE_MS = (DRAFTS[0] + 6 * 5000 - 3 * 5000 + ROUNDS[1]) / 6 / 1e6


def generation(*records: RoundRecord) -> Generation:
    tokens = list(range(1 + sum(record.new_len for record in records)))
    return Generation(
        "virtual", 1, tokens, start_ms=0.002, prefill_end_ms=0.032116, prefill_bytes=768, rounds=list(records),
        residents=RESIDENTS, stop_reason="length",
    )  # fmt: skip


def summary(*records: RoundRecord) -> dict[str, Any]:
    config = replace(make_config("specter", None), hardware=BY_HAND)
    return summarize(
        ResolvedRun(config, COSTS, Slots(6, COSTS.payload_bytes)), generation(*records), ACCESSES[: len(records)]
    )


def close(values: dict[str, Any]) -> dict[str, Any]:
    """Floats to within rounding, everything else exactly."""
    return {key: pytest.approx(one, rel=1e-12) if isinstance(one, float) else one for key, one in values.items()}


MEMORY = {
    # 256 weights of the embedding and 2110 others, 40 positions of 9 numbers in 3 layers, 12 experts of 96 weights
    "device_shared_bytes": 2 * 2366,
    "device_kv_bytes": 2 * 3 * 40 * 9,
    "device_draft_bytes": 594,  # 1152 weights at 4.125 bits
    "device_draft_shared_bytes": 0,
    "device_draft_kv_bytes": 0,
    "device_buffer_bytes": 0,
    "device_staging_bytes": 0,
    "device_tail_bytes": 0,
    "device_slot_bytes": 6 * 192,
    "device_total_bytes": 8638,
    "fits_device": True,
    "fits_without_offloading": True,
}
PREFILL = {
    "clock": "virtual",
    "num_prompt_tokens": 1,
    "ttft_ms": 0.032116 - 0.002,
    "prefill_bytes": 768,
    "distinct_4grams": 1.0,
    "stop_reason": "length",
    "num_tokens_to_eos": None,
    "num_slots": 6,
    "fits_budget": True,
    "experts_per_layer": 3.0,
    "bits_per_weight": 16.0,
    "frac_slot_unused": 0.0,
}
METRICS = {
    **PREFILL,
    **MEMORY,
    "num_new_tokens": 7,
    "num_rounds": 2,
    "tpot_ms": 0.116344 / 6,  # from 0.032116 to 0.148460
    "tpot_after_first_round_ms": 0.055032 / 2,
    "end_to_end_ms": 0.146460,
    "tok_per_s": 6 / 0.116344e-3,
    "draft_ms": 5 * 0.007916,
    "num_drafted": 5,
    "num_accepted": 4,
    "acceptance": 4 / 5,  # all of round 1 and the two examined in round 2
    "acceptance_to_eos": 4 / 5,  # all of round 1 and the two examined in round 2
    "mean_accepted_len": 2.0,
    "union_mean": 4.0,
    "num_hits": 5,
    "num_late_hits": 5,
    "num_misses": 6,
    "hit_rate": 5 / 16,
    "num_prefetched": 9,
    "num_plans": 3,
    "num_overlap_plans": 1,
    "first_chunk_len": 1.0,
    "frac_prefetched_used": 7 / 9,
    "link_bytes": 16 * 192,  # nine prefetches, six fetches and a write-back
    "bytes_per_token": 512.0,
    "link_busy_frac": 0.075 / 0.116344,
    "need_ms": 0.076280,
    "link_busy_in_need_frac": 0.075 / 0.076280,
    "link_bytes_per_s": 16 * 192 / 75e-6,
    "compute_busy_frac": 0.0665 / 0.116344,
    "stall_ms": 0.049844,
    "decode_floor_ms": 0.0,
    "floor_ideal_ms": IDEAL_MS,
    "floor_trace_ms": TRACE_MS,
    "over_floor_ideal": 0.116344 / 6 / IDEAL_MS,
    "over_floor_trace": 0.116344 / 6 / TRACE_MS,
    "min_loads": 8,
}


def test_every_metric_of_two_rounds() -> None:
    first = replace(FIRST, num_prefetched_used=3, writeback_bytes=192)
    assert summary(first, SECOND) == close(METRICS)


def test_a_generation_without_rounds_has_prefill_and_memory_alone() -> None:
    assert summary() == close({**PREFILL, **MEMORY, "num_new_tokens": 1, "num_rounds": 0})


def test_a_round_that_moves_and_drafts_nothing_has_no_rates_of_either() -> None:
    quiet = replace(
        FIRST, draft_len=0, accepted_len=0, new_len=1, prefetch_bytes=0, fetch_bytes=0, num_prefetched=0,
        num_prefetched_used=0, link_busy_ms=0.0, need_ms=0.0,
    )  # fmt: skip
    found = summary(quiet)
    without = (
        "acceptance",
        "acceptance_to_eos",
        "mean_accepted_len",
        "frac_prefetched_used",
        "link_busy_in_need_frac",
        "link_bytes_per_s",
    )
    assert {key: found[key] for key in without} == dict.fromkeys(without)
    assert found["tpot_after_first_round_ms"] is None
    assert (found["link_bytes"], found["link_busy_frac"]) == (0, 0.0)


def test_the_first_rejected_draft_of_a_round_is_examined_and_those_behind_it_are_not() -> None:
    rejected = replace(FIRST, accepted_len=1, new_len=2)
    assert summary(rejected, SECOND)["acceptance"] == 2 / 4
    assert summary(replace(rejected, accepted_len=0, new_len=1), SECOND)["acceptance"] == 1 / 3


# -- floors -----------------------------------------------------------------------------------


def test_floors_of_two_rounds() -> None:
    device_ms = sum(ROUNDS) / 1e6
    ideal = floor_ideal(ACCESSES, 6, COSTS, BY_HAND)
    trace = floor_trace(ACCESSES, 6, COSTS, BY_HAND, RESIDENTS)
    strict_ms = device_ms / 6  # 8 * 5000 on the link are less
    assert asdict(ideal) == pytest.approx(asdict(Floor(IDEAL_MS, strict_ms, 4)))
    assert asdict(trace) == pytest.approx(asdict(Floor(TRACE_MS, strict_ms, 8)))


def test_floors_of_a_slow_link() -> None:
    """A copy of 50000 ns: the link binds in every round, and drafting hides at most itself."""
    slow = replace(BY_HAND, link_latency_ns=49999)
    ideal = floor_ideal(ACCESSES, 6, COSTS, slow)
    trace = floor_trace(ACCESSES, 6, COSTS, slow, RESIDENTS)
    assert ideal.tpot_ms == pytest.approx((3 * 50000 + 50000) / 6 / 1e6)
    assert ideal.strict_tpot_ms == pytest.approx(4 * 50000 / 6 / 1e6)
    assert trace.tpot_ms == pytest.approx((6 * 50000 + 2 * 50000) / 6 / 1e6)
    assert trace.strict_tpot_ms == pytest.approx(8 * 50000 / 6 / 1e6)


def test_a_floor_of_more_rows_than_a_tile_charges_every_tile() -> None:
    """Five rows are two tiles: twice the rows, and the KV cache twice."""
    access = RoundAccess(4, 1, [[0], [0]])
    two_tiles = 2972 + 2 * 3196 + 3 * (4 * (2 * 72 + 18) + 40 * 18)  # attention's rows and cache
    two_tiles += 4 * 32 + 2 * 4 * 46 + 2 * 2 * 4 * 66 + 2 * (64 + 704 + 64) + 2 * 704  # other rows, waves, combines
    two_tiles += 832 + 2 * 4 * 40
    floor = floor_ideal([access], 12, COSTS, BY_HAND)
    assert floor.tpot_ms == pytest.approx((4 * 7916 + two_tiles + 2 * 192) / 1e6)


def test_the_fewest_loads_keep_what_is_used_soonest_whatever_its_number() -> None:
    """Of residents 0, 1 and 2 with three slots, a visit of 3, needed again, costs the one that is used last."""
    assert min_loads([[3], [0], [3], [1], [2]], 3, residents=[0, 1, 2]) == [1, 0, 0, 0, 1]
    assert min_loads([[3], [2], [3], [1], [0]], 3, residents=[0, 1, 2]) == [1, 0, 0, 0, 1]
    assert min_loads([[3], [1], [3], [2], [0]], 3, residents=[0, 1, 2]) == [1, 0, 0, 0, 1]


def test_a_floor_of_a_round_with_too_many_layers_is_refused() -> None:
    with pytest.raises(SpecterError, match="round 0 lists 3 layers, by-hand has 2"):
        floor_ideal([RoundAccess(0, 1, [[0], [0], [0]])], 12, COSTS, BY_HAND)
