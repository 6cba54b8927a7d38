"""Losslessness at full size: every planner and eviction, depth and budget against plain decoding, half of it with
copies delayed and reordered.

Runs with 16-bit experts on the first layers of the full-size model: payloads are the real ones, passes are ten times
shorter, and the draft is rejected more often. SPECTER_STRESS_PROMPTS=20 runs 1280 generations. Residual experts run on
the whole model, against plain decoding with 16-bit experts.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from bench.agreement import load_prompts
from specter.config import BudgetConfig, DatasetConfig, ModelConfig, RunConfig, SamplingConfig
from specter.execution import ExecutionConfig
from specter.memory import buy_slots
from specter.models.cuda.loaded_model import LoadedModel, load_model
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.model import CudaModel
from specter.models.cuda.runner import ModelRunner
from specter.models.full_size import FULL_SIZE
from specter.resolve import ResolvedRun, resolve
from specter.timeline.costs import CostModel
from specter.timeline.hardware import Hardware
from specter.typed import load_typed
from tests.helpers import CONF, load_system

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NUM_LAYERS = 3  # one dense, two MoE
DEPTHS = (4, 8, 16, 32)
SYSTEMS = ("specter", "specter_retain", "specter_deadline_lru", "specter_deadline")  # planner x eviction
RESIDUAL_SYSTEMS = ("lru_residual", "specter_deadline_residual", "specter_plus")
NUM_TOKENS = 18
NUM_PROMPTS = int(os.environ.get("SPECTER_STRESS_PROMPTS", "2"))
MODEL = ModelConfig(**yaml.safe_load((CONF / "model" / "deepseek_v2_lite.yaml").read_text()))


@contextmanager
def loaded(residual: Path | None = None) -> Iterator[tuple[LoadedModel, DeviceBudget]]:
    if not Path(MODEL.quantized).is_dir():
        pytest.skip(f"no INT4 experts in {MODEL.quantized}: make them with python -m specter.quantize")
    budget, spec = DeviceBudget(), FULL_SIZE[MODEL.charged_as]
    full = load_model(
        Path(MODEL.checkpoint), Path(MODEL.quantized), spec, budget, Console(quiet=True), residual=residual
    )
    try:
        yield full, budget
    finally:
        full.store.close()


@pytest.fixture(scope="module")
def model() -> Iterator[CudaModel]:
    with loaded() as (full, budget):
        yield CudaModel(full.first_layers(NUM_LAYERS), budget, {})


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    files = [path for path in Path("data/prompts").glob("*.jsonl") if path.stem != "heldout"]
    return load_prompts(files, Path(MODEL.tokenizer), NUM_PROMPTS, 16)


def configure(system: str, tier: str, sampling: str, k: int, stress_seed: int | None = None) -> RunConfig:
    return RunConfig(
        model=MODEL,
        system=load_system(system),
        budget=BudgetConfig(tier, policy="same_experts"),
        dataset=DatasetConfig("none", "shipped", "", ""),
        sampling=SamplingConfig(**yaml.safe_load((CONF / "sampling" / f"{sampling}.yaml").read_text())),
        hardware=load_typed(Hardware, CONF / "hardware" / "h200_pcie5.yaml"),
        execution=ExecutionConfig(stress_seed=stress_seed),
        clock="device",
        k=k,
        max_new_tokens=max(NUM_TOKENS, k + 3),  # a round drafts all K
        warmup_tokens=0,
    )


def generate(
    model: CudaModel, system: str, tier: str, sampling: str, k: int, prompt: list[int], stress_seed: int | None = None
) -> list[int]:
    """Tokens on the first layers."""
    run = on_first_layers(model, configure(system, tier, sampling, k, stress_seed))
    return model.run(run, prompt, ()).generation.tokens


def on_first_layers(model: CudaModel, config: RunConfig) -> ResolvedRun:
    costs = CostModel(model.model.spec, config.tile_rows, config.kv_capacity)
    return ResolvedRun(config, costs, buy_slots(config.model, config.budget, config.system, costs))


@pytest.mark.parametrize("tier", ["high", "low"])
@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
def test_every_policy_is_plain_decoding_under_stress(
    model: CudaModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, sampling: str, tier: str
) -> None:
    monkeypatch.setattr(ModelRunner, "link_bytes_per_s", lambda runner: 10**9)  # not under test
    expected = [generate(model, "resident", tier, sampling, max(DEPTHS), prompt) for prompt in prompts]
    differing = []
    for k in DEPTHS:
        for system in SYSTEMS:
            for index, prompt in enumerate(prompts):
                seed = index if index % 2 else None
                tokens = generate(model, system, tier, sampling, k, prompt, seed)
                if tokens != expected[index][: len(tokens)]:
                    differing.append(f"{system}, K={k}, prompt {index}, stress_seed={seed}")
    assert not differing


@pytest.mark.parametrize("system", ["lru", "specter_deadline"])
def test_kept_kv_is_that_of_a_whole_prefill(model: CudaModel, prompts: list[list[int]], system: str) -> None:
    """Its passes have other numbers of rows, and other places in a tile."""
    first, other = prompts[:2]
    resolved = on_first_layers(model, configure(system, "low", "seeded", 8))
    with model.serving(resolved, longest=64) as engine:

        def run(prompt: list[int], *, keeps: bool) -> tuple[list[int], torch.Tensor]:
            generation = engine.generate(prompt, NUM_TOKENS, reuses_prefix=keeps)
            assert (generation.cached_len > 0) == keeps
            assert model.runner is not None
            entries = model.runner.target.cache.entries[:, : len(prompt) + NUM_TOKENS - 1].clone()
            return generation.tokens, entries

        text = first + run(first, keeps=False)[0]
        for prompt in ([*text, *other], [*text, 5], text, [*text[:-7], *other], [*first[:3], *other]):
            run(first, keeps=False)
            (kept, its), (whole, expected) = run(prompt, keeps=True), run(prompt, keeps=False)
            assert kept == whole
            assert torch.equal(its, expected)


def test_residual_experts_are_plain_decoding_under_stress(
    prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "link_bytes_per_s", lambda runner: 10**9)  # not under test
    samplings, prompt, k = ("greedy", "seeded"), prompts[0], 16
    with loaded() as (full, budget):
        plain = CudaModel(full, budget, {})
        runs = {name: resolve(configure("resident", "high", name, k)) for name in samplings}
        expected = {name: plain.run(run, prompt, ()).generation.tokens for name, run in runs.items()}
        del plain, full
    gc.collect()
    torch.cuda.empty_cache()
    differing = []
    with loaded(residual=tmp_path / "encoded-while-loading") as (full, budget):
        assert full.blobs is not None
        model = CudaModel(full, budget, {})
        for system, tier, sampling in itertools.product(RESIDUAL_SYSTEMS, ("high", "low"), samplings):
            run = resolve(configure(system, tier, sampling, k, stress_seed=1), full.blobs.sizes)
            if model.run(run, prompt, ()).generation.tokens != expected[sampling]:
                differing.append(f"{system}, {tier}, {sampling}")
        del model, full
    gc.collect()
    assert not differing


def test_first_layers_share_the_memory_of_the_whole_model(model: CudaModel) -> None:
    assert model.model.spec.num_layers == NUM_LAYERS == len(model.model.weights.layers)
    assert dataclasses.replace(model.model.spec, num_layers=27) == FULL_SIZE[MODEL.charged_as]
