"""Small random models of each family, as directories that gptqmodel and optimum load."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

from specter.models.checkpoint import write_checkpoint
from specter.models.spec import ModelSpec, RopeSpec
from specter.quantize.calibration import TOKENIZER
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


def write_model(directory: Path, spec: ModelSpec) -> None:
    write_checkpoint(directory, spec, to_hub(init_weights(spec, seed=0), spec))
    add_tokenizer(directory)


def add_tokenizer(directory: Path) -> None:
    """gptqmodel loads no model without one."""
    shutil.copy(TOKENIZER, directory / "tokenizer.json")
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<s>", "pad_token": "<s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
