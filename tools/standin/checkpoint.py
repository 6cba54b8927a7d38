"""Stand-in checkpoints on disk: hub names, int8-coded safetensors, hub config.json."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.models.checkpoint import Checkpoint, write_checkpoint
from specter.models.spec import ModelSpec
from tools.standin.network import Weights, dense_shapes, moe_shapes, weight_shapes

# Stacked name -> Specter's name (see specter/models/names.py), of the model or of a layer.
MODEL_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "norm_bias": "model.norm.bias",
    "head": "lm_head.weight",
    "head_bias": "lm_head.bias",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "attn_norm_bias": "input_layernorm.bias",
    **{name: f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o", "kv_b")},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in ("q", "k", "v", "o")},
    "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_norm": "self_attn.kv_a_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp_norm_bias": "post_attention_layernorm.bias",
    **{f"dense_{name}": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "router": "mlp.gate.weight",
    **{f"shared_{name}": f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")},
    "shared_sigmoid": "mlp.shared_expert_gate.weight",
    "gate_up": "mlp.experts.gate_up_proj",
    "down": "mlp.experts.down_proj",
}


def _hub_names(name: str, spec: ModelSpec) -> list[str]:
    """The names of the tensors that one stacked weight holds, one per layer that has it."""
    if name in MODEL_NAMES:
        return [MODEL_NAMES[name]]
    first = spec.num_dense_layers if name in moe_shapes(spec) else 0
    last = spec.num_dense_layers if name in dense_shapes(spec) else spec.num_layers
    return [f"model.layers.{layer}.{LAYER_NAMES[name]}" for layer in range(first, last)]


def to_hub(weights: Weights, spec: ModelSpec) -> dict[str, Tensor]:
    """Stacked weights to a state dict under Specter's names (routed experts fused per layer)."""
    state: dict[str, Tensor] = {}
    for name, weight in weights.items():
        names = _hub_names(name, spec)
        state.update(zip(names, [weight] if name in MODEL_NAMES else weight.unbind(0), strict=True))
    return state


def from_hub(state: dict[str, Tensor], spec: ModelSpec) -> Weights:
    """Inverse of `to_hub`."""
    weights: Weights = {}
    for name in weight_shapes(spec):
        parts = [state[hub_name].float() for hub_name in _hub_names(name, spec)]
        weights[name] = parts[0] if name in MODEL_NAMES else torch.stack(parts)
    return weights


def save_standin(weights: Weights, spec: ModelSpec, folder: Path) -> None:
    """Writes config.json and the int8-coded model.safetensors."""
    write_checkpoint(
        folder, spec, {name: tensor.detach().cpu() for name, tensor in to_hub(weights, spec).items()}, int8=True
    )


def load_standin(spec: ModelSpec, folder: Path) -> Weights:
    """The checkpoint as it is used: decoded to fp32.

    Raises:
        SpecterError: a tensor is missing or unexpected, or config.json describes another model than `spec`.
    """
    checkpoint = Checkpoint.open(folder)
    if dataclasses.replace(checkpoint.spec, name=spec.name) != spec:
        raise SpecterError(
            f"{folder}: config.json describes another model than {spec.name}", "train the stand-in again"
        )
    names = (hub_name for name in weight_shapes(spec) for hub_name in _hub_names(name, spec))
    return from_hub({name: checkpoint.tensor(name) for name in names}, spec)
