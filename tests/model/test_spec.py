"""A checkpoint's config.json: read strictly, refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specter.errors import SpecterError
from specter.model.spec import DEEPSEEK_V2_LITE, ModelSpec, read_spec


def test_reads_back_what_it_writes():
    assert ModelSpec.from_config(DEEPSEEK_V2_LITE.to_config(), DEEPSEEK_V2_LITE.name) == DEEPSEEK_V2_LITE


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"q_lora_rank": 1536}, "q_lora_rank=1536"),
        ({"norm_topk_prob": True}, "norm_topk_prob=True"),
        ({"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"num_experts_per_tok": 65}, "65 of 64 experts"),
        ({"num_experts_per_tok": 0}, "top_k as 0"),
        ({"hidden_size": "2048"}, "hidden as '2048'"),
        ({"hidden_size": 20.5}, "hidden as 20.5"),
        ({"kv_lora_rank": None}, "kv_lora as None"),
        ({"rope_scaling": "yarn"}, "wrong type"),
        ({"rope_scaling": {"type": "yarn", "factor": "x", "original_max_position_embeddings": 1}}, "wrong type"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear' is not implemented"),
        ({"rms_norm_eps": "tiny"}, "wrong type"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named(changes: dict[str, object], what: str):
    with pytest.raises(SpecterError, match=what):
        ModelSpec.from_config({**DEEPSEEK_V2_LITE.to_config(), **changes}, "a-model")


def test_a_missing_key_is_named():
    config = DEEPSEEK_V2_LITE.to_config()
    del config["kv_lora_rank"]
    with pytest.raises(SpecterError, match="lacks 'kv_lora_rank'"):
        ModelSpec.from_config(config, "a-model")


@pytest.mark.parametrize("text", ["", '{"model_type": "deep', "[]", "\x00"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecterError, match="config.json"):
        read_spec(tmp_path)


def test_a_good_file_is_read(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V2_LITE.to_config()))
    assert read_spec(tmp_path).num_moe_layers == 26
