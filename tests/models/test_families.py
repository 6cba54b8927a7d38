"""A model family is one module, one config.json and one file in conf/model: added here to a copy of the tree."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specter.models.full_size import FULL_SIZE
from specter.models.spec import ModelSpec
from tools.standin.specs import NARROW

ROOT = Path(__file__).parents[2]
TOY_FAMILY = """
from specter.models.families.base import FAMILIES, Config, Family, grouped_heads, rope_settings
from specter.models.spec import ModelSpec


@FAMILIES.register("toy_moe")
class ToyMoe(Family):
    architecture = "ToyMoeForCausalLM"
    published = "Toy-1B"
    keys = {"expert_inter": "expert_size", "num_experts": "experts"}
    from_hub = ((r"\\.moe\\.", ".mlp."),)
    to_hub = ((r"\\.mlp\\.", ".moe."),)

    @staticmethod
    def read(config: Config, name: str) -> Config:
        _, rope = rope_settings(config, name, {"default": ()}, 10000.0)
        return grouped_heads(config) | {
            "num_dense_layers": 0, "dense_inter": 0, "shared_inter": 0, "norm_top_k": True,
            "rope": {"theta": rope["rope_theta"]},
        }

    @staticmethod
    def write(spec: ModelSpec) -> Config:
        return {"num_key_value_heads": spec.num_kv_heads, "head_dim": spec.rope_dim}
"""
TOY_CONFIG = {
    "specter_name": "Toy-1B", "specter_source": "a test", "model_type": "toy_moe", "vocab_size": 97, "hidden_size": 32,
    "num_hidden_layers": 2, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "expert_size": 16, "experts": 4,
}  # fmt: skip
SCRIPT = """
from pathlib import Path
from safetensors import safe_open
import specter.models.checkpoint as checkpoint
from specter.models.full_size import FULL_SIZE
from specter.sources import imported_files
from tests.helpers import random_live, run_pass
assert Path(checkpoint.__file__).is_relative_to(Path.cwd())
spec = FULL_SIZE["toy"]
assert (spec.name, spec.family, spec.num_kv_heads, spec.rope_dim) == ("Toy-1B", "toy_moe", 2, 8)
live = random_live(Path("toy"), spec)
assert len(run_pass(live.decoder, live.store, [1, 2, 3], 0).outputs) == 3
with safe_open("toy/model.safetensors", "pt") as file:
    assert "model.layers.0.moe.experts.0.gate_proj.weight" in file.keys()
names = {str(path.relative_to(Path.cwd())) for path in imported_files("specter.session")}
assert {"specter/models/families/toy.py", "specter/models/full_size/toy/config.json"} <= names
"""


# Non-expert weights, experts' weights, KV width, and a digest of all fields.
SIZES = {
    "DeepSeek-V2-Lite": (1311506432, 14394851328, 576, "6664f23c5c09"),
    "Phi-3.5-MoE": (1606942720, 40265318400, 2048, "1b47394854ab"),
    "Qwen1.5-MoE-A2.7B": (1858453504, 12457082880, 4096, "c82636174008"),
    "DeepSeek-V2-Lite-standin": (3088512, 10223616, 128, "8c382d47304c"),
    "Qwen1.5-MoE-A2.7B-standin": (2125312, 8847360, 128, "8a9f754b361c"),
    "Phi-3.5-MoE-standin": (1867776, 6291456, 128, "21ec486fd240"),
}


@pytest.mark.parametrize("spec", [*FULL_SIZE.values(), *NARROW.values()], ids=lambda spec: spec.name)
def test_published_and_narrow_sizes(spec: ModelSpec) -> None:
    digest = hashlib.sha256(spec.digest().encode()).hexdigest()[:12]
    assert (spec.non_expert_params, spec.experts_params, spec.kv_width, digest) == SIZES[spec.name]


def test_the_stand_ins_are_shipped_with_their_specs() -> None:
    for model, spec in NARROW.items():
        config = json.loads((ROOT / "data" / "standins" / model / "config.json").read_text())
        assert (config["hidden_size"], config["num_hidden_layers"]) == (spec.hidden, spec.num_layers)


def test_a_family_is_added_by_one_module_and_one_config(tmp_path: Path) -> None:
    for part in ("specter", "baselines", "tests/helpers.py", "conf"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / part, tmp_path / part)
    (tmp_path / "specter/models/families/toy.py").write_text(TOY_FAMILY)
    (tmp_path / "specter/models/full_size/toy").mkdir()
    (tmp_path / "specter/models/full_size/toy/config.json").write_text(json.dumps(TOY_CONFIG))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
