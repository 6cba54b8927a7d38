"""Loads in the order of their deadlines, issued as the link drains; and variants with one published choice each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specter.experts.policies.base import PLANNERS, Plan, Planner, last_copy
from specter.experts.policies.three_phase import cold_start
from specter.models.spec import ExpertId
from specter.timeline.base import Event


@PLANNERS.register("deadline")
class DeadlinePlanner(Planner):
    """Every expert that the draft has counted, by its layer's deadline, then by count.

    Plans from the first draft step on and after every step, so that the link starts as soon as anything is known and
    always works on what is due first. Within a layer the experts that the draft chose often precede those that it
    chose once, which the target may not need. Verification does not wait: loads that are still planned when it begins
    are issued while earlier layers verify.
    """

    first_boundary = 1

    def is_boundary(self, num_drafted: int) -> bool:
        return num_drafted >= self.first_boundary

    def skips_boundary(self, is_next_step_done: Callable[[], bool]) -> bool:
        return is_next_step_done()  # the host is late: one plan serves both steps

    def plan(self, num_drafted: int, counts: NDArray[np.int32], present: NDArray[np.bool_]) -> Plan:
        counted = counts > 0
        layers, experts = np.nonzero(counted & ~present)
        order = np.lexsort((-counts[layers, experts], layers))
        loads = list(map(ExpertId, layers[order].tolist(), experts[order].tolist()))
        return Plan(loads, counted)


@PLANNERS.register("deadline_cold")
class ColdDeadlinePlanner(DeadlinePlanner):
    """Starts at the published planner's first boundary: shows what the cold start costs."""

    def begin_round(self, draft_len: int) -> None:
        self.first_boundary = cold_start(draft_len)


@PLANNERS.register("deadline_joined")
class JoinedDeadlinePlanner(DeadlinePlanner):
    """Issues every plan at once and makes verification wait for the last copy: shows what the barrier costs."""

    def skips_boundary(self, is_next_step_done: Callable[[], bool]) -> bool:
        return False

    def plan(self, num_drafted: int, counts: NDArray[np.int32], present: NDArray[np.bool_]) -> Plan:
        return replace(super().plan(num_drafted, counts, present), at_once=True)

    def barrier(self, batches: Sequence[Sequence[Event]]) -> Sequence[Event]:
        return last_copy(batches)
