"""Records of a round and of a generation: one schema for every system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from specter.models.spec import ExpertId
from specter.timeline.base import Clock

# Why a generation ended: at the tokens allowed, at an end-of-sequence token, or because the caller wanted no more.
StopReason = Literal["length", "eos", "stop"]
OnCommit = Callable[[list[int]], bool | None]  # receives the tokens of a commit; True ends the generation


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A plan made while drafting; the fields of `policies.base.Plan`, and when it was made."""

    num_drafted: int  # draft tokens of the round before it
    phase: str
    num_loads: int  # planned; those without a free slot are fetched on demand instead
    chunk_len: int


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round (draft, verify, accept). Times on the run's clock; a system without draft has draft_len 0."""

    index: int
    start_ms: float
    draft_end_ms: float
    end_ms: float  # commit of this round's tokens
    draft_len: int
    accepted_len: int  # of the committed tokens: in a round that a stop token cut, without those behind it
    new_len: int  # accepted_len + 1, or accepted_len where an accepted stop token ends the text
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
    plans: tuple[PlanRecord, ...] = ()


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
    stop_reason: StopReason | None = None  # None: interrupted
    cached_len: int = 0  # tokens of the prompt whose KV was kept from the last generation
