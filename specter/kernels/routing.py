"""Routing of the draft's one row, by the last of the programs that compute router logits.

No launch of its own, and none of the kernels after it decides anything. bytes: E logits.
"""

# mypy: disable-error-code=no-untyped-def
# (the arguments of a kernel are typed by its launch)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowRouting:
    """What one MoE layer's router says of the draft's row, and who was chosen at every step so far."""

    logits: Tensor  # fp32 [E]
    scale: Tensor  # fp32 [1], 1 / rms of the row: multiplies gain * x
    weights: Tensor  # fp32 [k], times the model's routed scaling
    history: Tensor  # int16 [steps, k], a view
    counts: Tensor  # int32 [E], + 1 each time
    step: Tensor  # int32 [1], the row of `history` to write; complete before the pass's first kernel starts
    arrived: Tensor  # int32 [1], programs that have stored their logits; 0 between kernels
    scaling: float

    @classmethod
    def empty(cls, history: Tensor, counts: Tensor, step: Tensor, scaling: float) -> RowRouting:
        """With scratch of its own: history [steps, k], counts [E]."""

        def room(size: int) -> Tensor:
            return torch.zeros(size, device=history.device)

        arrived = torch.zeros(1, dtype=torch.int32, device=history.device)
        scratch = room(counts.shape[0]), room(1), room(history.shape[1])
        return cls(*scratch, history, counts, step, arrived, scaling)


@triton.jit
def route_if_last(
    logits, weights, history, counts, step, arrived, scaling, PROGRAMS: tl.constexpr, E: tl.constexpr,
    TOP_K: tl.constexpr, STEP_STRIDE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Top-k of softmax weights (ties: the lower index); each of PROGRAMS programs calls it, its logits stored."""
    tl.debug_barrier()  # all threads' stores come before the one thread's arrival
    if tl.atomic_add(arrived, 1) == PROGRAMS - 1:
        tl.store(arrived, 0)
        experts = tl.arange(0, BLOCK_E)
        # From the L2, where the other programs' stores are.
        scores = tl.load(logits + experts, mask=experts < E, other=float("-inf"), cache_modifier=".cg")
        probs = tl.exp(scores - tl.max(scores, axis=0))
        probs = probs / tl.sum(probs, axis=0)
        # The bits of a non-negative float order as integers do; unlike floats, all are comparable, NaN too, so that
        # every rank is taken by exactly one expert.
        bits = probs.to(tl.int32, bitcast=True)
        is_tie_won = (bits[None, :] == bits[:, None]) & (experts[None, :] < experts[:, None])
        rank = tl.sum(((bits[None, :] > bits[:, None]) | is_tie_won).to(tl.int32), axis=1)
        is_chosen = rank < TOP_K
        tl.store(weights + rank, probs * scaling, mask=is_chosen)
        tl.store(counts + experts, tl.load(counts + experts, mask=is_chosen, other=0) + 1, mask=is_chosen)
        row = history + tl.load(step) * STEP_STRIDE
        tl.store(row + rank, experts.to(history.dtype.element_ty), mask=is_chosen)
