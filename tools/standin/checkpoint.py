"""Stand-in checkpoints on disk: hub names, int8-coded safetensors, hub config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.files import write_json
from specter.models.checkpoint import Checkpoint, write_checkpoint
from specter.models.spec import ModelSpec
from tools.standin.network import MODEL, Weights, hub_names


def to_hub(weights: Weights, spec: ModelSpec) -> dict[str, Tensor]:
    """Stacked weights to a state dict under Specter's names (routed experts fused per layer)."""
    state: dict[str, Tensor] = {}
    for weight, names in hub_names(spec).items():
        parts = [weights[weight]] if weight in MODEL else weights[weight].unbind(0)
        state.update(zip(names, parts, strict=True))
    return state


def from_hub(state: Mapping[str, Tensor], spec: ModelSpec) -> Weights:
    """Inverse of `to_hub`, in fp32."""
    parts = {weight: [state[name].float() for name in names] for weight, names in hub_names(spec).items()}
    return {weight: tensors[0] if weight in MODEL else torch.stack(tensors) for weight, tensors in parts.items()}


def save_standin(weights: Weights, spec: ModelSpec, folder: Path) -> None:
    """Writes config.json, the int8-coded model.safetensors, and generation_config.json: token 0 starts every document
    of the corpus, so it ends the one before."""
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0})
    write_checkpoint(
        folder, spec, {name: tensor.detach().cpu() for name, tensor in to_hub(weights, spec).items()}, int8=True
    )


def load_standin(spec: ModelSpec, folder: Path) -> Weights:
    """The checkpoint as it is used: decoded to fp32.

    Raises SpecterError: a tensor is missing or unexpected, or config.json describes another model than `spec`.
    """
    checkpoint = Checkpoint.open(folder)
    if dataclasses.replace(checkpoint.spec, name=spec.name) != spec:
        raise SpecterError(
            f"{folder}: config.json describes another model than {spec.name}", "train the stand-in again"
        )
    return from_hub({name: checkpoint.tensor(name) for names in hub_names(spec).values() for name in names}, spec)
