"""Our GPTQ directories in gptqmodel, and its own in our reader: the same weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file

from specter.codecs.int4 import Int4Experts
from specter.models.names import on_hub
from specter.models.spec import ModelSpec
from specter.quantize import cli
from specter.quantize.gptq_format import PROJECTIONS, read_directory, tensor_name
from tests.crosscheck.models import GROUP, SPECS, add_tokenizer, write_model

gptqmodel = pytest.importorskip("gptqmodel", reason="gptqmodel is not installed (tests/crosscheck/README.md)")

every_family = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


@every_family
def test_our_experts_in_gptqmodel(spec: ModelSpec, tmp_path: Path) -> None:
    """The experts of `python -m specter.quantize` in a whole checkpoint, which gptqmodel loads."""
    checkpoint, ours, whole = (tmp_path / name for name in ("checkpoint", "ours", "whole"))
    write_model(checkpoint, spec)
    save_numpy({"tokens": calibration_tokens(spec)}, tmp_path / "calibration.safetensors")
    cli.run(cli.Options(checkpoint, ours, group=GROUP, min_tokens=32, calibration=tmp_path / "calibration.safetensors"))
    whole_checkpoint(checkpoint, ours, whole)
    assert difference(load(whole), read_directory(ours, spec), spec) == 0


@every_family
def test_experts_of_gptqmodel_in_our_reader(spec: ModelSpec, tmp_path: Path) -> None:
    """gptqmodel quantizes the model, attention included; our reader finds the weights that it dequantizes itself."""
    write_model(tmp_path / "checkpoint", spec)
    config = gptqmodel.QuantizeConfig(bits=4, group_size=GROUP, desc_act=False, sym=True)
    model = gptqmodel.GPTQModel.load(str(tmp_path / "checkpoint"), config)
    rows = calibration_tokens(spec).tolist()
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], batch_size=4)
    model.save(str(tmp_path / "theirs"))
    ours = read_directory(tmp_path / "theirs", spec)
    assert ours.num_ignored > 0, "attention is quantized too"
    assert difference(load(tmp_path / "theirs"), ours, spec) == 0


def calibration_tokens(spec: ModelSpec) -> np.ndarray:
    return np.random.default_rng(0).integers(0, spec.vocab, (32, 64)).astype(np.uint16)


def load(directory: Path) -> Any:
    return gptqmodel.GPTQModel.load(str(directory), backend=gptqmodel.BACKEND.TORCH, device="cpu", dtype=torch.float16)


def whole_checkpoint(checkpoint: Path, experts: Path, out: Path) -> None:
    """The experts of a GPTQ directory with all other weights of their checkpoint."""
    out.mkdir()
    tensors = {
        name: tensor.half()
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
        if ".experts." not in name
    }
    for path in experts.glob("*.safetensors"):
        tensors |= load_file(path)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text((experts / "config.json").read_text())
    add_tokenizer(out)


def difference(theirs: Any, ours: Int4Experts, spec: ModelSpec) -> float:
    """The largest difference between gptqmodel's dequantized experts and ours."""
    modules = dict(theirs.model.named_modules())
    worst = 0.0
    for layer in range(spec.num_moe_layers):
        for expert in range(spec.num_experts):
            for projection in PROJECTIONS:
                name = tensor_name(spec, layer, expert, projection, "").strip(".")
                module = modules.get(name) or modules[on_hub(spec.family, f"{name}.").strip(".")]
                weight = module.dequantize_weight().T.float()
                mine = getattr(ours, projection).dequantize(torch.float16)[layer, expert].float()
                worst = max(worst, float((weight - mine).abs().max()))
    return worst
