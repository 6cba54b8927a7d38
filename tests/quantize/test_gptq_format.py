"""The AutoGPTQ v1 directory: its bits, its round trip, and every way in which it is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from specter.codecs.int4 import Int4Experts, Int4Matrices
from specter.errors import SpecterError
from specter.models.checkpoint import INDEX_FILE, SINGLE_FILE
from specter.models.names import on_hub
from specter.models.spec import ModelSpec
from specter.quantize.gptq_format import (
    PROJECTIONS,
    pack,
    pack_words,
    read_directory,
    unpack,
    unpack_words,
)
from specter.quantize.rtn import quantize_rtn
from tests.helpers import FAMILIES, write_directory

Tensors = dict[str, Tensor]
FIRST = "model.layers.1.mlp.experts.0.gate_proj"  # layer 0 is dense


def random_matrices(out: int, columns: int, group: int, seed: int, *batch: int) -> Int4Matrices:
    generator = torch.Generator().manual_seed(seed)
    group = min(group, columns)
    return Int4Matrices(
        codes=torch.randint(0, 16, (*batch, out, columns), generator=generator, dtype=torch.uint8),
        scales=torch.rand(*batch, out, columns // group, generator=generator).half() + 0.01,
        zeros=torch.randint(1, 16, (*batch, out, columns // group), generator=generator, dtype=torch.uint8),
        group=group,
    )


def same(left: Int4Matrices, right: Int4Matrices) -> bool:
    parts = ("codes", "scales", "zeros")
    return left.group == right.group and all(torch.equal(getattr(left, p), getattr(right, p)) for p in parts)


def quantised(spec: ModelSpec, sym: bool = True) -> Int4Experts:
    torch.manual_seed(0)
    shape, lead = (spec.expert_inter, spec.hidden), (spec.num_moe_layers, spec.num_experts)
    gate, up, down = (quantize_rtn(torch.randn(*lead, *s), 16, sym=sym) for s in (shape, shape, shape[::-1]))
    return Int4Experts(gate, up, down, method="rtn", num_fallback=3)


# -- bits ----------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), columns=st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_words_round_trip(seed: int, rows: int, columns: int) -> None:
    values = torch.randint(0, 16, (2, 8 * rows, columns), generator=torch.Generator().manual_seed(seed)).byte()
    assert torch.equal(unpack_words(pack_words(values)), values)


@given(seed=st.integers(0, 10**6), out=st.sampled_from([8, 24]), groups=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_matrices_round_trip(seed: int, out: int, groups: int) -> None:
    matrices = random_matrices(out, 16 * groups, 16, seed, 2, 3)
    assert same(unpack(pack(matrices), 16), matrices)


def test_layout_is_the_documented_formula() -> None:
    """Every weight, read one by one: W[o, i] = scales[g, o] * (q - (qzeros + 1)), g = g_idx[i]."""
    matrices = random_matrices(8, 48, 16, seed=1)
    parts = {name: tensor.tolist() for name, tensor in pack(matrices).items()}
    weights = matrices.dequantize()
    for o in range(8):
        for i in range(48):
            g = parts["g_idx"][i]
            q = (parts["qweight"][i // 8][o] >> (4 * (i % 8))) & 0xF
            zero = (parts["qzeros"][g][o // 8] >> (4 * (o % 8))) & 0xF
            assert parts["scales"][g][o] * (q - (zero + 1)) == pytest.approx(float(weights[o, i]), rel=1e-6)


def test_symmetric_zeros_are_sevens() -> None:
    parts = pack(quantize_rtn(torch.randn(16, 32), 128))
    assert (parts["qzeros"] == 0x77777777).all()
    assert parts["qzeros"].shape == (1, 2) and parts["qzeros"].dtype == torch.int32
    assert parts["scales"].shape == (1, 16) and parts["g_idx"].tolist() == [0] * 32


def test_channels_must_fill_words() -> None:
    with pytest.raises(SpecterError, match="12 channels"):
        pack(quantize_rtn(torch.randn(8, 12), 128))


# -- directory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("has_index", [False, True])
def test_directory_round_trip(spec: ModelSpec, tmp_path: Path, sym: bool, has_index: bool) -> None:
    experts = quantised(spec, sym)
    write_directory(tmp_path, experts, spec, 16, has_index)
    read = read_directory(tmp_path, spec)
    assert all(same(getattr(read, name), getattr(experts, name)) for name in PROJECTIONS)
    assert (read.method, read.num_fallback) == ("rtn", 3)
    assert (tmp_path / INDEX_FILE).exists() == has_index
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["sym"] == sym and config["group_size"] == 16 and config["bits"] == 4
    assert f"mlp.experts.{spec.num_experts - 1}.down_proj" in config["modules_in_block_to_quantize"][0]


def test_index_states_sizes_and_places(spec: ModelSpec, tmp_path: Path) -> None:
    write_directory(tmp_path, quantised(spec), spec, 16, has_index=True)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    shards = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    assert len(shards) == spec.num_moe_layers
    assert index["weight_map"] == {name: file for file, tensors in shards.items() for name in tensors}
    stored = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
    assert index["metadata"]["total_size"] == stored


def test_a_foreign_directory_with_other_tensors_is_read(spec: ModelSpec, tmp_path: Path) -> None:
    experts = quantised(spec)
    write_directory(tmp_path, experts, spec, 16)
    tensors = load_file(tmp_path / SINGLE_FILE)
    tensors["model.embed_tokens.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / SINGLE_FILE)
    edit_config(tmp_path, meta=None)
    read = read_directory(tmp_path, spec)
    assert same(read.down, experts.down)
    assert (read.method, read.num_fallback) == ("gptq", 0)


def edit_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= changes
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "awq"),
        ("bits", 8),
        ("checkpoint_format", "marlin"),
        ("group_size", "all"),
        ("group_size", 24),
    ],
)
def test_other_formats_are_refused(spec: ModelSpec, tmp_path: Path, key: str, value: object) -> None:
    write_directory(tmp_path, quantised(spec), spec, 16)
    edit_config(tmp_path, **{key: value})
    with pytest.raises(SpecterError, match=str(value)) as error:
        read_directory(tmp_path, spec)
    assert "python -m specter.quantize" in error.value.remedy or "group size" in error.value.remedy


@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_every_group_size_is_read(spec: ModelSpec, tmp_path: Path, group: int) -> None:
    """A directory of another program: -1 stands for one group per row."""
    spec = dataclasses.replace(spec, hidden=128, expert_inter=256)
    shape, lead = (256, 128), (spec.num_moe_layers, spec.num_experts)
    size = 256 if group == -1 else group
    gate, up, down = (quantize_rtn(torch.randn(*lead, *s) * 0.05, size) for s in (shape, shape, shape[::-1]))
    write_directory(tmp_path, Int4Experts(gate, up, down, "rtn", 0), spec, size)
    edit_config(tmp_path, group_size=group)
    read = read_directory(tmp_path, spec)
    assert same(read.gate, gate) and same(read.down, down)
    assert read.down.group == (256 if group == -1 else group)


def test_v2_stores_the_zero_itself(spec: ModelSpec, tmp_path: Path) -> None:
    experts = quantised(spec, sym=False)
    write_directory(tmp_path, experts, spec, 16)
    tensors = load_file(tmp_path / SINGLE_FILE)
    for name in [name for name in tensors if name.endswith("qzeros")]:
        tensors[name] = pack_words(unpack_words(tensors[name].mT) + 1).mT.contiguous()
    tensors[FIRST + ".qzeros"].zero_()  # not representable in v1
    save_file(tensors, tmp_path / SINGLE_FILE)
    edit_config(tmp_path, checkpoint_format="gptq_v2")
    read = read_directory(tmp_path, spec)
    assert same(read.up, experts.up) and same(read.down, experts.down)
    assert (read.gate.zeros[0, 0] == 0).all() and torch.equal(read.gate.zeros[1:], experts.gate.zeros[1:])


def test_act_order_is_judged_by_the_channels_not_by_the_flag(spec: ModelSpec, tmp_path: Path) -> None:
    experts = quantised(spec)
    write_directory(tmp_path, experts, spec, 16)
    edit_config(tmp_path, desc_act=True)  # with static groups: neighbours stay together
    assert same(read_directory(tmp_path, spec).gate, experts.gate)
    tensors = load_file(tmp_path / SINGLE_FILE)
    tensors[FIRST + ".g_idx"] = tensors[FIRST + ".g_idx"].flip(0).contiguous()
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(SpecterError, match="desc_act") as error:
        read_directory(tmp_path, spec)
    assert "desc_act=False" in error.value.remedy


def test_quantised_attention_is_counted_and_left_alone(spec: ModelSpec, tmp_path: Path) -> None:
    experts = quantised(spec)
    write_directory(tmp_path, experts, spec, 16)
    tensors = load_file(tmp_path / SINGLE_FILE)
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.shared_experts.up_proj"):
        for part in ("qweight", "scales", "qzeros", "g_idx"):
            tensors[f"model.layers.1.{module}.{part}"] = tensors[f"{FIRST}.{part}"].clone()
    save_file(tensors, tmp_path / SINGLE_FILE)
    read = read_directory(tmp_path, spec)
    assert read.num_ignored == 3 and same(read.gate, experts.gate)


def test_an_older_directory_has_its_settings_beside(spec: ModelSpec, tmp_path: Path) -> None:
    experts = quantised(spec)
    write_directory(tmp_path, experts, spec, 16)
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps({k: quantization[k] for k in ("bits", "group_size")}))
    assert same(read_directory(tmp_path, spec).up, experts.up)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("names", ["publisher's", "transformers'"])
def test_every_family_under_either_set_of_names(tmp_path: Path, family: str, names: str) -> None:
    spec = dataclasses.replace(FAMILIES[family], expert_inter=32)
    experts = quantised(spec)
    write_directory(tmp_path, experts, spec, 16)
    tensors = load_file(tmp_path / SINGLE_FILE)
    if names == "publisher's":
        tensors = {on_hub(spec.family, name): tensor for name, tensor in tensors.items()}
        save_file(tensors, tmp_path / SINGLE_FILE)
        assert any(".block_sparse_moe.experts.0.w1.qweight" in name for name in tensors) == (family == "phi")
    read = read_directory(tmp_path, spec)
    assert same(read.gate, experts.gate) and same(read.up, experts.up) and same(read.down, experts.down)


def missing_expert(tensors: Tensors) -> str:
    for name in [name for name in tensors if ".layers.2.mlp.experts.3." in name]:
        del tensors[name]
    return "model.layers.2.mlp.experts.3.down_proj.g_idx"


def missing_part(tensors: Tensors) -> str:
    return _dropped(tensors, FIRST + ".qzeros")


def _dropped(tensors: Tensors, name: str) -> str:
    del tensors[name]
    return name


def misshapen(tensors: Tensors) -> str:
    tensors[FIRST + ".qweight"] = tensors[FIRST + ".qweight"].T.contiguous()
    return FIRST + ".qweight"


def wrong_type(tensors: Tensors) -> str:
    tensors[FIRST + ".scales"] = tensors[FIRST + ".scales"].float()
    return FIRST + ".scales"


def act_order(tensors: Tensors) -> str:
    tensors[FIRST + ".g_idx"] = tensors[FIRST + ".g_idx"].flip(0).contiguous()
    return FIRST + ".g_idx"


def nan_scale(tensors: Tensors) -> str:
    tensors[FIRST + ".scales"][0, 3] = float("nan")
    return FIRST + ".scales"


def zero_scale(tensors: Tensors) -> str:
    tensors[FIRST + ".scales"][1, 2] = 0
    return FIRST + ".scales"


def unsymmetric(tensors: Tensors) -> str:
    tensors[FIRST + ".qzeros"][0, 0] = 0x77777778
    return FIRST + ".qzeros"


def expert_too_many(tensors: Tensors) -> str:
    name = "model.layers.1.mlp.experts.4.gate_proj.qweight"
    tensors[name] = tensors[FIRST + ".qweight"].clone()
    return name


BREAKAGES = [
    missing_expert,
    missing_part,
    misshapen,
    wrong_type,
    act_order,
    nan_scale,
    zero_scale,
    unsymmetric,
    expert_too_many,
]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.__name__)
def test_a_bad_tensor_is_named(spec: ModelSpec, tmp_path: Path, breakage: Callable[[Tensors], str]) -> None:
    write_directory(tmp_path, quantised(spec), spec, 16)
    tensors = load_file(tmp_path / SINGLE_FILE)
    name = breakage(tensors)
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(SpecterError) as error:
        read_directory(tmp_path, spec)
    assert name in error.value.what


def test_a_tensor_in_two_files_is_named(spec: ModelSpec, tmp_path: Path) -> None:
    write_directory(tmp_path, quantised(spec), spec, 16)
    save_file({FIRST + ".scales": torch.ones(2, 16).half()}, tmp_path / "more.safetensors")
    with pytest.raises(SpecterError, match="is in both") as error:
        read_directory(tmp_path, spec)
    assert FIRST + ".scales" in error.value.what


def test_a_truncated_file_is_named(spec: ModelSpec, tmp_path: Path) -> None:
    write_directory(tmp_path, quantised(spec), spec, 16)
    path = tmp_path / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SpecterError, match="truncated") as error:
        read_directory(tmp_path, spec)
    assert SINGLE_FILE in error.value.what


def test_a_missing_shard_is_named(spec: ModelSpec, tmp_path: Path) -> None:
    write_directory(tmp_path, quantised(spec), spec, 16, has_index=True)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(SpecterError, match="model-00002-of-00003"):
        read_directory(tmp_path, spec)


def test_another_models_directory_is_refused(spec: ModelSpec, tmp_path: Path) -> None:
    write_directory(tmp_path, quantised(spec), spec, 16)
    with pytest.raises(SpecterError, match=r"model\.layers\.4\."):
        read_directory(tmp_path, dataclasses.replace(spec, num_layers=5))


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_a_directory_without_its_config_is_refused(spec: ModelSpec, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(SpecterError, match="config.json"):
        read_directory(tmp_path, spec)


def test_zero_points_of_zero_cannot_be_written(spec: ModelSpec, tmp_path: Path) -> None:
    experts = quantised(spec, sym=False)
    experts.up.zeros[1, 2, 3, 0] = 0
    with pytest.raises(SpecterError, match="up"):
        write_directory(tmp_path, experts, spec, 16)
