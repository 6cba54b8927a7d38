"""`python -m tools.crosscheck_gptqmodel`: our GPTQ directories in gptqmodel, and its own in our reader.

Needs an environment of its own: see tools/README.md.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file

from specter.arguments import run_command
from specter.codecs.int4 import Int4Experts
from specter.errors import SpecterError
from specter.models.checkpoint import write_checkpoint
from specter.models.names import on_hub
from specter.models.spec import ModelSpec, RopeSpec
from specter.quantize import cli
from specter.quantize.calibration import TOKENIZER
from specter.quantize.gptq_format import PROJECTIONS, read_directory, tensor_name
from tools.standin.checkpoint import to_hub
from tools.standin.network import init_weights
from tools.standin.specs import NARROW

GROUP = 32
DEEPSEEK = dataclasses.replace(
    NARROW["deepseek_v2_lite"],
    name="tiny",
    hidden=128,
    num_layers=3,
    expert_inter=64,
    shared_inter=128,
    dense_inter=128,
    num_experts=4,
    top_k=2,
    num_heads=2,
    kv_lora=32,
)
PLAIN = dataclasses.replace(
    DEEPSEEK, num_dense_layers=0, dense_inter=0, nope_dim=0, rope_dim=64, v_dim=64, kv_lora=0, num_kv_heads=2,
    qkv_bias=True, rope=RopeSpec(),
)  # fmt: skip
SPECS = {
    "deepseek_v2": DEEPSEEK,
    "qwen2_moe": dataclasses.replace(PLAIN, family="qwen2_moe", shared_gate=True),
    "phimoe": dataclasses.replace(
        PLAIN,
        family="phimoe",
        shared_inter=0,
        o_bias=True,
        head_bias=True,
        layer_norm=True,
        router="sparsemixer",
        router_jitter=0.01,
    ),
}


@dataclass(frozen=True)
class Options:
    """Quantizes a small random model per family with both programs; exit 1 if anything differs.

    1. The experts of `python -m specter.quantize` are put into a whole checkpoint, which gptqmodel loads: every
       expert's dequantized weights must equal ours bit for bit.
    2. gptqmodel quantizes the same model, attention included; our strict reader must find the weights that gptqmodel
       itself dequantizes.
    """

    families: tuple[str, ...] = tuple(SPECS)


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


def add_tokenizer(directory: Path) -> None:
    """gptqmodel loads no model without one."""
    shutil.copy(TOKENIZER, directory / "tokenizer.json")
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<s>", "pad_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))


def difference(theirs: Any, ours: Int4Experts, spec: ModelSpec) -> float:
    """The largest difference between gptqmodel's dequantised experts and ours."""
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


def check(spec: ModelSpec, root: Path) -> bool:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    checkpoint = root / "checkpoint"
    write_checkpoint(checkpoint, spec, to_hub(init_weights(spec, seed=0), spec))
    add_tokenizer(checkpoint)
    tokens = np.random.default_rng(0).integers(0, spec.vocab, (32, 64)).astype(np.uint16)
    save_numpy({"tokens": tokens}, root / "calibration.safetensors")

    calibration = root / "calibration.safetensors"
    cli.run(cli.Options(checkpoint, root / "ours", group=GROUP, min_tokens=32, calibration=calibration))
    whole_checkpoint(checkpoint, root / "ours", root / "whole")
    loaded = GPTQModel.load(str(root / "whole"), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16)
    forth = difference(loaded, read_directory(root / "ours", spec), spec)
    print(f"{spec.family}: ours in gptqmodel, largest difference {forth}")

    config = QuantizeConfig(bits=4, group_size=GROUP, desc_act=False, sym=True)
    model = GPTQModel.load(str(checkpoint), config)
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in tokens.tolist()], batch_size=4)
    model.save(str(root / "theirs"))
    ours = read_directory(root / "theirs", spec)
    loaded = GPTQModel.load(str(root / "theirs"), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16)
    back = difference(loaded, ours, spec)
    note = json.loads((root / "theirs" / "config.json").read_text())["quantization_config"]["checkpoint_format"]
    print(
        f"{spec.family}: theirs ({note}, {ours.num_ignored} modules besides experts) in ours, largest difference {back}"
    )
    return forth == 0 and back == 0


def run(options: Options) -> None:
    results = {}
    for family in options.families:
        if family not in SPECS:
            raise SpecterError(f"families={family} is unknown", f"use one of: {', '.join(SPECS)}")
        with tempfile.TemporaryDirectory() as scratch:
            results[family] = check(SPECS[family], Path(scratch))
    print(" ".join(f"{family}: {'equal' if good else 'DIFFERENT'}." for family, good in results.items()))
    if not all(results.values()):
        sys.exit(1)


if __name__ == "__main__":
    run_command(run, Options)
