"""The other families on the device: each against the CPU decoder, and whole generations against plain decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from specter.errors import SpecterError
from specter.models.cuda.attention import check_served
from specter.models.spec import ModelSpec
from tests.helpers import TINY, TINY_PHI, TINY_QWEN
from tests.kernels.test_device_model import check_ablations, check_short_pass, engine, make_runner
from tests.kernels.test_gpu_decoder import (
    DEVICE,
    Models,
    build_models,
    check_graphs,
    check_models,
    tokens_of,
)
from tests.kernels.test_rivals import check_prediction

SPECS = {
    "qwen": dataclasses.replace(TINY_QWEN, num_layers=2, hidden=64, expert_inter=32, num_heads=2, num_kv_heads=2),
    # Three queries share a key, in a tile's places for four.
    "phi": dataclasses.replace(
        TINY_PHI, num_layers=2, hidden=64, expert_inter=32, num_heads=3, num_kv_heads=1, rope_dim=16, v_dim=16,
        rope=dataclasses.replace(TINY_PHI.rope, short_factors=(1.0, 1.05, 1.2, 1.5) * 2, long_factors=(2.0,) * 8),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(SPECS.values()), ids=list(SPECS))
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    models = build_models(tmp_path_factory.mktemp("tiny"), request.param)
    yield models
    models.loaded.store.close()


def test_target_and_draft_are_the_cpu_decoder_and_verification_is_plain_decoding(models: Models) -> None:
    check_models(models, 5 if DEVICE == "cpu" else 17)


def test_speculation_on_the_device_is_plain_decoding(models: Models) -> None:
    prompt, num_tokens = tokens_of(2).tolist(), 3 if DEVICE == "cpu" else 24
    plain = engine(models, 0, 12).generate(prompt, num_tokens)
    speculative = engine(models, 2, 8).generate(prompt, num_tokens)
    assert speculative.tokens == plain.tokens


def test_the_predicted_routing_is_the_cpu_decoders(models: Models) -> None:
    check_prediction(models)


def test_a_short_pass_is_launched_as_a_longer_one_that_was_captured(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_short_pass(models, monkeypatch) > 0


def test_the_unfused_draft_computes_the_same(models: Models) -> None:
    check_ablations(models)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_graphs_of_early_launches_equal_single_launches(models: Models) -> None:
    check_graphs(models, None)


def test_a_prompt_across_longropes_switch_is_refused(models: Models) -> None:
    runner = make_runner(models, 1, kv_capacity=300)
    if not models.weights.spec.rope.short_factors:
        runner.target_pass([1], 0, 1)
        return
    with pytest.raises(SpecterError, match="cross the switch of LongRoPE"):
        runner.target_pass([1], 0, 1)


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
