"""Losslessness on the shipped stand-in, at the length of the protocol: 128 tokens after a real prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.plan import compose
from specter.config import BudgetConfig, SystemConfig
from specter.models.cpu.live import LiveModel
from specter.prompts import encode, load_tokenizer, prompt_text
from specter.resolve import resolve
from tests.helpers import load_system, open_live

CONFIG = compose(["warmup_tokens=0"])
SPECTER = CONFIG.system
SAMPLINGS = {kind: compose([f"sampling={kind}"]).sampling for kind in ("greedy", "seeded")}


@pytest.fixture(scope="module")
def live() -> LiveModel:
    """The stand-in with a round-to-nearest draft, which needs no calibration."""
    opened = open_live(Path(CONFIG.model.checkpoint), num_slots=CONFIG.tile_rows)
    return LiveModel(opened.decoder, opened.store, notes={})


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return encode(load_tokenizer(CONFIG), prompt_text(CONFIG), CONFIG)


@pytest.fixture(scope="module")
def plain(live: LiveModel, prompt: list[int]) -> dict[str, list[int]]:
    """Plain decoding with everything resident, by sampling."""
    config = replace(CONFIG, system=load_system("resident"))
    runs = {
        kind: live.run(resolve(replace(config, sampling=sampling)), prompt, ()) for kind, sampling in SAMPLINGS.items()
    }
    return {kind: run.generation.tokens for kind, run in runs.items()}


@pytest.mark.parametrize(
    ("system", "tier", "k", "sampling"),
    [
        (SPECTER, "high", 16, "greedy"),
        (SPECTER, "low", 7, "seeded"),
        (SPECTER, "smallest", 32, "seeded"),
        (load_system("lru"), "low", 1, "greedy"),
        (load_system("on_demand"), "smallest", 1, "seeded"),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_equals_plain_decoding(
    live: LiveModel,
    prompt: list[int],
    plain: dict[str, list[int]],
    system: SystemConfig,
    tier: str,
    k: int,
    sampling: str,
) -> None:
    config = replace(CONFIG, system=system, budget=BudgetConfig(tier), k=k, sampling=SAMPLINGS[sampling])
    result = live.run(resolve(config), prompt, ())
    assert result.generation.tokens == plain[sampling]
    assert len(result.generation.tokens) == 128
    if system.speculative:
        assert result.metrics["acceptance"] > 0.8
