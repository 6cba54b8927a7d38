"""A checkpoint's config.json: read strictly, refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from specter.errors import SpecterError
from specter.models.full_size import FULL_SIZE
from specter.models.hub_config import config_of, read_spec, spec_of
from specter.models.spec import ModelSpec
from tools.standin.specs import NARROW

DEEPSEEK_V2_LITE, QWEN1_5_MOE, PHI3_5_MOE = (
    FULL_SIZE[name] for name in ("deepseek_v2_lite", "qwen1_5_moe", "phi3_5_moe")
)

GROUPED = dataclasses.replace(DEEPSEEK_V2_LITE, name="grouped", num_groups=8, top_groups=3, tied=True)


@pytest.mark.parametrize("spec", [*FULL_SIZE.values(), *NARROW.values(), GROUPED], ids=lambda spec: spec.name)
def test_reads_back_what_it_writes(spec: ModelSpec) -> None:
    config = json.loads(json.dumps(config_of(spec)))
    assert spec_of(config, spec.name) == spec


@pytest.mark.parametrize(
    ("spec", "changes", "what"),
    [
        (QWEN1_5_MOE, {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN1_5_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (QWEN1_5_MOE, {"mlp_only_layers": [3]}, "dense layers .3. between"),
        (QWEN1_5_MOE, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not implemented"),
        (QWEN1_5_MOE, {"num_key_value_heads": 3}, "16 heads over 3 keys"),
        (QWEN1_5_MOE, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (QWEN1_5_MOE, {"quantization_config": {"quant_method": "gptq"}}, "quantised already .gptq."),
        (QWEN1_5_MOE, {"num_experts": None}, "num_experts as None"),
        (PHI3_5_MOE, {"num_experts_per_tok": 4}, "num_experts_per_tok=4"),
        (PHI3_5_MOE, {"sliding_window": 2047}, "sliding_window=2047"),
        (PHI3_5_MOE, {"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic' is not implemented"),
        (PHI3_5_MOE, {"head_dim": 64}, "64 short factors for heads of 64 channels"),
        (GROUPED, {"topk_group": 9}, "from 9 of 8 groups"),
        (GROUPED, {"n_group": 7}, "of 7 groups"),
    ],
    ids=str,
)
def test_what_a_family_does_not_have_is_named(spec: ModelSpec, changes: dict[str, object], what: str) -> None:
    with pytest.raises(SpecterError, match=what):
        spec_of({**config_of(spec), **changes}, "a-model")


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
def test_a_wrong_value_is_named(changes: dict[str, object], what: str) -> None:
    with pytest.raises(SpecterError, match=what):
        spec_of({**config_of(DEEPSEEK_V2_LITE), **changes}, "a-model")


def test_a_missing_key_is_named() -> None:
    config = config_of(DEEPSEEK_V2_LITE)
    del config["kv_lora_rank"]
    with pytest.raises(SpecterError, match="lacks 'kv_lora_rank'"):
        spec_of(config, "a-model")


@pytest.mark.parametrize("text", ["", '{"model_type": "deep', "[]", "\x00"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecterError, match="config.json"):
        read_spec(tmp_path)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(DEEPSEEK_V2_LITE)))
    assert read_spec(tmp_path).num_moe_layers == 26
