"""The Expert Lookahead Buffer (paper, PIO): how often the draft chose each expert in this round."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class LookaheadBuffer:
    """int32 counters [MoE layers, E]: filled after every draft step, read at a planner's boundary."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.counts = np.zeros((num_layers, num_experts), np.int32)
        self._rows = np.arange(num_layers)[:, None]

    def clear(self) -> None:
        self.counts[:] = 0

    def add(self, routing: NDArray[np.int16]) -> None:
        """Counts one draft token's routing [MoE layers, top_k]; a token chooses an expert at most once."""
        self.counts[self._rows, routing] += 1
