"""The device's target and draft behind the engine's `Model`: the same engine drives them on the device clock.

Tokens are chosen on the device, so that a draft step feeds the next; outputs *are* tokens (`TokenSampler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from specter.errors import SpecterError
from specter.kernels import pinned_io
from specter.models.base import Choose, Proposal, TargetPass
from specter.models.cuda.device_pass import DevicePasses
from specter.models.cuda.draft import Draft
from specter.models.cuda.graphs import Graph


@dataclass(frozen=True, slots=True)
class DeviceDraftStep:
    """A `DraftStep` in page-locked memory: readable once its event has happened, until the next round drafts."""

    tokens: NDArray[np.int32]  # [max_steps]
    routings: NDArray[np.int16]  # [max_steps, MoE layers, top_k]
    index: int

    @property
    def proposal(self) -> Proposal:
        return Proposal(int(self.tokens[self.index]))

    @property
    def routing(self) -> NDArray[np.int16]:
        return self.routings[self.index].copy()


class DeviceModel:
    """A `Model` on the device.

    Args:
        draft: None for a target alone.
        is_graphed: launch draft steps, and passes of the row counts captured, as CUDA graphs.
    """

    def __init__(self, passes: DevicePasses, draft: Draft | None, is_graphed: bool = True) -> None:
        spec = passes.target.weights.spec
        self.num_layers, self.num_dense_layers = spec.num_layers, spec.num_dense_layers
        self.num_experts, self.top_k = spec.num_experts, spec.top_k
        self.passes = passes
        self._draft = draft
        self._is_graphed = is_graphed
        self._num_drafted = 0
        if draft is None:
            return
        device = passes.target.weights.device
        self._tokens = pinned_io.pinned_zeros(tuple(draft.tokens.shape), torch.int32, device)
        self._routings = pinned_io.pinned_zeros(tuple(draft.routing.shape), torch.int16, device)
        self._step = self._run_step
        if is_graphed:
            draft.begin(0, 0)
            self._step = Graph(self._run_step).replay

    def capture(self, num_rows: int) -> None:
        """Captures target passes of `num_rows` rows, if graphs are wanted; call it before the first prompt."""
        if self._is_graphed:
            self.passes.capture(num_rows)

    def capture_foresight(self, num_rows: int) -> None:
        """As `capture`, for what a system with foresight launches beside such passes."""
        if self._is_graphed:
            self.passes.capture_foresight(num_rows)

    def reset(self) -> None:
        """Forgets slot tables that an interrupted pass has written and not read; waits for the device.

        KV may stay: attention ends at a pass' own rows, and what is before them was written by this prompt.
        """
        self.passes.tables.restart()

    def begin_draft(self, token: int, position: int, choose: Choose) -> None:
        """See `Model`; the device chooses by itself.

        Raises:
            SpecterError: there is no draft.
        """
        if self._draft is None:
            raise SpecterError("this model has no draft", "load the INT4 experts")
        self._draft.begin(token, position)
        self._num_drafted = 0

    def draft_step(self) -> DeviceDraftStep:
        self._step()
        self._num_drafted += 1
        return DeviceDraftStep(self._tokens.numpy(), self._routings.numpy(), self._num_drafted - 1)

    def target_pass(self, tokens: Sequence[int], position: int, num_outputs: int) -> TargetPass:
        return self.passes.begin(tokens, position, num_outputs)

    def crop(self, length: int) -> None:
        """Nothing to cut: what lies behind is written anew before it is read."""

    def _run_step(self) -> None:
        assert self._draft is not None
        self._draft.run()
        # All steps so far, every time: a view of one row would need the step's number on the host.
        pinned_io.copy_pinned(self._draft.tokens, self._tokens)
        pinned_io.copy_pinned(self._draft.routing, self._routings)
