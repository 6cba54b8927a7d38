"""Stand-in checkpoints on disk: hub names, int8-coded safetensors, hub config.json."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specter.errors import SpecterError
from specter.models.hub_config import config_of
from specter.models.int8_format import FORMAT, SCALE_SUFFIX, decode_tensor, encode
from specter.models.names import canonical, on_hub
from specter.models.spec import ModelSpec
from tools.standin.network import Weights, dense_shapes, moe_shapes, weight_shapes

# Stacked name -> Specter's name (see specter/models/names.py); {n} is the layer, dense layers included.
HUB_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "norm_bias": "model.norm.bias",
    "head": "lm_head.weight",
    "head_bias": "lm_head.bias",
    "attn_norm": "model.layers.{n}.input_layernorm.weight",
    "attn_norm_bias": "model.layers.{n}.input_layernorm.bias",
    "q": "model.layers.{n}.self_attn.q_proj.weight",
    "kv_a": "model.layers.{n}.self_attn.kv_a_proj_with_mqa.weight",
    "kv_norm": "model.layers.{n}.self_attn.kv_a_layernorm.weight",
    "kv_b": "model.layers.{n}.self_attn.kv_b_proj.weight",
    "k": "model.layers.{n}.self_attn.k_proj.weight",
    "v": "model.layers.{n}.self_attn.v_proj.weight",
    "q_bias": "model.layers.{n}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{n}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{n}.self_attn.v_proj.bias",
    "o": "model.layers.{n}.self_attn.o_proj.weight",
    "o_bias": "model.layers.{n}.self_attn.o_proj.bias",
    "mlp_norm": "model.layers.{n}.post_attention_layernorm.weight",
    "mlp_norm_bias": "model.layers.{n}.post_attention_layernorm.bias",
    "dense_gate": "model.layers.{n}.mlp.gate_proj.weight",
    "dense_up": "model.layers.{n}.mlp.up_proj.weight",
    "dense_down": "model.layers.{n}.mlp.down_proj.weight",
    "router": "model.layers.{n}.mlp.gate.weight",
    "shared_gate": "model.layers.{n}.mlp.shared_experts.gate_proj.weight",
    "shared_up": "model.layers.{n}.mlp.shared_experts.up_proj.weight",
    "shared_down": "model.layers.{n}.mlp.shared_experts.down_proj.weight",
    "shared_sigmoid": "model.layers.{n}.mlp.shared_expert_gate.weight",
    "gate_up": "model.layers.{n}.mlp.experts.gate_up_proj",
    "down": "model.layers.{n}.mlp.experts.down_proj",
}


def _hub_names(name: str, spec: ModelSpec) -> list[str]:
    template = HUB_NAMES[name]
    if "{n}" not in template:
        return [template]
    first = spec.num_dense_layers if name in moe_shapes(spec) else 0
    last = spec.num_dense_layers if name in dense_shapes(spec) else spec.num_layers
    return [template.format(n=layer) for layer in range(first, last)]


def to_hub(weights: Weights, spec: ModelSpec) -> dict[str, Tensor]:
    """Stacked weights to a state dict under Specter's names (routed experts fused per layer)."""
    state: dict[str, Tensor] = {}
    for name, weight in weights.items():
        names = _hub_names(name, spec)
        state.update(zip(names, weight.unbind(0) if "{n}" in HUB_NAMES[name] else [weight], strict=True))
    return state


def from_hub(state: dict[str, Tensor], spec: ModelSpec) -> Weights:
    """Inverse of `to_hub`."""
    weights: Weights = {}
    for name in weight_shapes(spec):
        parts = [state[hub_name].float() for hub_name in _hub_names(name, spec)]
        weights[name] = torch.stack(parts) if "{n}" in HUB_NAMES[name] else parts[0]
    return weights


def save_standin(weights: Weights, spec: ModelSpec, folder: Path) -> None:
    """Writes config.json and the int8-coded model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(spec), indent=1) + "\n")
    coded = encode({name: tensor.detach().cpu() for name, tensor in to_hub(weights, spec).items()})
    coded = {on_hub(spec.family, name): tensor for name, tensor in coded.items()}
    save_file(coded, folder / "model.safetensors", metadata={"format": FORMAT})


def load_standin(spec: ModelSpec, folder: Path) -> Weights:
    """The checkpoint as it is used: decoded to fp32.

    Raises:
        SpecterError: a tensor is missing or unexpected.
    """
    stored = load_file(folder / "model.safetensors")
    coded = {canonical(spec.family, name): tensor for name, tensor in stored.items()}
    plain = {
        name: decode_tensor(tensor, coded[name + SCALE_SUFFIX]) if tensor.dtype == torch.int8 else tensor.float()
        for name, tensor in coded.items()
        if not name.endswith(SCALE_SUFFIX)
    }
    expected = {hub_name for name in weight_shapes(spec) for hub_name in _hub_names(name, spec)}
    if plain.keys() != expected:
        odd = sorted(plain.keys() ^ expected)
        raise SpecterError(f"{folder}: missing or unexpected tensors {odd[:3]}", "train the stand-in again")
    return from_hub(plain, spec)
