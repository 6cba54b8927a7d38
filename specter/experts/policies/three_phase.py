"""The published planner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specter.experts.policies.base import PLANNERS, Plan, Planner, Pool, last_copy
from specter.models.spec import ExpertId
from specter.timeline.base import Event

# Sources of these constants: docs/decisions/0004.
COLD_FRACTION = 0.2  # of K: the share of draft tokens before which nothing is loaded
KEEP = 0.75  # weight of the old value in both moving averages
FIRST_BYTES_PER_MS = 12e6  # estimate of the link's rate before a copy was measured
FIRST_STEP_MS = 1.0  # estimate of a draft step before one was measured
INITIAL, OVERLAP = "initial", "overlap"  # phases: the plan that ends Cold Start; one at the end of an adaptive chunk


def cold_start(draft_len: int) -> int:
    """The first boundary."""
    return max(1, math.floor(COLD_FRACTION * draft_len))


@PLANNERS.register("three_phase")
class ThreePhasePlanner(Planner):
    """Cold Start, Prefetch Overlap, Final Cleanup (paper, PIO).

    Cold Start: no transfer before max(1, floor(0.2 K)) draft tokens. Prefetch Overlap: per layer the Top-M experts
    by count, M being the layer's residents; the next chunk is as many draft steps as the copies just submitted
    are estimated to take. Final Cleanup: once the next boundary would reach K, or every layer has its M experts,
    nothing more is counted or copied. Both estimates are moving averages (0.75 old, 0.25 new).
    """

    def __init__(self, pool: Pool) -> None:
        self._top_m = pool.quotas
        self._payload_bytes = pool.payload_bytes
        self._bytes_per_ms = FIRST_BYTES_PER_MS
        self._step_ms = FIRST_STEP_MS
        self._draft_len = 0
        self._boundary = 0

    def begin_round(self, draft_len: int) -> None:
        self._draft_len = draft_len
        self._boundary = self.first_boundary(draft_len)

    @staticmethod
    def first_boundary(draft_len: int) -> int:
        return cold_start(draft_len)

    def is_boundary(self, num_drafted: int) -> bool:
        return num_drafted == self._boundary

    def plan(self, num_drafted: int, counts: NDArray[np.int32], present: NDArray[np.bool_]) -> Plan:
        plan, is_full = top_m_plan(self._top_m, counts, present)
        copy_ms = len(plan.loads) * self._payload_bytes / self._bytes_per_ms
        chunk_len = max(1, math.ceil(copy_ms / self._step_ms))
        boundary = num_drafted + chunk_len
        self._boundary = 0 if is_full or boundary >= self._draft_len else boundary
        phase = OVERLAP if num_drafted > self.first_boundary(self._draft_len) else INITIAL
        return replace(plan, phase=phase, chunk_len=chunk_len)

    def barrier(self, batches: Sequence[Sequence[Event]]) -> Sequence[Event]:
        return last_copy(batches)

    def observe_step(self, step_ms: float) -> None:
        self._step_ms = KEEP * self._step_ms + (1 - KEEP) * step_ms

    def observe_copies(self, num_bytes: int, copy_ms: float) -> None:
        self._bytes_per_ms = KEEP * self._bytes_per_ms + (1 - KEEP) * num_bytes / copy_ms


@PLANNERS.register("three_phase_early")
class EarlyThreePhasePlanner(ThreePhasePlanner):
    """Plans, and so displaces residents, after the first draft token already."""

    @staticmethod
    def first_boundary(draft_len: int) -> int:
        return 1


@PLANNERS.register("three_phase_late")
class LateThreePhasePlanner(ThreePhasePlanner):
    """Plans, and so displaces residents, once all draft tokens are counted; nothing is left to overlap with."""

    @staticmethod
    def first_boundary(draft_len: int) -> int:
        return draft_len


@PLANNERS.register("three_phase_unjoined")
class UnjoinedThreePhasePlanner(ThreePhasePlanner):
    """Verification does not wait for the copies: shows what the published barrier costs."""

    def barrier(self, batches: Sequence[Sequence[Event]]) -> Sequence[Event]:
        return ()


def top_m_plan(top_m: Sequence[int], counts: NDArray[np.int32], present: NDArray[np.bool_]) -> tuple[Plan, bool]:
    """Per layer the Top-M counted experts, copied at once; and whether every layer has counted M of them.

    Args:
        top_m: M per MoE layer. counts, present: as in `Planner.plan`.
    """
    loads: list[ExpertId] = []
    protect = np.zeros(counts.shape, np.bool_)
    is_full = True
    ranked = np.argsort(-counts, axis=1, kind="stable")  # by count, then by expert number
    for layer, m in enumerate(top_m):
        row = counts[layer]
        wanted = [ExpertId(layer, int(e)) for e in ranked[layer, :m] if row[e] > 0]
        is_full &= len(wanted) == m
        protect[layer, [expert.expert for expert in wanted]] = True
        loads += [expert for expert in wanted if not present[expert]]
    return Plan(loads, protect, at_once=True), is_full
