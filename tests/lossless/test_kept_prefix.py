"""A prompt that begins as the last text did is computed behind the kept KV: same KV, same tokens, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from specter.config import BudgetConfig, DatasetConfig, ModelConfig, RunConfig, SamplingConfig
from specter.engine import Engine
from specter.models.cpu.decoder import Decoder
from specter.models.cpu.live import LiveModel
from specter.resolve import resolve
from specter.timeline.hardware import Hardware
from specter.typed import load_typed
from tests.helpers import FAMILIES, load_system, random_live

FIRST = list(range(3, 40))  # three tiles; the next prompts split them elsewhere
NUM_TOKENS = 20


@dataclass(frozen=True)
class Running:
    engine: Engine
    decoder: Decoder

    def kv(self, num_positions: int) -> torch.Tensor:
        return self.decoder.cache.entries[:, :num_positions].clone()


@pytest.fixture(params=["specter", "specter_deadline", "specmoeoff", "lru"])
def system(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=list(FAMILIES))
def running(request: pytest.FixtureRequest, system: str, tmp_path: Path) -> Iterator[Running]:
    opened = random_live(tmp_path, FAMILIES[request.param], num_slots=1)
    config = RunConfig(
        model=ModelConfig("tiny", str(tmp_path), "standin", "", "itself", "", {"high": 4}),
        system=load_system(system),
        budget=BudgetConfig("high", policy="same_experts"),
        dataset=DatasetConfig("none", "shipped", "", ""),
        sampling=SamplingConfig("seeded", temperature=0.9, seed=3),
        hardware=load_typed(Hardware, Path("conf/hardware/a100_40gb_pcie4.yaml")),
        k=5,
        kv_capacity=256,
    )
    with LiveModel(opened.decoder, opened.store, {}).serving(resolve(config), 200) as engine:
        yield Running(engine, opened.decoder)


def test_kept_kv_is_that_of_a_whole_prefill(running: Running) -> None:
    engine = running.engine
    text = FIRST + engine.generate(FIRST, NUM_TOKENS).tokens
    inside = len(FIRST) + 7  # its KV was written by a verification
    prompts = {
        "the text and more": ([*text, *range(50, 71)], len(text) - 1),  # the last token's KV was not computed
        "the text again": (text, len(text) - 1),
        "a part of it": (text[:inside], inside - 1),
        "another end": ([*text[:inside], *range(30, 41)], inside),
        "another text": ([90, *FIRST], 0),
    }
    for name, (prompt, num_kept) in prompts.items():
        engine.generate(FIRST, NUM_TOKENS)
        kept = engine.generate(prompt, NUM_TOKENS, reuses_prefix=True)
        kv = running.kv(len(prompt) + NUM_TOKENS - 1)
        whole = engine.generate(prompt, NUM_TOKENS)
        assert (kept.cached_len, whole.cached_len) == (num_kept, 0), name
        assert kept.tokens == whole.tokens, name
        assert torch.equal(kv, running.kv(len(prompt) + NUM_TOKENS - 1)), name


def test_a_text_that_ended_early_is_kept_as_far_as_it_went(running: Running) -> None:
    engine = running.engine
    whole = engine.generate(FIRST, NUM_TOKENS).tokens
    stop = next(token for token in whole[4:] if token not in whole[:4])
    ended = FIRST + engine.generate(FIRST, NUM_TOKENS, stop_ids={stop}, reuses_prefix=True).tokens
    assert ended[-1] == stop
    prompt = [*ended, 60, 61]
    kept = engine.generate(prompt, NUM_TOKENS, reuses_prefix=True)
    assert kept.cached_len == len(ended) - 1
    assert kept.tokens == engine.generate(prompt, NUM_TOKENS).tokens
    left = FIRST + engine.generate(FIRST, NUM_TOKENS, lambda tokens: True, reuses_prefix=True).tokens
    kept = engine.generate([*left, 5], NUM_TOKENS, reuses_prefix=True)
    assert kept.cached_len == len(left) - 1 == len(FIRST)
    assert kept.tokens == engine.generate([*left, 5], NUM_TOKENS).tokens


def test_after_an_interruption_nothing_is_kept(running: Running) -> None:
    def interrupt(tokens: list[int]) -> bool:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(tokens)
        return False

    seen: list[list[int]] = []
    running.engine.generate(FIRST, NUM_TOKENS)
    with pytest.raises(KeyboardInterrupt):
        running.engine.generate([*FIRST, 7], NUM_TOKENS, interrupt, reuses_prefix=True)
    again = running.engine.generate([*FIRST, 7], NUM_TOKENS, reuses_prefix=True)
    assert again.cached_len == 0
    assert again.tokens == running.engine.generate([*FIRST, 7], NUM_TOKENS).tokens
