"""A round as the difference of two points in time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specter.experts.cache import CacheCounters
from specter.records import PlanRecord, RoundRecord
from specter.timeline.base import LaneTotals, Mark, difference


@dataclass(frozen=True, slots=True)
class Window:
    """A point in time; a round is recorded as the difference of two."""

    ns: int
    mark: Mark
    counters: CacheCounters
    num_needs: int


@dataclass(frozen=True, slots=True)
class FinishedRound:
    """A finished round that is not recorded yet."""

    begin: Window
    draft_end_ns: int
    end: Window
    draft_len: int
    accepted_len: int
    new_len: int
    plans: list[PlanRecord]

    def lanes(self, totals_at: Callable[[Mark], LaneTotals]) -> LaneTotals:
        """What the lanes did in it. `totals_at` may block the host."""
        return difference(totals_at(self.end.mark), totals_at(self.begin.mark))

    def record(self, index: int, lanes: LaneTotals, need_ns: int, num_moe_layers: int) -> RoundRecord:
        """Its record. `need_ns`: time during which demand was known and unmet."""
        begin, end, cache = self.begin, self.end, difference(self.end.counters, self.begin.counters)
        return RoundRecord(
            index=index,
            start_ms=begin.ns / 1e6,
            draft_end_ms=self.draft_end_ns / 1e6,
            end_ms=end.ns / 1e6,
            draft_len=self.draft_len,
            accepted_len=self.accepted_len,
            new_len=self.new_len,
            prefetch_bytes=cache.prefetch_bytes,
            fetch_bytes=cache.fetch_bytes,
            writeback_bytes=lanes.copied_bytes - cache.prefetch_bytes - cache.fetch_bytes,
            num_hits=cache.num_hits,
            num_late_hits=cache.num_late_hits,
            num_misses=cache.num_misses,
            num_prefetched=cache.num_prefetched,
            num_prefetched_used=cache.num_prefetched_used,
            union_mean=cache.num_experts / num_moe_layers,
            stall_ms=lanes.stall_ns / 1e6,
            link_busy_ms=lanes.link_busy_ns / 1e6,
            need_ms=need_ns / 1e6,
            compute_busy_ms=lanes.compute_busy_ns / 1e6,
            plans=tuple(self.plans),
        )
