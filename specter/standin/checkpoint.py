"""Stand-in checkpoints on disk: hub names, int8-coded safetensors, hub config.json."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specter.errors import SpecterError
from specter.model.int8_format import FORMAT, SCALE_SUFFIX, decode_tensor, encode
from specter.model.spec import ModelSpec
from specter.standin.network import DENSE, MOE, Weights, weight_shapes

# Stacked name -> hub name; {n} is the layer, dense layers included.
HUB_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{n}.input_layernorm.weight",
    "q": "model.layers.{n}.self_attn.q_proj.weight",
    "kv_a": "model.layers.{n}.self_attn.kv_a_proj_with_mqa.weight",
    "kv_norm": "model.layers.{n}.self_attn.kv_a_layernorm.weight",
    "kv_b": "model.layers.{n}.self_attn.kv_b_proj.weight",
    "o": "model.layers.{n}.self_attn.o_proj.weight",
    "mlp_norm": "model.layers.{n}.post_attention_layernorm.weight",
    "dense_gate": "model.layers.{n}.mlp.gate_proj.weight",
    "dense_up": "model.layers.{n}.mlp.up_proj.weight",
    "dense_down": "model.layers.{n}.mlp.down_proj.weight",
    "router": "model.layers.{n}.mlp.gate.weight",
    "shared_gate": "model.layers.{n}.mlp.shared_experts.gate_proj.weight",
    "shared_up": "model.layers.{n}.mlp.shared_experts.up_proj.weight",
    "shared_down": "model.layers.{n}.mlp.shared_experts.down_proj.weight",
    "gate_up": "model.layers.{n}.mlp.experts.gate_up_proj",
    "down": "model.layers.{n}.mlp.experts.down_proj",
}


def _hub_names(name: str, spec: ModelSpec) -> list[str]:
    template = HUB_NAMES[name]
    if "{n}" not in template:
        return [template]
    first = spec.num_dense_layers if name in MOE else 0
    last = spec.num_dense_layers if name in DENSE else spec.num_layers
    return [template.format(n=layer) for layer in range(first, last)]


def to_hub(weights: Weights, spec: ModelSpec) -> dict[str, Tensor]:
    """Stacked weights to a state dict under hub names (routed experts fused per layer)."""
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
    (folder / "config.json").write_text(json.dumps(spec.to_config(), indent=1) + "\n")
    coded = encode({name: tensor.detach().cpu() for name, tensor in to_hub(weights, spec).items()})
    save_file(coded, folder / "model.safetensors", metadata={"format": FORMAT})


def load_standin(spec: ModelSpec, folder: Path) -> Weights:
    """The checkpoint as it is used: decoded to fp32.

    Raises:
        SpecterError: a tensor is missing or unexpected.
    """
    coded = load_file(folder / "model.safetensors")
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
