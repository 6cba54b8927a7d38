"""Losslessness: every system's output equals plain target decoding with everything resident, token for token.

And, under it, logits bit for bit: the plain run's KV and outputs are compared as bits in tests/model.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specter.config import BudgetConfig, DatasetConfig, ModelConfig, RunConfig, SamplingConfig, SystemConfig
from specter.models.cpu.live import LiveModel
from specter.recording import Recording
from specter.resolve import resolve
from specter.session import Replayer
from specter.timeline.hardware import Hardware
from specter.typed import load_typed
from tests.helpers import BASELINES, TINY, load_system, open_live, write_random

SPECTER = SystemConfig(name="specter", speculative=True, planner="three_phase", eviction="lru")
OURS = [
    SPECTER,
    SystemConfig("specter_deadline", speculative=True, planner="deadline", eviction="retain", num_staging=4),
    SystemConfig("specter_deadline_lru", speculative=True, planner="deadline", eviction="lru"),
    SystemConfig("specter_retain", speculative=True, planner="three_phase", eviction="retain", num_staging=4),
]
PROMPTS = [[5, 17, 3], [1], [96, 0, 44, 44, 44], list(range(1, 18)), [7] * 33, [60, 2, 9, 31, 8, 77, 12]]
SAMPLINGS = [SamplingConfig("greedy"), SamplingConfig("seeded", temperature=0.9, seed=3)]
BUDGETS = {tier: BudgetConfig(tier, policy="same_experts") for tier in ("high", "low", "smallest")}
NUM_TOKENS = 24
Plain = dict[tuple[str, int], list[int]]  # tokens, by sampling and prompt


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_random(path, TINY, seed=1)
    return path


@pytest.fixture(scope="module")
def live(directory: Path) -> LiveModel:
    opened = open_live(directory, num_slots=TINY.num_experts)
    return LiveModel(opened.decoder, opened.store, notes={})


@pytest.fixture(scope="module")
def config(directory: Path) -> RunConfig:
    return RunConfig(
        model=ModelConfig("tiny", str(directory), "standin", "", "itself", "", {"high": 4, "low": 1.5}),
        system=SPECTER,
        budget=BUDGETS["high"],
        dataset=DatasetConfig("none", "shipped", "", ""),
        sampling=SAMPLINGS[0],
        hardware=load_typed(Hardware, Path("conf/hardware/a100_40gb_pcie4.yaml")),
        max_new_tokens=NUM_TOKENS,
        warmup_tokens=5,
    )


@pytest.fixture(scope="module")
def plain(live: LiveModel, config: RunConfig) -> Plain:
    """Plain decoding of every prompt by every sampling, everything resident."""
    return {
        (sampling.kind, i): live.run(
            resolve(replace(config, system=load_system("resident"), sampling=sampling, warmup_tokens=0)), prompt, ()
        ).generation.tokens
        for sampling in SAMPLINGS
        for i, prompt in enumerate(PROMPTS)
    }


def runs(live: LiveModel, config: RunConfig, plain: Plain, num_prompts: int) -> None:
    """Prompts by all samplings of one system, depth and budget equal plain decoding."""
    for sampling, (i, prompt) in itertools.product(SAMPLINGS, enumerate(PROMPTS[:num_prompts])):
        result = live.run(resolve(replace(config, sampling=sampling)), prompt, [3, 1, 4])
        assert result.generation.tokens == plain[sampling.kind, i], (sampling.kind, prompt)


@pytest.mark.parametrize("k", [1, 2, 7, 16, 32])
@pytest.mark.parametrize("tier", BUDGETS)
def test_specter_equals_plain_decoding(live: LiveModel, config: RunConfig, plain: Plain, tier: str, k: int) -> None:
    runs(live, replace(config, budget=BUDGETS[tier], k=k), plain, num_prompts=6)


@pytest.mark.parametrize(("system", "k"), list(zip(OURS[1:], [16, 7, 7], strict=True)))
@pytest.mark.parametrize("tier", BUDGETS)
def test_other_policies_equal_plain_decoding(
    live: LiveModel, config: RunConfig, plain: Plain, system: SystemConfig, tier: str, k: int
) -> None:
    runs(live, replace(config, system=system, budget=BUDGETS[tier], k=k), plain, num_prompts=6)


@pytest.mark.parametrize("system", BASELINES, ids=lambda system: system.name)
@pytest.mark.parametrize("tier", ["low", "smallest"])
def test_baselines_equal_plain_decoding(
    live: LiveModel, config: RunConfig, plain: Plain, tier: str, system: SystemConfig
) -> None:
    runs(live, replace(config, budget=BUDGETS[tier], system=system, k=5), plain, num_prompts=3)


def test_drafts_are_both_accepted_and_rejected(live: LiveModel, config: RunConfig) -> None:
    """So the tests above cover both acceptance and rejection."""
    results = [
        live.run(resolve(replace(config, k=7, sampling=s)), prompt, [3]) for s in SAMPLINGS for prompt in PROMPTS
    ]
    rounds = [record for result in results for record in result.generation.rounds]
    assert any(record.accepted_len == record.draft_len > 1 for record in rounds)
    assert any(record.accepted_len < record.draft_len for record in rounds)
    assert any(record.num_prefetched_used for record in rounds) and any(record.num_misses for record in rounds)


def test_two_threads_equal_plain_decoding_on_two_threads(live: LiveModel, config: RunConfig) -> None:
    """Bits may differ between thread counts, never within one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        reference = live.run(resolve(replace(config, system=load_system("resident"), warmup_tokens=0)), PROMPTS[0], ())
        for k, tier in itertools.product((2, 16), BUDGETS):
            result = live.run(resolve(replace(config, k=k, budget=BUDGETS[tier])), PROMPTS[0], [3])
            assert result.generation.tokens == reference.generation.tokens
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("system", [*OURS, *BASELINES], ids=lambda system: system.name)
@pytest.mark.parametrize("tier", ["low", "smallest"])
def test_replay_equals_the_live_run(
    live: LiveModel, config: RunConfig, tmp_path: Path, tier: str, system: SystemConfig
) -> None:
    """One recording, made with everything resident, stands for every budget: records are identical."""
    config = replace(config, k=7, system=system)
    source = live.run(resolve(replace(config, budget=BUDGETS["high"])), PROMPTS[0], [3, 1])
    assert source.warmup is not None
    source.recording.save(tmp_path / "run.safetensors")
    config = replace(config, budget=BUDGETS[tier])
    result = live.run(resolve(config), PROMPTS[0], [3, 1])
    replayed = Replayer().replay(resolve(config), Recording.load(tmp_path / "run.safetensors"), source.warmup)
    assert replayed.generation == result.generation
    assert replayed.metrics == result.metrics
