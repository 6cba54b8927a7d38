"""Writes the AutoGPTQ directory that `gptq_format` describes and reads, layer by layer."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from specter.errors import SpecterError
from specter.files import write_json
from specter.models.checkpoint import INDEX_FILE
from specter.models.hub_config import config_of
from specter.models.spec import ModelSpec
from specter.quantize.gptq_format import PROJECTIONS, V1, V1_WITH_INPUT_SCALES, pack, scales_name, tensor_name
from specter.quantize.layer import Int4Layer

EXPERTS_ONLY = r"-:^(?!.*\.experts\.\d).*$"  # gptqmodel: nothing else is quantized


def layer_tensors(spec: ModelSpec, index: int, layer: Int4Layer) -> dict[str, Tensor]:
    """The tensors of MoE layer `index`, on the CPU, under the names that transformers and gptqmodel use.

    Raises SpecterError: a zero point of 0, which the format cannot hold.
    """
    tensors = {}
    for projection in PROJECTIONS:
        matrices = getattr(layer, projection)
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


def write_config(
    directory: Path, spec: ModelSpec, group_size: int, *, sym: bool = True, method: str, num_fallback: int
) -> None:
    """Writes config.json; `group_size` is the requested one, rows may be shorter."""
    modules = [f"mlp.experts.{expert}.{name}_proj" for expert in range(spec.num_experts) for name in PROJECTIONS]
    quantization = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size,
        "desc_act": False,
        "sym": sym,
        "checkpoint_format": V1_WITH_INPUT_SCALES if method == "awq" else V1,
        "modules_in_block_to_quantize": [modules],
        "dynamic": {EXPERTS_ONLY: {}},
        "meta": {"quantizer": "specter", "method": method, "num_fallback": num_fallback},
    }
    write_json(directory / "config.json", config_of(spec) | {"quantization_config": quantization})


def write_index(directory: Path, weight_map: dict[str, str], num_bytes: int) -> None:
    write_json(directory / INDEX_FILE, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})
