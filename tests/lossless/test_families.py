"""Losslessness of the other families; test_bit_for_bit covers DeepSeek-V2 with all systems, depths and budgets."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from specter.config import BudgetConfig, DatasetConfig, ModelConfig, RunConfig, SamplingConfig, SystemConfig
from specter.models.cpu.live import LiveModel
from specter.models.spec import ModelSpec
from specter.progress import make_progress
from specter.quantize.cli import main
from specter.resolve import resolve
from specter.timeline.hardware import Hardware
from specter.typed import load_typed
from tests.helpers import TINY_PHI, TINY_QWEN, load_system, write_random

SPECTER = SystemConfig(name="specter", speculative=True, planner="three_phase", eviction="lru")
SPECS = {
    "qwen": TINY_QWEN,
    "qwen, normalised, one dense layer": replace(TINY_QWEN, norm_top_k=True, num_dense_layers=1, dense_inter=32),
    "phi": TINY_PHI,
}
PROMPTS = [[5, 17, 3], list(range(1, 18)), [7] * 33]
SAMPLINGS = [SamplingConfig("greedy"), SamplingConfig("seeded", temperature=0.9, seed=3)]
NUM_TOKENS = 24
Plain = dict[tuple[str, int], list[int]]  # tokens, by sampling and prompt


@pytest.fixture(scope="module", params=list(SPECS.values()), ids=list(SPECS))
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    model: ModelSpec = request.param
    return model


@pytest.fixture(scope="module")
def config(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A checkpoint on disk under its family's names, and its GPTQ draft, both as a user makes them."""
    directory, draft = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("draft") / "gptq"
    write_random(directory, spec, seed=1)
    tokens = np.random.default_rng(0).integers(0, spec.vocab, (40, 40)).astype(np.uint16)
    save_file({"tokens": tokens}, directory / "calibration.safetensors")
    arguments = [f"checkpoint={directory}", f"out={draft}", f"calibration={directory / 'calibration.safetensors'}"]
    main([*arguments, "method=gptq"])
    return RunConfig(
        model=ModelConfig("tiny", str(directory), "standin", str(draft), "itself", "", {"high": 4, "low": 1.5}),
        system=SPECTER,
        budget=BudgetConfig("high"),
        dataset=DatasetConfig("none", "shipped", "", ""),
        sampling=SAMPLINGS[0],
        hardware=load_typed(Hardware, Path("conf/hardware/a100_40gb_pcie4.yaml")),
        max_new_tokens=NUM_TOKENS,
        warmup_tokens=5,
    )


@pytest.fixture(scope="module")
def live(config: RunConfig) -> LiveModel:
    with make_progress(Console(), disable=True) as progress:
        model = LiveModel.load(resolve(config), progress)
    assert model.notes["rowwise"] == "False" and model.notes["draft_origin"] == "this checkpoint"
    return model


@pytest.fixture(scope="module")
def plain(live: LiveModel, config: RunConfig) -> Plain:
    return {
        (sampling.kind, i): live.run(
            resolve(replace(config, system=load_system("resident"), sampling=sampling, warmup_tokens=0)), prompt, ()
        ).generation.tokens
        for sampling, (i, prompt) in itertools.product(SAMPLINGS, enumerate(PROMPTS))
    }


@pytest.mark.parametrize(
    ("system", "tier", "k"),
    [(SPECTER, "high", 7), (SPECTER, "low", 32), (SPECTER, "smallest", 2), (load_system("lru"), "low", 1)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_equals_plain_decoding(
    live: LiveModel, config: RunConfig, plain: Plain, system: SystemConfig, tier: str, k: int
) -> None:
    config = replace(config, system=system, budget=BudgetConfig(tier), k=k)
    for sampling, (i, prompt) in itertools.product(SAMPLINGS, enumerate(PROMPTS)):
        result = live.run(resolve(replace(config, sampling=sampling)), prompt, [3, 1, 4])
        assert result.generation.tokens == plain[sampling.kind, i], (sampling.kind, prompt)


def test_drafts_are_both_accepted_and_rejected(live: LiveModel, config: RunConfig) -> None:
    results = [
        live.run(resolve(replace(config, k=7, sampling=s)), prompt, [3]) for s in SAMPLINGS for prompt in PROMPTS
    ]
    rounds = [record for result in results for record in result.generation.rounds]
    assert any(record.accepted_len > 1 for record in rounds)
    assert any(record.accepted_len < record.draft_len for record in rounds)
    assert any(record.num_prefetched_used for record in rounds)
