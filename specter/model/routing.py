"""Softmax top-k routing with one answer: by weight descending, equal weights by the lower index."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Router weights fp32 [rows, k] (softmax over all experts, not renormalised) and expert ids int64 [rows, k].

    Args:
        logits: router logits [rows, E].
    """
    probs = torch.softmax(logits.float(), dim=-1)
    # The bits of a non-negative float order as integers do; the reversed index below them breaks ties.
    num_experts = logits.shape[-1]
    reversed_index = torch.arange(num_experts - 1, -1, -1, device=logits.device)
    keys = probs.view(torch.int32).to(torch.int64).mul_(num_experts).add_(reversed_index)
    best = torch.topk(keys, k, dim=-1).indices
    return probs.gather(-1, best), best
