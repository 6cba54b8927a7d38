"""The draft without its INT4 kernels: what the fused kernel is worth in a whole round (the paper's ablation)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.bench.int4 import Int4Layer
from specter.gpu.draft import Draft
from specter.kernels import skinny
from specter.model.routing import top_k
from specter.quantize.int4 import Int4Matrices


class UnfusedDraft(Draft):
    """Chosen experts one after the other in plain torch: gather, dequantise, multiply. Everything else is `Draft`.

    Args:
        layers: unpacked codes of every MoE layer, [E, out, in], on the device.
    """

    def __init__(self, layers: list[Int4Layer], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._layers = layers

    def run_moe(self, index: int, moe: int, next_gain: Tensor) -> None:
        layer, spec, tuning, pdl = self.weights.layers[index], self.weights.spec, self.tuning, self.pdl
        skinny.norm_gated(
            self._attended, layer.wide, self._shared, self._router, self._scale, spec.norm_eps, tuning.wide, pdl
        )
        weights, chosen = (part[0] for part in top_k(self._router[None], spec.top_k))
        self.routing[:, moe].index_copy_(0, self.step_index.long(), chosen.to(torch.int16)[None])
        self.counts[moe].index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
        x = (self._octets.decode() * self._scale).to(self.weights.dtype)
        for rank in range(spec.top_k):
            gate, up, down = (_one(part, chosen[rank : rank + 1], self.weights.dtype) for part in self._layers[moe])
            inner = F.silu(F.linear(x, gate)) * F.linear(x, up)
            self.x[0] += F.linear(inner, down).float() * (weights[rank] * spec.routed_scaling)
        skinny.linear_residual(self._shared, layer.down, self._moe_done, next_gain, None, tuning.down, pdl)


def _one(matrices: Int4Matrices, expert: Tensor, dtype: torch.dtype) -> Tensor:
    """One expert's matrix [out, in]; `expert` int64 [1] stays on the device."""
    codes, scales, zeros = (
        part.index_select(0, expert)[0] for part in (matrices.codes, matrices.scales, matrices.zeros)
    )
    return Int4Matrices(codes, scales, zeros, matrices.group).dequantize(dtype)
