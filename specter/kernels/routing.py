"""How logits become experts and weights, and the routing of the draft's one row.

The row is routed by the last of the programs that compute router logits: no launch of its own, and none of the
kernels after it decides anything. bytes: E logits.
"""

# mypy: disable-error-code=no-untyped-def
# (the arguments of a kernel are typed by its launch)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter.errors import SpecterError
from specter.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Rule:
    """How a family's router chooses and weighs; see `specter.models.routing`."""

    scaling: float = 1.0  # multiplies weights
    is_normed: bool = False  # weights are divided by their sum
    jitter: float = 0.0  # above 0: sparsemixer

    @classmethod
    def of(cls, spec: ModelSpec) -> Rule:
        """
        Raises:
            SpecterError: a router that the kernels do not serve.
        """
        if spec.num_groups > 1:
            raise SpecterError(
                f"{spec.name} chooses experts from {spec.top_groups} of {spec.num_groups} groups, which the device's "
                "kernels do not serve",
                "use clock=virtual, or a checkpoint whose router has one group",
            )
        return cls(spec.routed_scaling, spec.norm_top_k, spec.router_jitter)


@dataclass(frozen=True, slots=True)
class RowRouting:
    """What one MoE layer's router says of the draft's row, and who was chosen at every step so far."""

    logits: Tensor  # fp32 [E], or [E + 1] with the gate of the shared expert
    scale: Tensor  # fp32 [1], 1 / rms of the row: multiplies gain * x
    weights: Tensor  # fp32 [k], by `rule`
    history: Tensor  # int16 [steps, k], a view
    counts: Tensor  # int32 [E], + 1 each time
    step: Tensor  # int32 [1], the row of `history` to write; complete before the pass's first kernel starts
    arrived: Tensor  # int32 [1], programs that have stored their logits; 0 between kernels
    rule: Rule
    is_gated: bool = False  # the last logit is the shared expert's gate

    @classmethod
    def empty(cls, history: Tensor, counts: Tensor, step: Tensor, rule: Rule, is_gated: bool = False) -> RowRouting:
        """With scratch of its own: history [steps, k], counts [E]."""

        def room(size: int) -> Tensor:
            return torch.zeros(size, device=history.device)

        arrived = torch.zeros(1, dtype=torch.int32, device=history.device)
        scratch = room(counts.shape[0] + is_gated), room(1), room(history.shape[1])
        return cls(*scratch, history, counts, step, arrived, rule, is_gated)


@triton.jit
def mixer_keys(scores, experts, E: tl.constexpr, BLOCK_E: tl.constexpr, TAKEN: tl.constexpr):
    """Keys int64 [M, BLOCK_E] that order as (score descending, index ascending) does; TAKEN where there is no expert.

    All comparable, scores that are no numbers too, so that every rank is taken by exactly one expert.
    """
    bits = scores.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # a negative float's bits fall where the float rises
    return tl.where(experts < E, bits.to(tl.int64) * BLOCK_E + (BLOCK_E - 1 - experts), TAKEN)


@triton.jit
def mixer_weight(scores, left, picked, jitter):
    """Sparsemixer's weight [M] of the expert `picked`, the best of `left`; all [M, BLOCK_E].

    Its share in a softmax over those of `left` that are within 2 * jitter of it, relatively.
    """
    peak = tl.sum(tl.where(picked, scores, 0.0), axis=1)[:, None]
    is_far = (peak - scores) / tl.maximum(tl.abs(scores), peak) > 2 * jitter
    near = tl.where(left & (is_far == 0), tl.exp(scores - peak), 0.0)
    return 1.0 / tl.sum(near, axis=1)


@triton.jit
def route_if_last(
    logits, weights, history, counts, step, arrived, scaling, jitter, PROGRAMS: tl.constexpr, E: tl.constexpr,
    TOP_K: tl.constexpr, STEP_STRIDE: tl.constexpr, NORMED: tl.constexpr, MIXER: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Top-k by the family's rule (ties: the lower index); each of PROGRAMS programs calls it, its logits stored."""
    tl.debug_barrier()  # all threads' stores come before the one thread's arrival
    if tl.atomic_add(arrived, 1) == PROGRAMS - 1:
        tl.store(arrived, 0)
        experts = tl.arange(0, BLOCK_E)
        # From the L2, where the other programs' stores are.
        scores = tl.load(logits + experts, mask=experts < E, other=float("-inf"), cache_modifier=".cg")
        if MIXER:
            # Keys order as ranks do, so that a rank is the number of better keys; weights come one after the other.
            lone = scores[None, :]
            keys = mixer_keys(lone, experts[None, :], E, BLOCK_E, -4611686018427387904)
            rank = tl.zeros((BLOCK_E,), tl.int32) + TOP_K
            shares = tl.zeros((BLOCK_E,), tl.float32)
            for index in tl.static_range(TOP_K):
                picked = keys == tl.max(keys, axis=1)[:, None]
                share = mixer_weight(lone, keys > -4611686018427387904, picked, jitter)
                is_picked = tl.sum(picked.to(tl.int32), axis=0) > 0
                rank = tl.where(is_picked, index, rank)
                shares = tl.where(is_picked, tl.sum(share, axis=0), shares)
                keys = tl.where(picked, -4611686018427387904, keys)
        else:
            shares = tl.exp(scores - tl.max(scores, axis=0))
            shares = shares / tl.sum(shares, axis=0)
            # The bits of a non-negative float order as integers do; unlike floats, all are comparable, NaN too, so
            # that every rank is taken by exactly one expert.
            bits = shares.to(tl.int32, bitcast=True)
            is_tie_won = (bits[None, :] == bits[:, None]) & (experts[None, :] < experts[:, None])
            rank = tl.sum(((bits[None, :] > bits[:, None]) | is_tie_won).to(tl.int32), axis=1)
        is_chosen = rank < TOP_K
        if NORMED:
            shares = shares / tl.sum(tl.where(is_chosen, shares, 0.0), axis=0)
        tl.store(weights + rank, shares * scaling, mask=is_chosen)
        tl.store(counts + experts, tl.load(counts + experts, mask=is_chosen, other=0) + 1, mask=is_chosen)
        row = history + tl.load(step) * STEP_STRIDE
        tl.store(row + rank, experts.to(history.dtype.element_ty), mask=is_chosen)
