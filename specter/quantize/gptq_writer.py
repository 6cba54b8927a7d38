"""Writes the AutoGPTQ directory that `gptq_format` describes and reads, layer by layer or whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specter.errors import SpecterError
from specter.models.hub_config import config_of
from specter.models.spec import ModelSpec
from specter.quantize.gptq_format import (
    INDEX_FILE,
    PROJECTIONS,
    SINGLE_FILE,
    V1,
    V1_WITH_INPUT_SCALES,
    pack,
    scales_name,
    tensor_name,
)
from specter.quantize.int4 import Int4Experts, Int4Matrices
from specter.quantize.layer import Int4Layer, QuantizedLayer
from specter.quantize.rtn import SYMMETRIC_ZERO

MAX_SHARD_BYTES = 4 * 2**30
EXPERTS_ONLY = r"-:^(?!.*\.experts\.\d).*$"  # tells gptqmodel that nothing else is quantised


@dataclass(frozen=True, slots=True)
class Note:
    """What config.json says about all layers."""

    group_size: int  # as asked for; rows may be shorter
    sym: bool
    method: str
    num_fallback: int


def layer_tensors(spec: ModelSpec, index: int, layer: Int4Layer) -> dict[str, Tensor]:
    """The tensors of MoE layer `index`, on the CPU, under the names that transformers and gptqmodel use.

    Raises:
        SpecterError: a zero point of 0, which the format cannot hold.
    """
    tensors = {}
    for projection in PROJECTIONS:
        matrices: Int4Matrices = getattr(layer, projection)
        if bool((matrices.zeros < 1).any()):
            raise SpecterError(f"{projection}: a zero point is 0", "quantise with zeros in 1..15; v1 stores zero - 1")
        for part, batch in pack(matrices).items():
            for expert, tensor in enumerate(batch.cpu()):
                tensors[tensor_name(spec, index, expert, projection, part)] = tensor
    if layer.input_scales is not None:
        tensors[scales_name(spec, index)] = layer.input_scales.float().cpu()
    return tensors


def shard_name(number: int, num_shards: int) -> str:
    """`number` counts from 0."""
    return f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"


def write_config(directory: Path, spec: ModelSpec, note: Note, has_input_scales: bool) -> None:
    modules = [f"mlp.experts.{expert}.{name}_proj" for expert in range(spec.num_experts) for name in PROJECTIONS]
    quantization = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": note.group_size,
        "desc_act": False,
        "sym": note.sym,
        "checkpoint_format": V1_WITH_INPUT_SCALES if has_input_scales else V1,
        "modules_in_block_to_quantize": [modules],
        "dynamic": {EXPERTS_ONLY: {}},
        "meta": {"quantizer": "specter", "method": note.method, "num_fallback": note.num_fallback},
    }
    _write_json(directory / "config.json", config_of(spec) | {"quantization_config": quantization})


def write_index(directory: Path, weight_map: dict[str, str], num_bytes: int) -> None:
    _write_json(directory / INDEX_FILE, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})


def write_directory(
    directory: Path, experts: Int4Experts, spec: ModelSpec, group_size: int, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes config.json and the tensors of all layers into `directory`, which must exist and hold no other model.

    One file, or one a layer where that would exceed `max_shard_bytes`.
    """
    layers = [layer_tensors(spec, index, _layer_of(experts, index)) for index in range(spec.num_moe_layers)]
    sym = all(bool((getattr(experts, name).zeros == SYMMETRIC_ZERO).all()) for name in PROJECTIONS)
    note = Note(group_size, sym, experts.method, experts.num_fallback)
    write_config(directory, spec, note, experts.input_scales is not None)
    num_bytes = sum(tensor.nbytes for tensors in layers for tensor in tensors.values())
    if num_bytes <= max_shard_bytes:
        save_file({name: tensor for tensors in layers for name, tensor in tensors.items()}, directory / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(layers):
        file = shard_name(number, len(layers))
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    write_index(directory, weight_map, num_bytes)


def _layer_of(experts: Int4Experts, index: int) -> Int4Layer:
    gate, up, down = (part.layer(index) for part in (experts.gate, experts.up, experts.down))
    unknown = torch.zeros(0)
    scales = None if experts.input_scales is None else experts.input_scales[index]
    return QuantizedLayer(gate, up, down, tokens=unknown, fallback=unknown, input_scales=scales)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
