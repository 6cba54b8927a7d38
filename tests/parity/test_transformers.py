"""The decoder against transformers' DeepseekV2ForCausalLM, an implementation that we did not write."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

from specter.model.checkpoint import Checkpoint
from specter.model.spec import ModelSpec, RopeSpec
from tests.helpers import TINY, Live, open_live, random_live, run_pass

STANDIN = Path(__file__).parents[2] / "data" / "standins" / "deepseek_v2_lite"
LOGITS_TOLERANCE = 1e-4  # of the largest logit
NUM_GREEDY = 128

SPECS = {
    "yarn, one dense layer": TINY,
    "plain rope, no dense layer, one head": dataclasses.replace(
        TINY, num_dense_layers=0, num_heads=1, rope=RopeSpec(theta=500.0), routed_scaling=1.0, top_k=1
    ),
    "yarn, two dense layers, five heads": dataclasses.replace(
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
}


def load_oracle(directory: Path) -> DeepseekV2ForCausalLM:
    """transformers' model with the values of our (possibly int8-coded) checkpoint; strict."""
    checkpoint = Checkpoint.open(directory)
    spec = checkpoint.spec
    config = DeepseekV2Config.from_dict({**spec.to_config(), "attn_implementation": "eager"})
    model = DeepseekV2ForCausalLM(config).float().eval()
    state = {}
    for name in model.state_dict():
        if ".mlp.experts." in name:
            layer = int(name.split(".")[2]) - spec.num_dense_layers
            state[name] = checkpoint.experts(layer)[0 if "gate_up" in name else 1]
        else:
            state[name] = checkpoint.tensor(name)
    model.load_state_dict(state, strict=True)
    return model


class RouterLog:
    """Collects the expert ids of every router call, in order of layers."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[np.ndarray] = []
        for module in model.modules():
            if isinstance(module, DeepseekV2TopkRouter):
                module.register_forward_hook(lambda _module, _args, output: self.calls.append(output[2].numpy()))


def assert_parity(live: Live, model: DeepseekV2ForCausalLM, prompt: list[int]) -> None:
    routers = RouterLog(model)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    ours = run_pass(live.decoder, live.store, prompt, 0)
    logits = torch.stack(ours.outputs)
    assert float((logits - expected).abs().max() / expected.abs().max()) < LOGITS_TOLERANCE
    assert len(routers.calls) == len(ours.routing)
    for theirs, mine in zip(routers.calls, ours.routing, strict=True):  # theirs is in no order
        np.testing.assert_array_equal(np.sort(theirs, axis=1), np.sort(mine, axis=1))


def greedy_oracle(model: DeepseekV2ForCausalLM, prompt: list[int]) -> list[int]:
    tokens, cache, fed = [], None, prompt
    with torch.inference_mode():
        for _ in range(NUM_GREEDY):
            result = model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            tokens.append(int(result.logits[0, -1].argmax()))
            fed = tokens[-1:]
    return tokens


def greedy_ours(live: Live, prompt: list[int]) -> list[int]:
    live.decoder.reset()
    tokens: list[int] = []
    fed, position = prompt, 0
    for _ in range(NUM_GREEDY):
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
    assert greedy_ours(live, prompt[:40]) == greedy_oracle(model, prompt[:40])


@pytest.mark.skipif(not STANDIN.is_dir(), reason="the stand-in has not been built")
def test_standin_agrees() -> None:
    live, model = open_live(STANDIN), load_oracle(STANDIN)
    prompt = random_prompt(live.decoder.spec, 60)
    assert_parity(live, model, prompt)
    assert greedy_ours(live, prompt[:20]) == greedy_oracle(model, prompt[:20])
