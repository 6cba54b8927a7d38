"""A pass of the device target behind the `TargetPass` protocol, without a word to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specter.gpu.target import Target
from specter.model.base import Output


class DevicePass:
    """A `TargetPass` of which nothing reaches the host: `mix` tells no routing, and any expert may be asked for."""

    def __init__(self, target: Target, tokens: Tensor, position: int, num_outputs: int) -> None:
        """
        Args:
            tokens: int32 [T], on the device or pinned.
        Raises:
            SpecterError: the pass does not fit the target's buffers.
        """
        self._target = target
        self._num_rows = tokens.shape[0]
        self._num_outputs = num_outputs
        target.begin(tokens, position, num_outputs)
        target.embed(self._num_rows)

    def mix(self, layer: int) -> None:
        self._target.mix(layer, self._num_rows)

    def run_experts(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        device, num_experts = self._target.x.device, self._target.weights.spec.num_experts
        table = torch.full((num_experts,), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        table[torch.tensor(experts)] = torch.tensor(slots, dtype=torch.int32)
        self._target.run_experts(table.to(device, non_blocking=True), self._num_rows)

    def combine(self, layer: int) -> None:
        self._target.combine(layer, self._num_rows)

    def outputs(self) -> list[Output]:
        """Logits fp32 [num_tokens] of the last rows, without padding: views that the next pass overwrites."""
        self._target.choose(self._num_rows, self._num_outputs)
        return list(self._target.logits[: self._num_outputs, : self._target.weights.num_tokens].unbind(0))
