"""Every key of config.json: one is changed, and the logits equal transformers' under the same file, or it is refused.

The keys are those of transformers' config classes, of the rotary settings, and of published files. The values must be
ones that transformers accepts, or ones that Specter refuses.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from specter.errors import SpecterError
from specter.models.families.base import FAMILIES
from specter.models.hub_config import config_of, spec_of
from specter.models.spec import ModelSpec
from tests.helpers import TINY, TINY_PHI, TINY_QWEN, random_live, run_pass
from tests.parity.oracle import load_oracle

TOLERANCE = 1e-4  # of the largest logit
PROMPT = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(7)).tolist()
SPECS = {"deepseek_v2": TINY, "qwen2_moe": TINY_QWEN, "phimoe": TINY_PHI}
ROPE = "rope_scaling."  # prefix of the rotary settings' keys in this test

# Values that a rule by type would not give, for any family.
VALUES: dict[str, list[Any]] = {
    "architectures": [["Other"]],
    "dtype": ["bfloat16"],
    "hidden_act": ["gelu"],
    "hidden_size": [60],
    "id2label": [{"0": "a"}],
    "is_encoder_decoder": [True],
    "label2id": [{"a": 0}],
    "layer_types": [
        ["full_attention"] * 3,
        ["full_attention", "full_attention", "sliding_attention"],
        ["full_attention"],
    ],
    "mlp_only_layers": [[0], [0, 1], [1]],
    "model_type": ["mixtral"],
    "num_key_value_heads": [1],
    "problem_type": ["regression"],
    "q_lora_rank": [16],
    "rope_parameters": [{"rope_type": "linear", "factor": 2.0}],
    "return_dict": [True],  # with False, transformers itself fails
    "router_jitter_noise": [0.0, 0.3],
    "sliding_window": [7, 0, 1024, 4096],
    "topk_method": ["group_limited_greedy", "noaux_tc", None],
    "transformers_version": ["4.0.0"],
    # of no config class
    "attn_logit_softcapping": [30.0],
    "num_experts": [4],
    "original_max_position_embeddings": [64],
    "partial_rotary_factor": [0.5, 1.0],
    "quantization_config": [{"quant_method": "gptq"}],
    "scoring_func": ["sigmoid", "softmax"],
    "torch_dtype": ["float16"],
    "auto_map": [{"AutoModel": "modeling.Model"}],
    # of the rotary settings
    ROPE + "attention_factor": [1.7],
    ROPE + "beta_fast": [8.0, None, 0],
    ROPE + "beta_slow": [2.0, None],
    ROPE + "factor": [8.0, 1.0, None],
    ROPE + "long_factor": [[1.0, 2.0, 3.0, 4.0], [1.0]],
    ROPE + "mscale": [1.3, 1.0, 0.0, None],
    ROPE + "mscale_all_dim": [1.3, 0.0, None],
    ROPE + "new_key": [2],
    ROPE + "original_max_position_embeddings": [32],
    ROPE + "partial_rotary_factor": [0.5, 1.0],
    ROPE + "rope_theta": [77.0],
    ROPE + "rope_type": ["dynamic", "linear", "default"],
    ROPE + "short_factor": [[1.0, 2.0, 3.0, 4.0], [1.0]],
    ROPE + "short_mscale": [2.0, None],
    ROPE + "truncate": [False, None, True],
}
# Words of a refusal that does not have the key's name.
NAMES = {
    "factor": ["wrong type"],
    "head_dim": ["heads of 16 channels"],
    "long_factor": ["long factors"],
    "mlp_only_layers": ["dense layers"],
    "num_attention_heads": ["heads"],
    "num_key_value_heads": ["heads"],
    "quantization_config": ["quantised already"],
    "rope_parameters": ["rope type"],
    "rope_type": ["rope type", "rope_scaling"],
    "short_factor": ["short factors"],
    "short_mscale": ["wrong type"],
}
ABSENT = object()


def base_config(family: str) -> dict[str, Any]:
    groups = {"topk_group": 1, "n_group": 2} if family == "deepseek_v2" else {}
    return config_of(SPECS[family]) | groups


def class_of(family: str) -> Any:
    return getattr(transformers, FAMILIES[family].architecture).config_class


def other_than(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value or 3]
    if isinstance(value, float):
        return [1.5 * value + 0.25]
    return [3] if value is None else ["other"]


def cases(family: str) -> list[tuple[str, Any]]:
    config = base_config(family)
    fields = {field.name: field.default for field in dataclasses.fields(class_of(family))}
    names = {**fields, **config, **{key: None for key in VALUES if not key.startswith(ROPE)}}
    found = [(key, value) for key, old in names.items() for value in VALUES.get(key, other_than(old))]
    found += [(key, ABSENT) for key in config]
    if rope := config.get("rope_scaling"):
        found += [(key, value) for key in VALUES if key.startswith(ROPE) for value in VALUES[key]]
        found += [(ROPE + key, ABSENT) for key in rope]
    return [case for case in found if case[0] != "rope_scaling" or case[1] is ABSENT]


def changed(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    settings = config["rope_scaling"] if key.startswith(ROPE) else config
    settings.pop(key.removeprefix(ROPE), None)
    if value is not ABSENT:
        settings[key.removeprefix(ROPE)] = value
    return config


def describe(case: Any) -> str:
    return "absent" if case is ABSENT else str(case)


class Models:
    """Random checkpoints, one per spec, and their logits [T, V]."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: dict[ModelSpec, tuple[Path, torch.Tensor]] = {}

    def of(self, spec: ModelSpec) -> tuple[Path, torch.Tensor]:
        if spec not in self.made:
            directory = self.root / str(len(self.made))
            live = random_live(directory, spec, seed=3, capacity=64)
            self.made[spec] = directory, torch.stack(run_pass(live.decoder, live.store, PROMPT, 0).outputs)
        return self.made[spec]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def difference(models: Models, spec: ModelSpec, config: dict[str, Any]) -> float:
    """Largest difference from transformers' logits under `config`, as a share of the largest logit."""
    directory, ours = models.of(spec)
    model = load_oracle(directory, copy.deepcopy(config))
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT]), return_dict=True).logits[0]
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [(family, *case) for family in SPECS for case in cases(family)],
    ids=describe,
)
def test_a_key_is_honoured_or_refused(family: str, key: str, value: Any, models: Models) -> None:
    config = changed(base_config(family), key, value)
    try:
        spec = spec_of(config, "a-model")
    except SpecterError as error:
        refusal = str(error)
    else:
        assert difference(models, spec, config) < TOLERANCE
        return
    name = key.rpartition(".")[2]
    assert any(words in refusal for words in (name, *NAMES.get(name, ())))


def test_the_parity_of_a_key_can_fail(models: Models) -> None:
    config = changed(base_config("phimoe"), "router_jitter_noise", 0.3)
    assert difference(models, spec_of(base_config("phimoe"), "a-model"), config) > TOLERANCE
