"""What the next layer's router says one layer early, on the device: for rivals that load by it.

The residual stream is read, and everything else lies in buffers of its own: the layer that runs is not disturbed.
"""

from __future__ import annotations

import dataclasses

import torch

from specter.kernels import grouped_mlp, pinned_io, tiles
from specter.kernels.grouped_mlp import Routing
from specter.models.cuda.target import Target


class DeviceForesight:
    """The next layer's norm and router on the state between a layer's attention and its experts.

    Attributes:
        foreseen: int16 [MoE layers - 1, max_rows, k] in page-locked memory: the experts in rank order, of the layer
            after each MoE layer; readable once the work's event has happened.
    """

    def __init__(self, target: Target) -> None:
        spec, device, num_rows = target.weights.spec, target.weights.device, target.max_rows
        self._target = target
        self._scaled = torch.zeros_like(target.scaled)
        self._logits = torch.zeros(num_rows, spec.num_experts, device=device)
        self._routing = Routing.empty(num_rows, spec.top_k, spec.num_experts, device)
        shape = max(spec.num_moe_layers - 1, 0), num_rows, spec.top_k
        self.foreseen = pinned_io.pinned_zeros(shape, torch.int16, device)

    def run(self, layer: int, num_rows: int) -> None:
        """Between `mix` of MoE layer `layer` (of all layers) and its `combine`; issued to the current stream."""
        target, spec = self._target, self._target.weights.spec
        following, rows = target.weights.layers[layer + 1], slice(num_rows)
        # The sums of squares are the state's own, whatever gain follows.
        stream, norm = dataclasses.replace(target.attended(num_rows), scaled=self._scaled[rows]), following.mlp_norm
        if norm.bias is None:
            torch.mul(stream.x, norm.gain, out=stream.scaled)
        else:
            norm.finish(stream, spec.norm_eps, target.pdl)
        router, logits = following.wide[: spec.num_experts], self._logits[rows]
        tiles.norm_linear(stream, router, logits, spec.norm_eps, target.tuning.qkv, target.pdl)
        routing = dataclasses.replace(
            self._routing, chosen=self._routing.chosen[rows], weights=self._routing.weights[rows]
        )
        grouped_mlp.route(logits, routing, target.rule, target.pdl)
        pinned_io.copy_pinned(routing.chosen, self.foreseen[layer - spec.num_dense_layers, rows])
