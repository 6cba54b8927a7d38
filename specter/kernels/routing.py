"""Router rules (logits to experts and weights), and top-k of the draft's single row.

    logits fp32 [E] -> weights fp32 [k], history int16 [steps, k], counts int32 [E]; bytes = 4 E

The last program to finish computing router logits also selects the experts: no separate launch.
"""

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
    """Router of a family; see `specter.models.routing`."""

    scaling: float = 1.0  # multiplies weights
    is_normed: bool = False  # weights are divided by their sum
    jitter: float = 0.0  # of sparsemixer
    is_mixer: bool = False  # sparsemixer instead of a softmax

    @classmethod
    def of(cls, spec: ModelSpec) -> Rule:
        """Raises SpecterError: the router is not supported."""
        if spec.num_groups > 1:
            raise SpecterError(
                f"{spec.name} chooses experts from {spec.top_groups} of {spec.num_groups} groups, which the device's "
                "kernels do not serve",
                "use clock=virtual, or a checkpoint whose router has one group",
            )
        return cls(spec.routed_scaling, spec.norm_top_k, spec.router_jitter, spec.router == "sparsemixer")


@dataclass(frozen=True, slots=True)
class RowRouting:
    """Routing of the draft's row in one MoE layer, with the choices of all steps so far."""

    logits: Tensor  # fp32 [E], or [E + 1] with the shared expert's gate
    scale: Tensor  # fp32 [1], 1 / rms of the row: multiplies gain * x
    weights: Tensor  # fp32 [k], by `rule`
    history: Tensor  # int16 [steps, k], a view
    counts: Tensor  # int32 [E], incremented for each choice
    step: Tensor  # int32 [1], row of `history` to write; complete before the pass's first kernel starts
    arrived: Tensor  # int32 [1], programs that have stored their logits; 0 between kernels
    rule: Rule
    is_gated: bool = False  # the last logit is the shared expert's gate

    @classmethod
    def empty(cls, history: Tensor, counts: Tensor, step: Tensor, rule: Rule, is_gated: bool = False) -> RowRouting:
        """Allocates scratch buffers: history [steps, k], counts [E]."""
        sizes = counts.shape[0] + is_gated, 1, history.shape[1]
        logits, scale, weights = (torch.zeros(size, device=history.device) for size in sizes)
        arrived = torch.zeros(1, dtype=torch.int32, device=history.device)
        return cls(logits, scale, weights, history, counts, step, arrived, rule, is_gated)


@triton.jit
def mixer_keys(scores, experts, E: tl.constexpr, BLOCK_E: tl.constexpr, TAKEN: tl.constexpr):
    """Keys int64 [M, BLOCK_E], ordered as (score descending, index ascending); TAKEN beyond E.

    All keys are comparable, those of NaN included, so each rank goes to exactly one expert.
    """
    bits = scores.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # bits of negative floats order in reverse
    return tl.where(experts < E, bits.to(tl.int64) * BLOCK_E + (BLOCK_E - 1 - experts), TAKEN)


@triton.jit
def mixer_weight(scores, left, picked, jitter):
    """Sparsemixer weight [M] of the expert `picked`, the best of `left`; arguments [M, BLOCK_E].

    Softmax share among the experts of `left` within a relative distance of 2 * jitter.
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
    """Top-k by the family's rule (ties: lower index); all PROGRAMS programs call it after storing their logits."""
    tl.debug_barrier()  # orders all threads' stores before the arrival
    if tl.atomic_add(arrived, 1) == PROGRAMS - 1:
        tl.store(arrived, 0)
        experts = tl.arange(0, BLOCK_E)
        # .cg reads the L2, which has the other programs' stores.
        scores = tl.load(logits + experts, mask=experts < E, other=float("-inf"), cache_modifier=".cg")
        if MIXER:
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
            # Compares bits: they order as non-negative floats do, NaN included, so each rank goes to one expert.
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
