"""Samplers: how draft tokens are proposed, and which of them the target keeps.

If draft and target select by the same function of (output, position), the longest matching prefix plus one bonus token
is exactly what plain decoding yields. Samplers of logits are in `specter.speculation.sampling`; this module does not
import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from specter.models.base import Output, Proposal


class Sampler(Protocol):
    def propose(self, output: Output, position: int) -> Proposal:
        """The draft's token for `position`."""

    def verify(self, proposals: Sequence[Proposal], outputs: Sequence[Output], position: int) -> list[int]:
        """The tokens to commit: the accepted prefix of the proposals, and one more.

        `outputs[i]` is the target's output for `position + i`; there is one more of them than proposals.
        """


def through_stop(tokens: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """The tokens up to the first one in `stop_ids`, which stays; all of them if there is none."""
    end = next((index for index, token in enumerate(tokens, start=1) if token in stop_ids), len(tokens))
    return list(tokens[:end])


def shared_len(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(tokens), len(others)))


class SelectingSampler:
    """A sampler whose token is a function of (output, position)."""

    def select(self, output: Output, position: int) -> int:
        raise NotImplementedError

    def propose(self, output: Output, position: int) -> Proposal:
        return Proposal(self.select(output, position))

    def verify(self, proposals: Sequence[Proposal], outputs: Sequence[Output], position: int) -> list[int]:
        tokens: list[int] = []
        for proposal, output in zip(proposals, outputs, strict=False):
            token = self.select(output, position + len(tokens))
            tokens.append(token)
            if token != proposal.token:
                return tokens
        return [*tokens, self.select(outputs[len(proposals)], position + len(tokens))]


class FirstToken:
    """Commits the first token of every pass alone: for dense recordings, which draft from every position."""

    def __init__(self, inner: Sampler) -> None:
        self.propose = inner.propose
        self._inner = inner

    def verify(self, proposals: Sequence[Proposal], outputs: Sequence[Output], position: int) -> list[int]:
        return self._inner.verify(proposals, outputs, position)[:1]


class TokenSampler(SelectingSampler):
    """For models whose output *is* the token."""

    def select(self, output: Output, position: int) -> int:
        return int(output)
