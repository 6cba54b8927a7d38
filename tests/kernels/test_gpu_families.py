"""The other families on the device: each against the CPU decoder, and whole generations against plain decoding."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from specter.errors import SpecterError
from specter.models.cuda.attention import check_served
from specter.models.cuda.device_pass import DevicePasses
from specter.models.cuda.target import Target
from specter.models.cuda.weights import GpuKVCache
from specter.models.spec import ModelSpec
from tests.helpers import TINY, TINY_PHI, TINY_QWEN
from tests.kernels.test_device_model import check_short_pass, check_unfused, engine
from tests.kernels.test_gpu_decoder import (
    DEVICE,
    TARGET,
    Models,
    build_models,
    check_graphs,
    check_models,
    tokens_of,
)
from tests.kernels.test_rivals import check_foresight

SPECS = {
    "qwen": dataclasses.replace(TINY_QWEN, num_layers=2, hidden=64, expert_inter=32, num_heads=2, num_kv_heads=2),
    # Three queries share a key, in a tile's places for four.
    "phi": dataclasses.replace(
        TINY_PHI, num_layers=2, hidden=64, expert_inter=32, num_heads=3, num_kv_heads=1, rope_dim=16, v_dim=16,
        rope=dataclasses.replace(TINY_PHI.rope, short_factors=(1.0, 1.05, 1.2, 1.5) * 2, long_factors=(2.0,) * 8),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=SPECS.values(), ids=SPECS.keys())
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return build_models(tmp_path_factory.mktemp("tiny"), request.param)


def test_target_and_draft_are_the_cpu_decoder_and_verification_is_plain_decoding(models: Models) -> None:
    check_models(models, 5 if DEVICE == "cpu" else 17)


def test_speculation_on_the_device_is_plain_decoding(models: Models) -> None:
    prompt, num_tokens = tokens_of(2).tolist(), 3 if DEVICE == "cpu" else 24
    plain = engine(models, 0, 12).generate(prompt, num_tokens)
    speculative = engine(models, 2, 8).generate(prompt, num_tokens)
    assert speculative.tokens == plain.tokens


def test_what_the_next_router_foresees_is_the_cpu_decoders_word(models: Models) -> None:
    check_foresight(models)


def test_a_short_pass_is_launched_as_a_longer_one_that_was_captured(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_short_pass(models, monkeypatch) > 0


def test_the_unfused_draft_computes_the_same(models: Models) -> None:
    check_unfused(models)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_graphs_of_early_launches_say_what_single_launches_do(models: Models) -> None:
    check_graphs(models, None)


def test_a_prompt_across_longropes_switch_is_refused(models: Models) -> None:
    cache = GpuKVCache(models.weights.spec, 300, torch.float32, DEVICE)
    passes = DevicePasses(Target(models.weights, models.target.arena, cache, 2, None, pdl=False, tuning=TARGET))
    if not models.weights.spec.rope.short_factors:
        passes.begin([1], 0, 1)
        return
    with pytest.raises(SpecterError, match="cross the switch of LongRoPE"):
        passes.begin([1], 0, 1)


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (dataclasses.replace(TINY, num_groups=2), "2 groups"),
        (dataclasses.replace(TINY_QWEN, rope_dim=24, v_dim=24), "heads of 24 channels"),
    ],
)
def test_what_the_kernels_do_not_serve_is_refused(spec: ModelSpec, what: str) -> None:
    with pytest.raises(SpecterError, match=what):
        check_served(spec)
