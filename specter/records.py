"""Records of a round and of a generation: one schema for every system."""

from __future__ import annotations

from dataclasses import dataclass, field

from specter.models.spec import ExpertId
from specter.timeline.base import Clock


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round (draft, verify, accept). Times on the run's clock; a system without draft has draft_len 0."""

    index: int
    start_ms: float
    draft_end_ms: float
    end_ms: float  # commit of this round's tokens
    draft_len: int
    accepted_len: int
    new_len: int
    prefetch_bytes: int  # of prefetches
    fetch_bytes: int  # of fetches
    writeback_bytes: int  # displaced experts moved back to the host
    num_hits: int
    num_late_hits: int
    num_misses: int
    num_prefetched: int
    num_prefetched_used: int
    union_mean: float  # distinct experts per MoE layer of the verification pass
    stall_ms: float
    link_busy_ms: float
    need_ms: float  # time during which demand was known and unmet
    compute_busy_ms: float


@dataclass(slots=True)
class Generation:
    """One generated text with its rounds. `prefill_end_ms` is the commit of the first token."""

    clock: Clock
    prompt_len: int
    tokens: list[int] = field(default_factory=list)
    start_ms: float = 0.0
    prefill_end_ms: float = 0.0
    prefill_bytes: int = 0
    residents: list[ExpertId] = field(default_factory=list)  # resident or loading at the first commit
    rounds: list[RoundRecord] = field(default_factory=list)
