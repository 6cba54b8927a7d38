"""What to load before it is needed. Pure policy: counters in, an ordered list of experts out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specter.models.base import Routing
from specter.models.spec import ExpertId


@dataclass(frozen=True, slots=True)
class Plan:
    """Experts to load, in order, and which experts no load of this round may displace."""

    loads: list[ExpertId]
    protect: NDArray[np.bool_]  # [MoE layers, E]


class Planner(Protocol):
    # True: plans are issued at once, and verification waits for the last one as a whole. False: planned loads are
    # issued as the link takes them, and every layer waits for its own.
    joins_before_verify: bool

    def begin_round(self, draft_len: int) -> None: ...

    def is_boundary(self, num_drafted: int) -> bool:
        """Whether to read the counters and plan now, after `num_drafted` tokens of this round."""

    def plan(self, num_drafted: int, counts: NDArray[np.int32], present: NDArray[np.bool_]) -> Plan:
        """What to do after `num_drafted` tokens of this round.

        Args:
            counts: draft tokens that chose each expert, [MoE layers, E].
            present: which experts are resident or on their way, [MoE layers, E].
        """

    def observe_step(self, step_ms: float) -> None:
        """A measured draft step."""

    def observe_copies(self, num_bytes: int, copy_ms: float) -> None:
        """A measured batch of prefetches."""


COLD_FRACTION = 0.2  # of K, before whose draft token the published planner loads nothing


def cold_start(draft_len: int) -> int:
    """The published planner's first boundary."""
    return max(1, math.floor(COLD_FRACTION * draft_len))


class DeadlinePlanner:
    """Every expert that the draft has counted, by its layer's deadline, then by count.

    Plans from the first draft step on and after every step, so that the link starts as soon as anything is known and
    always works for what comes due first. What the draft is sure of (high count) goes before what it saw once, which
    the target may not need. There is no join: loads that are still planned when verification begins are issued
    while earlier layers verify.

    Args:
        starts_cold, joins_before_verify: as the published planner does; one of its choices alone, to see what it costs.
    """

    def __init__(self, starts_cold: bool = False, joins_before_verify: bool = False) -> None:
        self.joins_before_verify = joins_before_verify
        self._starts_cold = starts_cold
        self._first = 1

    def begin_round(self, draft_len: int) -> None:
        self._first = cold_start(draft_len) if self._starts_cold else 1

    def is_boundary(self, num_drafted: int) -> bool:
        return num_drafted >= self._first

    def plan(self, num_drafted: int, counts: NDArray[np.int32], present: NDArray[np.bool_]) -> Plan:
        counted = counts > 0
        layers, experts = np.nonzero(counted & ~present)
        order = np.lexsort((-counts[layers, experts], layers))
        loads = list(map(ExpertId, layers[order].tolist(), experts[order].tolist()))
        return Plan(loads, counted)

    def observe_step(self, step_ms: float) -> None:
        pass

    def observe_copies(self, num_bytes: int, copy_ms: float) -> None:
        pass


class Foresight(Protocol):
    def plan(self, layer: int, predicted: Routing, num_experts: int, is_present: Callable[[ExpertId], bool]) -> Plan:
        """What to load for MoE layer `layer` while the one before it runs; `predicted`: [rows, top_k]."""


class ThreePhasePlanner:
    """The published planner: Cold Start, Prefetch Overlap, Final Cleanup (paper, PIO).

    Cold Start: no transfer before max(1, floor(0.2 K)) draft tokens. Prefetch Overlap: per layer the Top-M experts
    by count, M being the layer's residents; the next chunk is as many draft steps as the copies just submitted
    are estimated to take. Final Cleanup: once the next boundary would reach K, or every layer has its M experts,
    nothing more is counted or copied. Both estimates are moving averages (0.75 old, 0.25 new).
    """

    joins_before_verify = True
    KEEP = 0.75

    def __init__(self, residents_per_layer: Sequence[int], payload_bytes: int) -> None:
        self._top_m = residents_per_layer
        self._payload_bytes = payload_bytes
        self._bytes_per_ms = 12e6  # 12 GB/s, the paper's seed
        self._step_ms = 1.0
        self._draft_len = 0
        self._boundary = 0

    def begin_round(self, draft_len: int) -> None:
        self._draft_len = draft_len
        self._boundary = cold_start(draft_len)

    def is_boundary(self, num_drafted: int) -> bool:
        return num_drafted == self._boundary

    def plan(self, num_drafted: int, counts: NDArray[np.int32], present: NDArray[np.bool_]) -> Plan:
        loads: list[ExpertId] = []
        protect = np.zeros(counts.shape, np.bool_)
        is_full = True
        ranked = np.argsort(-counts, axis=1, kind="stable")  # by count, then by expert number
        for layer, top_m in enumerate(self._top_m):
            row = counts[layer]
            wanted = [ExpertId(layer, int(e)) for e in ranked[layer, :top_m] if row[e] > 0]
            is_full &= len(wanted) == top_m
            protect[layer, [expert.expert for expert in wanted]] = True
            loads += [expert for expert in wanted if not present[expert]]
        copy_ms = len(loads) * self._payload_bytes / self._bytes_per_ms
        boundary = num_drafted + max(1, math.ceil(copy_ms / self._step_ms))
        self._boundary = 0 if is_full or boundary >= self._draft_len else boundary
        return Plan(loads, protect)

    def observe_step(self, step_ms: float) -> None:
        self._step_ms = self.KEEP * self._step_ms + (1 - self.KEEP) * step_ms

    def observe_copies(self, num_bytes: int, copy_ms: float) -> None:
        self._bytes_per_ms = self.KEEP * self._bytes_per_ms + (1 - self.KEEP) * num_bytes / copy_ms
