"""The model interface of the engine: opaque outputs, and readable routing.

The engine passes an `Output` to the sampler unread: logits of a live decoder, or the token itself in a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Output = Any
Routing = NDArray[np.int16]  # expert ids, [rows, top_k], rank order


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft token, and the distribution from which it was drawn if the sampler needs it."""

    token: int
    probs: NDArray[np.float64] | None = None  # [V]


Choose = Callable[[Output, int], Proposal]  # the draft's token for a position, from the output for it


class DraftStep(Protocol):
    """A token for the next position, and the experts chosen for it in every MoE layer; both valid from the step's event
    until the next round's drafting begins."""

    @property
    def proposal(self) -> Proposal: ...

    @property
    def routing(self) -> NDArray[np.int16]:
        """[MoE layers, top_k]"""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The `DraftStep` of a synchronous model."""

    proposal: Proposal
    routing: NDArray[np.int16]  # [MoE layers, top_k]


class TargetPass(Protocol):
    """One pass of the target over consecutive positions, driven layer by layer by the engine.

    Order of calls per layer: `attend_and_route`, then `run_experts` (with a codec after
    `decode`) once per wave until every expert of the layer's
    routing has run exactly once, then `combine`. After the last layer: `outputs`. A result may be read once the event
    of the compute that produced it has happened.
    """

    def attend_and_route(self, layer: int) -> Routing | None:
        """Attention, norms, router, shared expert. Returns routing [rows, top_k]; a dense layer runs whole and
        returns None."""

    def predict_next(self, layer: int) -> Routing:
        """The next layer's router on this layer's hidden state (attention added, experts not yet), [rows, top_k] in
        rank order. Called after `attend_and_route` of a MoE layer other than the last, and before its `combine`."""

    def decode(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Decodes the payloads of one wave, in these slots, into the staging places 0, 1, …; for codecs that decode."""

    def run_experts(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Runs one wave: these experts, with 16-bit weights in these slots, or in these staging places."""

    def combine(self, layer: int) -> None:
        """Reduces the waves' rows over k in rank order and adds the residual."""

    def outputs(self) -> Sequence[Output]:
        """One output per requested row (see `Model.target_pass`)."""


class Model(Protocol):
    """A target and its INT4 draft over one KV cache."""

    num_layers: int
    num_dense_layers: int
    num_experts: int
    top_k: int

    def reset(self) -> None:
        """Clears the KV cache."""

    def begin_draft(self, token: int, position: int, choose: Choose) -> None:
        """Sets the input of the next draft step: `token`, committed at `position`. Later steps continue from the
        token that `choose` (or the model's device) chose before."""

    def draft_step(self) -> DraftStep:
        """Appends temporary KV at the step's position and chooses a token for the next one."""

    def target_pass(self, tokens: Sequence[int], position: int, num_outputs: int) -> TargetPass:
        """A pass over `tokens` at `position`…; rewrites KV there. Outputs are of the last `num_outputs` rows."""

    def crop(self, length: int) -> None:
        """Keeps KV of the first `length` positions."""
