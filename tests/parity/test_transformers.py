"""The decoder against transformers' models of all three families, implementations that we did not write."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from specter.errors import SpecterError
from specter.models.spec import ModelSpec, RopeSpec
from tests.helpers import TINY, TINY_PHI, TINY_QWEN, Live, open_live, random_live, run_pass
from tests.parity.oracle import RouterLog, greedy_oracle, load_oracle

STANDINS = Path(__file__).parents[2] / "data" / "standins"
LOGITS_TOLERANCE = 1e-4  # of the largest logit
NUM_GREEDY = 128

SPECS = {
    "deepseek: yarn, one dense layer": TINY,
    "deepseek: plain rope, no dense layer, one head": dataclasses.replace(
        TINY, num_dense_layers=0, num_heads=1, rope=RopeSpec(theta=500.0), routed_scaling=1.0, top_k=1
    ),
    "deepseek: yarn, two dense layers, five heads": dataclasses.replace(
        TINY,
        num_layers=5,
        num_dense_layers=2,
        num_heads=5,
        hidden=40,
        nope_dim=12,
        rope_dim=16,
        v_dim=20,
        kv_lora=24,
        num_experts=12,
        top_k=6,
        routed_scaling=0.7,
        rope=RopeSpec(theta=1000.0, factor=40.0, mscale=1.0, mscale_all_dim=0.5, original_max_positions=64),
    ),
    "deepseek: groups, tied": dataclasses.replace(TINY, num_experts=15, num_groups=5, top_groups=2, top_k=4, tied=True),
    "qwen: three heads": TINY_QWEN,
    "qwen: normalised, grouped heads, one dense layer, tied": dataclasses.replace(
        TINY_QWEN,
        norm_top_k=True,
        num_heads=6,
        num_kv_heads=3,
        hidden=60,
        rope_dim=10,
        v_dim=10,
        num_dense_layers=1,
        dense_inter=56,
        tied=True,
    ),
    "qwen: five heads on one key, no biases, two dense layers": dataclasses.replace(
        TINY_QWEN,
        norm_top_k=True,
        top_k=1,
        qkv_bias=False,
        num_layers=4,
        num_heads=5,
        num_kv_heads=1,
        hidden=40,
        rope_dim=8,
        v_dim=8,
        num_dense_layers=2,
        dense_inter=24,
    ),
    "phi: short rope, all biases": TINY_PHI,
    "phi: plain rope, three heads, no biases, tied": dataclasses.replace(
        TINY_PHI,
        rope=RopeSpec(theta=500.0),
        num_heads=3,
        num_kv_heads=3,
        rope_dim=16,
        v_dim=16,
        qkv_bias=False,
        o_bias=False,
        head_bias=False,
        tied=True,
    ),
    "phi: five heads on one key, wide jitter": dataclasses.replace(
        TINY_PHI, num_heads=5, num_kv_heads=1, hidden=40, num_experts=5, router_jitter=0.2, head_bias=False
    ),
}
LONG = {
    "three keys": dataclasses.replace(TINY_PHI, num_heads=3, num_kv_heads=3, hidden=24),
    "one mscale": dataclasses.replace(TINY_PHI, rope=dataclasses.replace(TINY_PHI.rope, long_mscale=1.1)),
    "one key": dataclasses.replace(TINY_PHI, num_heads=5, num_kv_heads=1, hidden=40),
}


def assert_parity(live: Live, model: PreTrainedModel, prompt: list[int]) -> None:
    routers = RouterLog(model)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    ours = run_pass(live.decoder, live.store, prompt, 0)
    logits = torch.stack(ours.outputs)
    assert float((logits - expected).abs().max() / expected.abs().max()) < LOGITS_TOLERANCE
    assert len(routers.calls) == len(ours.routing)
    for theirs, mine in zip(routers.calls, ours.routing, strict=True):  # theirs is in no order
        np.testing.assert_array_equal(np.sort(theirs, axis=1), np.sort(mine, axis=1))


def greedy_ours(live: Live, prompt: list[int], num_tokens: int = NUM_GREEDY) -> list[int]:
    live.decoder.reset()
    tokens: list[int] = []
    fed, position = prompt, 0
    for _ in range(num_tokens):
        outputs = run_pass(live.decoder, live.store, fed, position, num_outputs=1).outputs
        position += len(fed)
        tokens.append(int(outputs[-1].argmax()))
        fed = tokens[-1:]
    return tokens


def random_prompt(spec: ModelSpec, length: int) -> list[int]:
    return torch.randint(0, spec.vocab, (length,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_random_models_agree(spec: ModelSpec, tmp_path: Path) -> None:
    live, model = random_live(tmp_path, spec, seed=3), load_oracle(tmp_path)
    prompt = random_prompt(spec, 150)  # several tiles, more than one block of keys
    assert_parity(live, model, prompt)
    assert greedy_ours(live, prompt[:40]) == greedy_oracle(model, prompt[:40], NUM_GREEDY)


@pytest.mark.parametrize("spec", LONG.values(), ids=LONG.keys())
def test_a_prompt_beyond_the_switch_of_longrope_agrees(spec: ModelSpec, tmp_path: Path) -> None:
    live, model = random_live(tmp_path, spec, seed=3, capacity=512), load_oracle(tmp_path)
    prompt = random_prompt(spec, spec.rope.original_max_positions + 1)
    assert_parity(live, model, prompt)
    assert greedy_ours(live, prompt) == greedy_oracle(model, prompt, NUM_GREEDY)


def test_a_prompt_that_could_cross_the_switch_is_refused(tmp_path: Path) -> None:
    live = random_live(tmp_path, TINY_PHI, capacity=512)
    with pytest.raises(SpecterError, match="would cross the switch of LongRoPE at 256 positions"):
        run_pass(live.decoder, live.store, random_prompt(TINY_PHI, 256), 0)


@pytest.mark.parametrize("directory", sorted(STANDINS.glob("*/")), ids=lambda path: path.name)
def test_standins_agree(directory: Path) -> None:
    live, model = open_live(directory), load_oracle(directory)
    prompt = random_prompt(live.decoder.spec, 60)
    assert_parity(live, model, prompt)
    assert greedy_ours(live, prompt[:20], 40) == greedy_oracle(model, prompt[:20], 40)
