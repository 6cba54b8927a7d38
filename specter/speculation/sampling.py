"""Tokens from logits: greedy, seeded (both lossless bit for bit), and rejection sampling.

Rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318) is exact in distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray

from specter.config import SamplingConfig
from specter.models.base import Output, Proposal
from specter.speculation.accept import Sampler, SelectingSampler
from specter.speculation.noise import gumbel, uniforms


class GreedySampler(SelectingSampler):
    """The argmax of the logits."""

    def select(self, output: Output, position: int) -> int:
        return int(output.argmax())


class SeededSampler(SelectingSampler):
    """argmax(logits / T + Gumbel(seed, position)) over the logits that top-k and top-p leave."""

    def __init__(self, sampling: SamplingConfig) -> None:
        self._sampling = sampling
        # Draft, target and the second draft of a rejected position use the same noise within two rounds.
        self._noise = lru_cache(maxsize=128)(partial(gumbel, sampling.seed))

    def select(self, output: Output, position: int) -> int:
        logits = output.float() / self._sampling.temperature
        keep = _kept(logits, self._sampling)
        noisy = logits + torch.from_numpy(self._noise(position, logits.shape[-1])).to(logits.device)
        return int((noisy if keep is None else noisy.masked_fill(~keep, -torch.inf)).argmax())


class RejectionSampler:
    """Exact speculative sampling: accept x ~ q with probability min(1, p(x)/q(x)), else draw from (p - q)+."""

    _DRAFT, _ACCEPT, _TARGET = 1, 2, 3  # noise streams

    def __init__(self, sampling: SamplingConfig) -> None:
        self._sampling = sampling

    def propose(self, output: Output, position: int) -> Proposal:
        probs = self._probs(output)
        return Proposal(self._draw(probs, position, self._DRAFT), probs)

    def verify(self, proposals: Sequence[Proposal], outputs: Sequence[Output], position: int) -> list[int]:
        tokens: list[int] = []
        for proposal, output in zip(proposals, outputs, strict=False):
            target, draft = self._probs(output), proposal.probs
            assert draft is not None
            here = position + len(tokens)
            if self._uniform(here, self._ACCEPT) * draft[proposal.token] < target[proposal.token]:
                tokens.append(proposal.token)
                continue
            residual = np.maximum(target - draft, 0.0)
            return [*tokens, self._draw(residual / residual.sum(), here, self._TARGET)]
        bonus = self._probs(outputs[len(proposals)])
        return [*tokens, self._draw(bonus, position + len(tokens), self._TARGET)]

    def _probs(self, output: Output) -> NDArray[np.float64]:
        logits = output.double() / self._sampling.temperature
        keep = _kept(logits, self._sampling)
        probs = torch.softmax(logits if keep is None else logits.masked_fill(~keep, -torch.inf), -1)
        return probs.cpu().numpy()

    def _uniform(self, position: int, stream: int) -> float:
        return float(uniforms(self._sampling.seed, position, stream, 1)[0])

    def _draw(self, probs: NDArray[np.float64], position: int, stream: int) -> int:
        cumulative = probs.cumsum()
        return int(np.searchsorted(cumulative, self._uniform(position, stream) * cumulative[-1], side="right"))


def _kept(logits: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor | None:
    """Mask [V] of the tokens that top-k and top-p leave; None if they leave all. At least one token stays."""
    if sampling.top_k == 0 and sampling.top_p >= 1.0:
        return None
    ordered, index = torch.sort(logits, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k:
        keep[sampling.top_k :] = False
    before = torch.softmax(ordered.masked_fill(~keep, -torch.inf), -1).cumsum(-1).roll(1)
    before[0] = 0.0
    keep &= before < sampling.top_p
    return torch.zeros_like(keep).scatter(0, index, keep)


def build_sampler(sampling: SamplingConfig) -> Sampler:
    """The sampler of a validated configuration."""
    if sampling.kind == "greedy":
        return GreedySampler()
    return SeededSampler(sampling) if sampling.kind == "seeded" else RejectionSampler(sampling)
