"""The draft without its INT4 kernels: the ablation that measures their gain in a whole round."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.codecs.int4 import Int4Matrices
from specter.kernels import skinny
from specter.models.cuda.draft import Draft
from specter.models.cuda.loaded_model import Int4Layer


class UnfusedDraft(Draft):
    """A `Draft` that runs the chosen experts one by one in plain torch: gather, dequantise, multiply.

    Args:
        layers: unpacked codes of every MoE layer, [E, out, in], on the device.
    """

    def __init__(self, layers: list[Int4Layer], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._layers = layers

    def run_moe(self, index: int, moe: int, next_gain: Tensor) -> None:
        layer, tuning, routing = self.weights.layers[index], self.tuning, self._routings[moe]
        skinny.norm_gated(
            self._attended, layer.wide, self._shared, routing, self.weights.spec.norm_eps, tuning.wide, self.pdl
        )
        chosen = routing.history.index_select(0, routing.step)[0].long()
        x = (self._octets.decode() * routing.scale).to(self.weights.dtype)
        for rank, weight in enumerate(routing.weights.split(1)):
            gate, up, down = (_one(part, chosen[rank : rank + 1], self.weights.dtype) for part in self._layers[moe])
            inner = F.silu(F.linear(x, gate)) * F.linear(x, up)
            self.x[0] += F.linear(inner, down).float() * weight
        if routing.is_gated:
            self._shared *= torch.sigmoid(routing.logits[-1:]).to(self._shared.dtype)
        if len(self._shared):  # otherwise the experts' sums are all, and LayerNorm reads nothing else
            skinny.linear_residual(self._shared, layer.down, self._moe_done, next_gain, None, tuning.down, self.pdl)


def _one(matrices: Int4Matrices, expert: Tensor, dtype: torch.dtype) -> Tensor:
    """One expert's matrix [out, in]; `expert` int64 [1] stays on the device."""
    codes, scales, zeros = (
        part.index_select(0, expert)[0] for part in (matrices.codes, matrices.scales, matrices.zeros)
    )
    return Int4Matrices(codes, scales, zeros, matrices.group).dequantize(dtype)
