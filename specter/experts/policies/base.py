"""Base classes and registries of the policies. Policies are plain Python: counters in, decisions out, no tensors.

A policy overrides the hooks that it needs; the others do nothing. A decorator registers it:

    @PLANNERS.register("three_phase")
    class ThreePhasePlanner(Planner): ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specter.models.base import Routing
from specter.models.spec import ExpertId
from specter.registry import Registry
from specter.timeline.base import Event


@dataclass(frozen=True, slots=True)
class Pool:
    """The slots that a policy manages.

    quotas: slots per MoE layer · num_experts: per layer · payload_bytes: of one expert ·
    num_staging: slots, of all, for experts that are loaded ahead.
    """

    quotas: Sequence[int]
    num_experts: int
    payload_bytes: int
    num_staging: int = 0


def layer_quotas(num_slots: int, num_layers: int) -> list[int]:
    """Splits a flat pool evenly over the MoE layers; the first layers take the remainder."""
    share, extra = divmod(num_slots, num_layers)
    return [share + (layer < extra) for layer in range(num_layers)]


@dataclass(frozen=True, slots=True)
class Plan:
    """Experts to load, in order.

    protect: experts that no load may displace until their layer has been verified, [MoE layers, E].
    at_once: issue all copies now. Otherwise they queue for the link, and the next plan replaces what is left.
    phase: of the planner, for records. chunk_len: draft tokens that the copies were estimated to take, or 0.
    """

    loads: list[ExpertId]
    protect: NDArray[np.bool_]
    at_once: bool = False
    phase: str = "step"
    chunk_len: int = 0


class Planner:
    """Decides during drafting what to load before verification needs it. This base class loads nothing."""

    def __init__(self, pool: Pool) -> None:
        pass

    def begin_round(self, draft_len: int) -> None:
        """A round that drafts `draft_len` tokens begins."""

    def is_boundary(self, num_drafted: int) -> bool:
        """Whether to plan after `num_drafted` tokens of this round. The host then waits for that step's routing."""
        return False

    def skips_boundary(self, is_next_step_done: Callable[[], bool]) -> bool:
        """Whether to plan after the next step instead, because that has ended already."""
        return False

    def plan(self, num_drafted: int, counts: NDArray[np.int32], present: NDArray[np.bool_]) -> Plan:
        """The loads after `num_drafted` tokens of this round.

        Args:
            counts: draft tokens that chose each expert, [MoE layers, E].
            present: experts that are resident or loading, [MoE layers, E].
        """
        raise NotImplementedError

    def barrier(self, batches: Sequence[Sequence[Event]]) -> Sequence[Event]:
        """Copies that verification waits for before its first layer; without them each layer waits for its own.

        Args:
            batches: copies of this round's `at_once` plans, by plan; none is empty.
        """
        return ()

    def observe_step(self, step_ms: float) -> None:
        """Receives the measured time of a draft step."""

    def observe_copies(self, num_bytes: int, copy_ms: float) -> None:
        """Receives the measured time of a batch of copies."""


def last_copy(batches: Sequence[Sequence[Event]]) -> Sequence[Event]:
    """The published `Planner.barrier`: verification waits for the last copy of the last batch."""
    return batches[-1][-1:] if batches else ()


class Eviction:
    """Chooses which resident to displace.

    Attributes:
        keeps: False gives up an expert as soon as it has been used.
        uses_staging: the policy needs `Pool.num_staging` of at least 1.
    """

    keeps = True
    uses_staging = False

    def __init__(self, pool: Pool) -> None:
        pass

    def begin_round(self) -> None:
        """A round, or prefill, begins."""

    def demand(self, layer: int, counts: NDArray[np.int64]) -> None:
        """Receives the target's routing of `layer`: rows of the pass that chose each expert [E]."""

    def loaded(self, expert: ExpertId) -> None:
        """The expert got a slot."""

    def used(self, expert: ExpertId) -> None:
        """The expert, which has a slot, was computed with."""

    def forget(self, expert: ExpertId) -> None:
        """The expert lost its slot."""

    def victim(self, layer: int, may_evict: Callable[[ExpertId], bool], is_urgent: bool) -> ExpertId | None:
        """The expert to displace for one of `layer`; None if nothing is evictable or the policy defers.

        Args:
            is_urgent: no copy of this layer is under way, so deferring would not make progress.
        """
        return None

    def reconsider(self) -> None:
        """`may_evict` may now allow what it refused before."""

    def clear(self) -> None:
        """Every expert lost its slot."""


class NextLayerPredictor:
    """Plans loads for the layer after the one that runs, from its predicted routing. This base class is inactive:
    nothing is predicted or charged."""

    is_active = False

    def plan(self, layer: int, predicted: Routing, num_experts: int, is_present: Callable[[ExpertId], bool]) -> Plan:
        """The loads for MoE layer `layer` while the layer before it runs; `predicted`: [rows, top_k]."""
        raise NotImplementedError


PLANNERS: Registry[type[Planner]] = Registry("system.planner")
EVICTIONS: Registry[type[Eviction]] = Registry("system.eviction")
PREDICTORS: Registry[Callable[[], NextLayerPredictor]] = Registry("system.predictor")
PLANNERS.register("none")(Planner)
PREDICTORS.register("none")(NextLayerPredictor)
