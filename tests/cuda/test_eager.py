"""The model that the bench compares with is the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baselines.transformers_offload import load_eager
from bench.resident import EXPERTS, decode_eager
from specter.models.checkpoint import Checkpoint
from specter.models.spec import ModelSpec
from tests.helpers import FAMILIES, open_live, run_pass, write_random

PROMPT = [3, 1, 4, 15, 92, 6, 53]


@pytest.mark.parametrize("spec", FAMILIES.values(), ids=FAMILIES.keys())
def test_transformers_model_without_memory_is_given_our_weights(spec: ModelSpec, tmp_path: Path) -> None:
    write_random(tmp_path, spec)
    live = open_live(tmp_path)
    model = load_eager(Checkpoint.open(tmp_path), "cpu", torch.float32)
    said = []
    for experts in EXPERTS:
        tokens, sample = decode_eager(model, PROMPT, num_steps=2, experts=experts, warmup=1)
        assert len(tokens) == 13 and len(sample.values) == 5 and sample.median > 0
        assert model.get_experts_implementation()[""] == experts
        said.append(tokens)
    expected = run_pass(live.decoder, live.store, [*PROMPT, *said[0][:-1]], 0, num_outputs=len(said[0]))
    assert said == [torch.stack(expected.outputs).argmax(-1).tolist()] * len(EXPERTS)
