"""The inputs of a target's experts: a teacher-forced walk over calibration text, one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specter.models.layerwise import Routed, Source, TargetLayer, embed
from specter.quantize.layer import LayerExperts, LayerInputs, expert_output


@dataclass(frozen=True, slots=True)
class WalkState:
    """The state from which a walk resumes."""

    layer: int  # the next layer, dense ones counted
    states: list[Tensor]  # batches fp32 [B, T, D] that enter it


@dataclass(frozen=True, slots=True)
class WalkedLayer:
    """One MoE layer; rows of the inputs are all tokens in order, [sequences * T, ...]."""

    layer: int  # MoE layers from 0
    experts: LayerExperts
    inputs: LayerInputs
    after: WalkState


def walk_moe_layers(
    source: Source, tokens: Tensor, device: torch.device | str = "cpu", start: WalkState | None = None
) -> Iterator[WalkedLayer]:
    """Yields each MoE layer's experts and their inputs over `tokens`, int64 [sequences, T], from `start` on.

    Later layers see the outputs of the target's own, unquantized experts.
    """
    spec = source.spec
    state = start or WalkState(0, embed(source, tokens, device))
    for index in range(state.layer, spec.num_layers):
        layer = TargetLayer(source, index, tokens.shape[1], device)
        states = [layer.attend(x, layer.heads(x)) for x in state.states]
        if layer.is_dense:
            state = WalkState(index + 1, [layer.dense(x) for x in states])
            continue
        moe_layer = index - spec.num_dense_layers
        experts = load_experts(source, moe_layer, device)
        inputs, outputs = run_experts(experts, [layer.route(x) for x in states])
        state = WalkState(index + 1, outputs)
        yield WalkedLayer(moe_layer, experts, inputs, state)


def load_experts(source: Source, layer: int, device: torch.device | str) -> LayerExperts:
    """The routed experts of MoE layer `layer`."""
    gate_up, down = (part.to(device) for part in source.experts(layer))
    gate, up = gate_up.chunk(2, dim=1)
    return LayerExperts(gate, up, down)


def run_experts(experts: LayerExperts, routed: list[Routed]) -> tuple[LayerInputs, list[Tensor]]:
    """The experts' inputs, rows of all batches, and the layer's outputs by batch."""
    hidden, routing, gains = (
        torch.cat([getattr(one, part).flatten(0, 1) for one in routed]) for part in ("hidden", "routing", "gains")
    )
    inputs, num_experts = LayerInputs(hidden, routing), len(experts.gate)
    gains = torch.zeros(len(gains), num_experts, device=gains.device).scatter(1, routing, gains)
    total = torch.zeros_like(hidden)
    for expert, rows in enumerate(inputs.visits(num_experts)):
        _, out = expert_output(experts, expert, hidden[rows])
        total.index_add_(0, rows, out * gains[rows, expert, None])
    parts = total.split([one.base.shape[:2].numel() for one in routed])
    return inputs, [one.base + part.view_as(one.base) for one, part in zip(routed, parts, strict=True)]
