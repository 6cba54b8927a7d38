"""Runs of a loaded model: shared runners, execution options, resident passes and the measured link."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from specter.config import BudgetConfig, RunConfig
from specter.errors import SpecterError
from specter.execution import ExecutionConfig
from specter.kernels.int4_moe import PackedExperts
from specter.models.cuda import model as cuda_model
from specter.models.cuda.loaded_model import LoadedModel
from specter.models.cuda.model import CudaModel
from specter.models.cuda.runner import ModelRunner
from specter.models.cuda.target import OUTPUT_ROWS
from specter.resolve import resolve
from specter.session import Replayer, RunResult
from tests.helpers import load_system
from tests.kernels.test_gpu_decoder import SPEC
from tests.kernels.test_rivals import DEV, IS_CUDA, PROMPT, config, configured, device, loaded, results, run, served

__all__ = ["config", "device", "loaded", "results", "served"]  # fixtures


@pytest.mark.parametrize(("prompt_len", "captured"), [(OUTPUT_ROWS, {1, OUTPUT_ROWS}), (OUTPUT_ROWS + 1, {1})])
def test_a_prompts_pass_is_captured_only_where_prefill_can_launch_it(
    device: CudaModel, config: RunConfig, monkeypatch: pytest.MonkeyPatch, prompt_len: int, captured: set[int]
) -> None:
    asked: list[set[int]] = []

    def capture(runner: ModelRunner, row_counts: Iterable[int], *, predicts_next: bool) -> None:
        asked.append(set(row_counts))
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelRunner, "capture", capture)
    with pytest.raises(KeyboardInterrupt):
        device.run(resolve(dataclasses.replace(config, kv_capacity=128)), [1] * prompt_len, ())
    assert asked == [captured]


def test_runs_alike_share_slots_and_no_run_sees_the_last_ones_experts(
    device: CudaModel, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(config, max_new_tokens=2)
    tokens = device.run(resolve(config), PROMPT, ()).generation.tokens
    runner = device.runner
    assert runner is not None
    assert device.run(resolve(config), PROMPT, ()).generation.tokens == tokens
    assert device.runner is runner
    monkeypatch.setattr(runner, "move", lambda expert, slot: None)
    assert device.run(resolve(config), PROMPT, ()).generation.tokens != tokens
    device.run(resolve(dataclasses.replace(config, budget=BudgetConfig("high", policy="same_experts"))), PROMPT, ())
    assert device.runner is not runner


def test_what_does_not_draft_needs_no_draft_on_the_device(
    device: CudaModel, loaded: LoadedModel, config: RunConfig
) -> None:
    config = dataclasses.replace(config, max_new_tokens=2)
    no_layers = dataclasses.replace(SPEC, num_layers=SPEC.num_dense_layers)
    bare = dataclasses.replace(loaded, int4=PackedExperts.empty(no_layers, 128, DEV))
    assert loaded.has_draft and not bare.has_draft
    alone = CudaModel(bare, device.budget, {})
    assert (
        alone.run(resolve(config), PROMPT, ()).generation.tokens
        == device.run(resolve(config), PROMPT, ()).generation.tokens
    )
    with pytest.raises(SpecterError, match="no draft"):
        alone.run(resolve(dataclasses.replace(config, system=load_system("specter"), max_new_tokens=3)), PROMPT, ())


def test_a_resident_run_is_plain_decoding_in_whole_passes_and_has_times_alone(
    device: CudaModel, config: RunConfig, results: dict[str, RunResult]
) -> None:
    resolved = resolve(configured(config, "resident"))
    plain, result = run("lru", device, config, results), device.run(resolved, PROMPT, ())
    assert result.generation.tokens == plain.generation.tokens
    assert device.runner is not None and device.runner.options.is_resident
    assert not result.recording.has_routing and plain.recording.has_routing
    assert result.metrics["tpot_ms"] > 0 and result.metrics["ttft_ms"] > 0
    assert not {"union_mean", "hit_rate", "floor_trace_ms"} & set(result.metrics)
    with pytest.raises(SpecterError, match="the routing of resident passes"):
        Replayer().replay(resolved, result.recording, result.recording)


@pytest.mark.skipif(IS_CUDA, reason="the link is measured there")
@pytest.mark.parametrize("rates", [(3, 2), (2, 3), (1, 1)])
def test_floors_use_the_fastest_rate_of_the_link_before_during_and_after_a_run(
    device: CudaModel, config: RunConfig, monkeypatch: pytest.MonkeyPatch, rates: tuple[int, int]
) -> None:
    unit, left = 10**12, list(rates)  # far above the virtual link's
    if rates == (1, 1):
        unit = 1000  # far below
    monkeypatch.setattr(ModelRunner, "link_bytes_per_s", lambda runner: unit * left.pop(0))
    result = device.run(resolve(dataclasses.replace(config, max_new_tokens=2)), PROMPT, ())
    used = result.metrics["plain_copy_bytes_per_s"]
    during = round(result.metrics["link_bytes_per_s"])
    assert not left and used == max(unit * 3 if unit > 1000 else 0, during)
    copy_ms = device.model.codec.payload_bytes / used * 1e3
    if unit > 1000:
        assert result.metrics["floor_trace_ms"] < result.metrics["min_loads"] * copy_ms + 1
    else:
        assert result.metrics["floor_trace_ms"] >= result.metrics["min_loads"] * copy_ms * 0.99


def test_execution_options_choose_kernels_graphs_and_the_clock(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, dict[str, Any]]] = []
    for name in ("CudaTimeline", "StressedTimeline"):
        monkeypatch.setattr(cuda_model, name, lambda device, name=name, **options: made.append((name, options)))
    for execution in (
        ExecutionConfig(), ExecutionConfig(overlap=False), ExecutionConfig(stress_seed=7),
        ExecutionConfig(fused=False), ExecutionConfig(graphs=False), ExecutionConfig(by_expert=True),
    ):  # fmt: skip
        one = dataclasses.replace(config, execution=execution)
        cuda_model.make_timeline(one, DEV)
        options = cuda_model.runner_options(resolve(one), longest=1)
        chosen = options.is_fused, options.is_graphed, options.is_by_expert
        assert chosen == (execution.fused, execution.graphs, execution.by_expert)
    default = ("CudaTimeline", {"trace": False, "is_serial": False})
    assert made == [
        default,
        ("CudaTimeline", {"trace": False, "is_serial": True}),
        ("StressedTimeline", {"trace": False, "seed": 7}),
        default,
        default,
        default,
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not IS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize(
    "execution",
    [
        ExecutionConfig(fused=False), ExecutionConfig(graphs=False), ExecutionConfig(overlap=False),
        ExecutionConfig(stress_seed=3), ExecutionConfig(by_expert=True),
    ],
)  # fmt: skip
def test_execution_options_change_no_token(device: CudaModel, config: RunConfig, execution: ExecutionConfig) -> None:
    config = dataclasses.replace(
        config, system=load_system("specter_deadline"), execution=execution, max_new_tokens=24, warmup_tokens=4
    )
    result = device.run(resolve(config), PROMPT, [3, 1])
    assert device.agrees_with_plain(resolve(config), result)
    assert result.metrics["plain_copy_bytes_per_s"] > 10**7


def test_kept_kv_is_that_of_a_whole_prefill(device: CudaModel, config: RunConfig) -> None:
    """Its passes have other numbers of rows, and other places in a tile. See tests/lossless/test_kept_prefix.py."""
    with device.serving(resolve(configured(config, "specter_deadline")), longest=len(PROMPT) + 8) as engine:
        text = PROMPT + engine.generate(PROMPT, 5).tokens

        def run(prompt: list[int], *, keeps: bool) -> tuple[list[int], torch.Tensor]:
            generation = engine.generate(prompt, 3, reuses_prefix=keeps)
            assert (generation.cached_len > 0) == keeps
            assert device.runner is not None
            return generation.tokens, device.runner.target.cache.entries[:, : len(prompt) + 2].clone()

        (kept, its), (whole, expected) = (run([*text, 3], keeps=keeps) for keeps in (True, False))
        assert kept == whole
        assert torch.equal(its, expected)
