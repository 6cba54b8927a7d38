"""Stand-in checkpoints: names and shapes, the int8 format, and the one that ships."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from specter.errors import SpecterError
from specter.models.checkpoint import Checkpoint
from specter.models.hub_config import config_of
from specter.models.int8_format import FORMAT, SCALE_SUFFIX, decode_tensor, encode
from specter.models.names import canonical
from specter.models.spec import ModelSpec
from tests.parity.oracle import build_oracle
from tools.standin.checkpoint import from_hub, load_standin, save_standin, to_hub
from tools.standin.network import init_weights
from tools.standin.specs import NARROW as SHIPPED

ROOT = Path(__file__).resolve().parents[2]
STANDINS = ROOT / "data" / "standins"
TINY = dataclasses.replace(SHIPPED["deepseek_v2_lite"], num_layers=3, num_experts=4, top_k=2, vocab=64)


NARROW = {
    "deepseek": TINY,
    "qwen": dataclasses.replace(SHIPPED["qwen1_5_moe"], num_layers=2, num_experts=4, top_k=2, vocab=64),
    "phi": dataclasses.replace(SHIPPED["phi3_5_moe"], num_layers=2, num_experts=4, vocab=64),
}
every_family = pytest.mark.parametrize("spec", NARROW.values(), ids=NARROW.keys())


@every_family
def test_names_and_shapes_are_those_of_transformers(spec: ModelSpec) -> None:
    with torch.device("meta"):
        reference = build_oracle(spec)
    state = reference.state_dict()
    expected = {canonical(spec.family, name): tuple(tensor.shape) for name, tensor in state.items()}
    assert {name: tuple(tensor.shape) for name, tensor in to_hub(init_weights(spec, 0), spec).items()} == expected


@every_family
def test_names_round_trip(spec: ModelSpec) -> None:
    weights = init_weights(spec, 0)
    again = from_hub(to_hub(weights, spec), spec)
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


@every_family
def test_saved_checkpoint_is_its_decoded_self(spec: ModelSpec, tmp_path: Path) -> None:
    save_standin(init_weights(spec, 0), spec, tmp_path / "a")
    once = load_standin(spec, tmp_path / "a")
    save_standin(once, spec, tmp_path / "b")  # coding decoded values changes them by less than half a code
    for name, weight in load_standin(spec, tmp_path / "b").items():
        limit = (
            once[name].abs() / 128 if weight.dim() > 1 else 0
        )  # rounding to BF16 moves the largest value, so the step
        assert ((weight - once[name]).abs() <= 1.01 * limit + 1e-7).all(), name
    checkpoint = Checkpoint.open(tmp_path / "a")
    assert dataclasses.replace(checkpoint.spec, name=spec.name) == spec
    assert torch.equal(checkpoint.experts(0)[0], once["gate_up"][0])


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_standin(init_weights(TINY, 0), TINY, tmp_path)
    deeper = dataclasses.replace(TINY, num_layers=4)
    with pytest.raises(SpecterError, match="another model"):
        load_standin(deeper, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(deeper)))
    with pytest.raises(SpecterError, match="layers.3"):
        load_standin(deeper, tmp_path)


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(st.lists(st.floats(-1000, 1000, width=32), min_size=5, max_size=5), min_size=1, max_size=6))
def test_int8_coding_errs_by_at_most_half_a_code(rows: list[list[float]]) -> None:
    tensor = torch.tensor(rows)
    coded = encode({"w": tensor})
    assert coded["w"].dtype == torch.int8 and coded["w" + SCALE_SUFFIX].dtype == torch.float16
    error = (decode_tensor(coded["w"], coded["w" + SCALE_SUFFIX]) - tensor).abs()
    # fp16 scales are off by up to 2^-11 (relative) or, below their normal range, 3e-8: 127 codes carry that too.
    # Values are rounded to BF16, which moves them by up to 2^-8.
    step = tensor.abs().amax(-1, keepdim=True) / 127
    assert (error <= step * (0.5 + 127 / 2048) * (1 + 2**-8) + tensor.abs() * 2**-8 + 127 * 6.1e-8).all()


@pytest.mark.parametrize(("name", "most_mib"), [("deepseek_v2_lite", 15), ("qwen1_5_moe", 12), ("phi3_5_moe", 9)])
def test_a_shipped_stand_in_is_complete_trained_and_small(name: str, most_mib: int) -> None:
    directory, spec = STANDINS / name, SHIPPED[name]
    if not directory.is_dir():
        pytest.skip(f"{name} has not been trained")
    checkpoint = Checkpoint.open(directory)  # raises if incomplete
    assert dataclasses.replace(checkpoint.spec, name=spec.name) == spec
    assert checkpoint.num_files == 1 and set(checkpoint.stored_bytes) == {"I8", "F16"}
    path = directory / "model.safetensors"
    assert path.stat().st_size <= most_mib * 2**20
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == FORMAT
    record = json.loads((directory / "training.json").read_text())
    assert record["trained"] and record["valid_loss"] < 4.0
    assert record["transformers_max_rel_diff"] < 1e-4
    assert record["train_seconds"] <= 360
    least = 0.94 if name == "deepseek_v2_lite" else 0.85  # of so narrow a model
    for mode in ("greedy", "seeded_0.7", "teacher_forced"):
        assert record[mode]["acceptance"] > least and record[mode]["match_mean"] > least
