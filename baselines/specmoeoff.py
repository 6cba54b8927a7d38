"""`specmoeoff`: speculative decoding with a draft of its own weights, as Specter's paper adapts arXiv 2508.21706.

Faithful to: the batch-1 adaptation that Specter is compared with. An INT4 draft of the same family with its own
non-expert weights and KV: a second 16-bit copy and a second KV cache lie on the device, so fewer residents fit. The
draft fills its KV itself, prefill included. K = 3. Counts per layer over the draft tokens; two Top-M plans, after the
first and the second draft token; LRU; verification waits for all prefetches. Residents as published: DeepSeek 12 and 2.
Departing where: the original is a large-batch system (EAGLE head, CPU attention, layer streaming). A wholly accepted
round leaves the own KV one token behind; catching up is charged as one more row of a draft pass, and so is the prefill.
On a device, whose draft steps have one row, every missing token is a step: one after a wholly accepted round, and the
prompt's length at the first, to its disadvantage.

`specmoeoff_tuned`: the same at its best: any K (by sweep, or by its own cost model, `choose_k`), the device bytes of
Specter, and its second copy of the non-expert weights in INT4.
Departing where, in its favour: that copy is charged as INT4, in memory and in time, but drafts with the 16-bit values,
so rounding does not lower its acceptance. On a device the copy is BF16: its time is that of BF16, and the record states
the allocated bytes beside those that the budget charges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specter.experts.policies.base import PLANNERS, Plan, Planner, Pool, last_copy
from specter.experts.policies.three_phase import top_m_plan
from specter.models.base import Choose, DraftStep, Model, TargetPass
from specter.speculation.drafts import DRAFTS, DraftKind
from specter.timeline.base import Event
from specter.timeline.costs import INT4_BITS, CostModel
from specter.timeline.hardware import Hardware


@PLANNERS.register("two_plans")
class TwoPlansPlanner(Planner):
    """After the first and the second draft token: the Top-M experts by count of every layer, M its residents."""

    BOUNDARIES = (1, 2)

    def __init__(self, pool: Pool) -> None:
        self._top_m = pool.quotas

    def is_boundary(self, num_drafted: int) -> bool:
        return num_drafted in self.BOUNDARIES

    def plan(self, num_drafted: int, counts: NDArray[np.int32], present: NDArray[np.bool_]) -> Plan:
        return top_m_plan(self._top_m, counts, present)[0]

    def barrier(self, batches: Sequence[Sequence[Event]]) -> Sequence[Event]:
        return last_copy(batches)


class TwoModels:
    """A target and a draft that share nothing, as one `Model`; the draft fills its own KV."""

    def __init__(self, target: Model, draft: Model) -> None:
        self._target, self._draft = target, draft
        self.num_layers, self.num_dense_layers = target.num_layers, target.num_dense_layers
        self.num_experts, self.top_k = target.num_experts, target.top_k
        self.reset()

    def reset(self) -> None:
        self._target.reset()
        self._draft.reset()
        self._tokens: list[int] = []  # inputs of the target, by position
        self._num_drafted = 0  # positions that the draft's KV holds

    def begin_draft(self, token: int, position: int, choose: Choose) -> None:
        for behind in range(self._num_drafted, position):
            self._draft.begin_draft(self._tokens[behind], behind, choose)
            self._draft.draft_step()
        self._num_drafted = position
        self._draft.begin_draft(token, position, choose)

    def draft_step(self) -> DraftStep:
        self._num_drafted += 1
        return self._draft.draft_step()

    def target_pass(self, tokens: Sequence[int], position: int, num_outputs: int) -> TargetPass:
        self._tokens[position:] = tokens
        return self._target.target_pass(tokens, position, num_outputs)

    def crop(self, length: int) -> None:
        self._target.crop(length)
        self._draft.crop(length)
        del self._tokens[length:]
        self._num_drafted = min(self._num_drafted, length)


def join(target: Model, make_draft: Callable[[], Model]) -> Model:
    return TwoModels(target, make_draft())


DRAFTS.register("own")(DraftKind(is_own=True, join=join))
# It drafts with the 16-bit values, so its tokens are those of "own".
DRAFTS.register("own_int4")(DraftKind(is_own=True, join=join, weight_bits=INT4_BITS, recorded_as="own"))


@dataclass(frozen=True, slots=True)
class Iteration:
    """One simulated round of `choose_k`'s cost model."""

    h2d_ms: float
    moe_ms: float
    attention_ms: float
    draft_ms: float
    num_tokens: float

    @property
    def tpot_ms(self) -> float:
        """Experts stream in while others compute, after the draft."""
        return (self.draft_ms + self.attention_ms + max(self.h2d_ms, self.moe_ms)) / self.num_tokens


def simulate(
    k: int, union: float, acceptance: float, num_slots: int, costs: CostModel, hardware: Hardware
) -> Iteration:
    """The roofline of one round with K draft tokens (the paper's model: H2D, GPU MoE, attention, draft).

    Args:
        union: distinct experts per MoE layer of K + 1 consecutive tokens.
        acceptance: probability that a draft token is accepted, given that those before it were.
    """
    layers, rows = costs.spec.num_moe_layers, k + 1
    missing = max(union - num_slots / layers, 0.0) * layers
    moe = costs.experts(max(round(union), 1), costs.num_tiles(rows))
    mixes = [costs.attend_and_route(layer, costs.num_tiles(rows)) for layer in range(costs.spec.num_layers)]
    return Iteration(
        h2d_ms=missing * hardware.copy_ns(costs.payload_bytes) / 1e6,
        moe_ms=layers * hardware.compute_ns(moe) / 1e6,
        attention_ms=sum(hardware.compute_ns(mix) for mix in [*mixes, costs.head(rows)]) / 1e6,
        draft_ms=k * hardware.compute_ns(costs.draft_step()) / 1e6,
        num_tokens=sum(acceptance**i for i in range(rows)),
    )


def choose_k(
    ks: Iterable[int], unions: Mapping[int, float], acceptance: float, num_slots: int, costs: CostModel,
    hardware: Hardware,
) -> int:  # fmt: skip
    """The K with the least simulated time per token; `unions` by number of consecutive tokens, K + 1."""
    return min(ks, key=lambda k: simulate(k, unions[k + 1], acceptance, num_slots, costs, hardware).tpot_ms)
