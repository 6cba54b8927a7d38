"""The metrics of one run: a flat mapping, the same keys for every system."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specter.experts.policies.three_phase import INITIAL, OVERLAP
from specter.floors import RoundAccess, decode_ns, floor_ideal, floor_trace
from specter.models.base import Routing
from specter.recording import Recording
from specter.records import Generation, RoundRecord
from specter.resolve import ResolvedRun
from specter.speculation.accept import through_stop

Metrics = dict[str, Any]  # values: numbers, strings, booleans, None


def accesses(generation: Generation, recording: Recording) -> list[RoundAccess]:
    """The experts of each round's verification, from the recording of the same generation."""
    return [
        RoundAccess(record.draft_len, record.new_len, [_distinct(routing) for routing in one.target_routing])
        for record, one in zip(generation.rounds, recording.passes[1:], strict=True)
    ]


def _distinct(routing: Routing) -> list[int]:
    """A layer's experts in order, in a third of the time of np.unique; `routing`: [rows, top_k]."""
    experts: list[int] = np.bincount(routing.ravel()).nonzero()[0].tolist()
    return experts


def link_bytes_per_s(records: Sequence[RoundRecord]) -> float | None:
    """The rate of the copies of these rounds while the link was busy; None without a copy."""
    busy_ms = sum(record.link_busy_ms for record in records)
    return _link_bytes(records) / busy_ms * 1e3 if busy_ms else None


def _link_bytes(records: Sequence[RoundRecord]) -> int:
    return sum(record.prefetch_bytes + record.fetch_bytes + record.writeback_bytes for record in records)


def distinct_4grams(tokens: Sequence[int]) -> float:
    """Share of 4-grams that are distinct: below 0.9 the text loops, which flatters hit rates."""
    grams = list(zip(*(tokens[i:] for i in range(4)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


def acceptance(records: Sequence[RoundRecord], num_tokens: int) -> float | None:
    """Accepted drafts / examined drafts (the accepted ones and the first rejected one of a round) of the first
    `num_tokens` of a text, prefill's included; None without a draft."""
    accepted = examined = 0
    left = num_tokens - 1
    for record in records:
        new_len = min(record.new_len, left)
        accepted_len = min(record.accepted_len, new_len)
        accepted += accepted_len
        examined += accepted_len + (accepted_len < min(record.draft_len, new_len))
        left -= new_len
    return accepted / examined if examined else None


def summarize(run: ResolvedRun, generation: Generation, rounds: Sequence[RoundAccess] | None) -> Metrics:
    """Metrics of a generation. Rates and shares are over the decoding rounds, prefill left out.

    tpot_ms: (last commit - first commit) / (N - 1), where prefill commits first (paper, protocol).
    tpot_after_first_round_ms: the same from the end of the first round on; None if there is one round.
    link_busy_in_need_frac: link busy / time during which demand was known and unmet; every copy serves such a need, so
    the link is never busy outside of it.
    bits_per_weight: of a stored expert. frac_slot_unused: of the bytes of slots that hold experts, in the mean.
    decode_floor_ms: the least time of decoding every expert used, by the cost model; 0 for 16-bit experts.
    num_overlap_plans: plans at the end of an adaptive chunk (three_phase). first_chunk_len: draft tokens that the
    copies of a round's first plan were estimated to take.
    num_tokens_to_eos: new tokens up to the first end-of-sequence token, itself included; None without one.
    acceptance, acceptance_to_eos: of all tokens; of those up to EOS.

    Args:
        rounds: None if the routing stayed on the device; the metrics are then times alone.
    """
    records, num_slots, costs, hardware = generation.rounds, run.num_slots, run.costs, run.config.hardware
    to_eos = through_stop(generation.tokens, run.eos_ids)
    metrics: Metrics = {
        "clock": generation.clock,
        "num_prompt_tokens": generation.prompt_len,
        "num_new_tokens": len(generation.tokens),
        "num_rounds": len(records),
        "stop_reason": generation.stop_reason,
        "num_tokens_to_eos": len(to_eos) if to_eos[-1] in run.eos_ids else None,
        "ttft_ms": generation.prefill_end_ms - generation.start_ms,
        "prefill_bytes": generation.prefill_bytes,
        "distinct_4grams": distinct_4grams(generation.tokens),
        "num_slots": num_slots,
        "fits_budget": True,
        "experts_per_layer": num_slots / costs.spec.num_moe_layers,
        "bits_per_weight": run.bits_per_weight,
        "frac_slot_unused": 1 - costs.payload_bytes / run.slots.num_bytes,
    }
    metrics |= run.fit()
    if not records:
        return metrics

    def total(name: str) -> Any:
        return sum(getattr(record, name) for record in records)

    end_ms = records[-1].end_ms
    window_ms = end_ms - generation.prefill_end_ms
    num_decoded = len(generation.tokens) - 1
    num_after = num_decoded - records[0].new_len
    tpot_ms = window_ms / num_decoded
    metrics |= {
        "tpot_ms": tpot_ms,
        "tpot_after_first_round_ms": (end_ms - records[0].end_ms) / num_after if num_after else None,
        "end_to_end_ms": end_ms - generation.start_ms,
        "tok_per_s": 1e3 / tpot_ms,
    }
    if rounds is None:
        return metrics
    drafted, accepted, prefetched = total("draft_len"), total("accepted_len"), total("num_prefetched")
    plans = [plan for record in records for plan in record.plans]
    hits, late, misses = total("num_hits"), total("num_late_hits"), total("num_misses")
    num_bytes, link_busy_ms, need_ms = _link_bytes(records), total("link_busy_ms"), total("need_ms")
    ideal = floor_ideal(rounds, num_slots, costs, hardware)
    trace = floor_trace(rounds, num_slots, costs, hardware, residents=generation.residents)
    return metrics | {
        "draft_ms": sum(record.draft_end_ms - record.start_ms for record in records),
        "num_drafted": drafted,
        "num_accepted": accepted,
        "acceptance": acceptance(records, len(generation.tokens)),
        "acceptance_to_eos": acceptance(records, len(to_eos)),
        "mean_accepted_len": accepted / len(records) if drafted else None,
        "union_mean": float(np.mean([record.union_mean for record in records])),
        "num_hits": hits,
        "num_late_hits": late,
        "num_misses": misses,
        "hit_rate": hits / (hits + late + misses),
        "num_prefetched": prefetched,
        "num_plans": len(plans),
        "num_overlap_plans": sum(plan.phase == OVERLAP for plan in plans),
        "first_chunk_len": float(np.mean(chunks))
        if (chunks := [one.chunk_len for one in plans if one.phase == INITIAL])
        else None,
        "frac_prefetched_used": total("num_prefetched_used") / prefetched if prefetched else None,
        "link_bytes": num_bytes,
        "bytes_per_token": num_bytes / num_decoded,
        "link_busy_frac": link_busy_ms / window_ms,
        "need_ms": need_ms,
        "link_busy_in_need_frac": link_busy_ms / need_ms if need_ms else None,
        "link_bytes_per_s": link_bytes_per_s(records),
        "compute_busy_frac": total("compute_busy_ms") / window_ms,
        "stall_ms": total("stall_ms"),
        "decode_floor_ms": decode_ns(hits + late + misses, costs, hardware) / 1e6,
        "floor_ideal_ms": ideal.tpot_ms,
        "floor_trace_ms": trace.tpot_ms,
        "over_floor_ideal": tpot_ms / ideal.tpot_ms,
        "over_floor_trace": tpot_ms / trace.tpot_ms,
        "min_loads": trace.num_loads,
    }
