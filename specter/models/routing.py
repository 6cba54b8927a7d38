"""Deterministic routing: by weight descending, equal weights by the lower index.

Reductions run along a row or term by term in a fixed order, so a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from specter.models.spec import ModelSpec


def route(spec: ModelSpec, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Router weights fp32 [rows, k], times the routed scaling, and expert ids int64 [rows, k], in rank order, of logits
    [rows, E]."""
    if spec.router == "sparsemixer":
        weights, experts = sparsemixer(logits.float(), spec.router_jitter)
    elif spec.num_groups > 1:
        weights, experts = grouped_top_k(logits, spec.top_k, spec.num_groups, spec.top_groups)
    else:
        weights, experts = top_k(logits, spec.top_k)
    if spec.norm_top_k:
        weights = weights / weights.cumsum(-1)[:, -1:]
    return weights if spec.routed_scaling == 1 else weights * spec.routed_scaling, experts


def choose(spec: ModelSpec, logits: Tensor) -> Tensor:
    """The experts of `route` alone."""
    return _best_two(logits.float())[1] if spec.router == "sparsemixer" else route(spec, logits)[1]


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, the k best, not renormalised."""
    probs = torch.softmax(logits.float(), dim=-1)
    best = _best(probs, k)
    return probs.gather(-1, best), best


def grouped_top_k(logits: Tensor, k: int, num_groups: int, top_groups: int) -> tuple[Tensor, Tensor]:
    """`top_k` among the experts of the `top_groups` groups with the best expert each (arXiv 2405.04434, 2.2.2)."""
    probs = torch.softmax(logits.float(), dim=-1)
    groups = _best(probs.unflatten(-1, (num_groups, -1)).amax(-1), top_groups)
    is_open = torch.zeros(len(probs), num_groups, dtype=torch.bool, device=probs.device).scatter(1, groups, True)
    masked = probs.where(is_open.repeat_interleave(probs.shape[-1] // num_groups, dim=-1), 0.0)
    best = _best(masked, k)
    return masked.gather(-1, best), best


def sparsemixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Two experts, each weighted by its own softmax (arXiv 2409.12136, inference form).

    The first softmax is over the experts within 2 * jitter of the best, relatively; the second likewise, without the
    first expert. The weights do not sum to 1.
    """
    peaks, experts, without_first = _best_two(logits)
    peaks, experts = peaks.unsqueeze(-1), experts.unsqueeze(-1)  # [rows, 2, 1]
    all_logits = logits.unsqueeze(1)
    far = (peaks - all_logits) / all_logits.abs().maximum(peaks) > 2 * jitter
    masked = torch.stack((logits, without_first), dim=1).masked_fill_(far, float("-inf"))
    return torch.softmax(masked, dim=-1).gather(-1, experts).squeeze(-1), experts.squeeze(-1)


def _best_two(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The two largest logits [rows, 2], their experts int64 [rows, 2], and the logits without the first [rows, E]."""
    peak, first = logits.max(dim=-1, keepdim=True)
    without_first = logits.scatter(-1, first, float("-inf"))
    next_peak, second = without_first.max(dim=-1, keepdim=True)
    return torch.cat((peak, next_peak), dim=-1), torch.cat((first, second), dim=-1), without_first


def _best(scores: Tensor, k: int) -> Tensor:
    """Indices int64 [rows, k] of the k largest non-negative scores [rows, n]."""
    # The bits of a non-negative float order as integers do; the reversed index below them breaks ties.
    num = scores.shape[-1]
    keys = torch.add(_reversed_index(num, scores.device), scores.view(torch.int32), alpha=num)
    return torch.topk(keys, k, dim=-1)[1]


@cache
def _reversed_index(num: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached across passes and training
        return torch.arange(num - 1, -1, -1, device=device)  # int64, and so are sums with it
