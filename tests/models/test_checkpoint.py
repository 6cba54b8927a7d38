"""The reader: formats that it reads, and bad input that it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specter.errors import SpecterError
from specter.models.checkpoint import Checkpoint, write_checkpoint
from specter.models.hub_config import config_of
from specter.models.int8_format import decode_tensor, encode
from tests.helpers import TINY, random_tensors, write_random

UP = "model.layers.2.mlp.experts.5.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reads_every_float_width(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(TINY, 0).items()}
    write_checkpoint(tmp_path, TINY, tensors)
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.tensor(UP), tensors[UP].float())
    gate_up, down = checkpoint.experts(1)  # layer 2 is the second MoE layer
    assert torch.equal(gate_up[5, TINY.expert_inter :], tensors[UP].float())
    assert torch.equal(down[5], tensors[UP.replace("up_proj", "down_proj")].float())


def test_fused_experts_read_the_same(tmp_path: Path) -> None:
    write_random(tmp_path / "single", TINY)
    single = Checkpoint.open(tmp_path / "single")
    tensors = {name: value for name, value in random_tensors(TINY, 0).items() if ".mlp.experts." not in name}
    for layer in range(TINY.num_moe_layers):
        prefix = f"model.layers.{layer + TINY.num_dense_layers}.mlp.experts"
        tensors[f"{prefix}.gate_up_proj"], tensors[f"{prefix}.down_proj"] = single.experts(layer)
    write_checkpoint(tmp_path / "fused", TINY, tensors)
    fused = Checkpoint.open(tmp_path / "fused")
    for layer in range(TINY.num_moe_layers):
        for expected, value in zip(single.experts(layer), fused.experts(layer), strict=True):
            assert torch.equal(expected, value)


def test_int8_reads_the_decoded_values(tmp_path: Path) -> None:
    tensors = random_tensors(TINY, 0)
    write_checkpoint(tmp_path, TINY, tensors, int8=True)
    coded = encode(tensors)
    checkpoint = Checkpoint.open(tmp_path)
    value = checkpoint.tensor(UP)
    assert torch.equal(value, decode_tensor(coded[UP], coded[UP + ".scale"]))
    assert torch.equal(value, value.bfloat16().float()), "a stand-in holds the 16-bit weights that the device loads"
    assert torch.equal(checkpoint.tensor(NORM), tensors[NORM].half().float())


def write_shards(directory: Path, first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(TINY)))
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map: dict[str, str] = {}
    for name, part in zip(names, (first, second), strict=True):
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def halves(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    names = list(tensors)
    middle = len(names) // 2
    return {n: tensors[n] for n in names[:middle]}, {n: tensors[n] for n in names[middle:]}


def test_shards_read_the_same_and_digest_tells_files_apart(tmp_path: Path) -> None:
    tensors = random_tensors(TINY, 0)
    write_shards(tmp_path / "shards", *halves(tensors))
    write_checkpoint(tmp_path / "single", TINY, tensors)
    write_checkpoint(tmp_path / "again", TINY, tensors)
    shards, single, again = (Checkpoint.open(tmp_path / name) for name in ("shards", "single", "again"))
    assert torch.equal(shards.tensor(UP), single.tensor(UP))
    assert single.digest() == again.digest() != shards.digest()
    tensors[UP] = tensors[UP] + 1
    write_checkpoint(tmp_path / "again", TINY, tensors)
    assert Checkpoint.open(tmp_path / "again").digest() != single.digest()


def test_missing_shard_and_double_tensor(tmp_path: Path) -> None:
    first, second = halves(random_tensors(TINY, 0))
    write_shards(tmp_path, first, {**second, **dict(list(first.items())[:1])})
    with pytest.raises(SpecterError, match=f"{next(iter(first))} is in both"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SpecterError, match="model-00002-of-00002.safetensors.*is missing"):
        Checkpoint.open(tmp_path)


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors[UP]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(2)


def misshape(tensors: dict[str, Tensor]) -> None:
    tensors[UP] = tensors[UP][:-1]


def retype(tensors: dict[str, Tensor]) -> None:
    tensors[UP] = tensors[UP].to(torch.int32)


def strip_scale(tensors: dict[str, Tensor]) -> None:
    tensors[UP] = tensors[UP].to(torch.int8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop, f"tensor {UP} is missing"),
        (add, "tensor model.layers.0.mlp.gate.weight is unexpected"),
        (misshape, rf"tensor {UP} has shape \(15, 48\), expected \(16, 48\)"),
        (retype, f"tensor {UP} is I32"),
        (strip_scale, f"int8 tensor {UP} needs a scale"),
    ],
)
def test_bad_structure_is_named_at_open(
    tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    tensors = random_tensors(TINY, 0)
    damage(tensors)
    write_checkpoint(tmp_path, TINY, tensors)
    with pytest.raises(SpecterError, match=message):
        Checkpoint.open(tmp_path)


def test_truncated_file_is_named_at_open(tmp_path: Path) -> None:
    write_random(tmp_path, TINY)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SpecterError, match="model.safetensors cannot be read"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_named(tmp_path: Path, value: float) -> None:
    tensors = random_tensors(TINY, 0)
    tensors[UP][3, 4] = value
    write_checkpoint(tmp_path, TINY, tensors)
    with pytest.raises(SpecterError, match=f"tensor {UP} .*NaN or infinite"):
        Checkpoint.open(tmp_path).experts(1)


def test_directories_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(SpecterError, match="no config.json"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(TINY)))
    with pytest.raises(SpecterError, match="neither model.safetensors nor"):
        Checkpoint.open(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(SpecterError, match="is not a safetensors index"):
        Checkpoint.open(tmp_path)
