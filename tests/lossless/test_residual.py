"""Residual experts: every system decodes the tokens of plain decoding on 16-bit experts, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from safetensors.torch import load_file, save_file

from harness.plan import compose
from specter.config import BudgetConfig, RunConfig
from specter.errors import SpecterError
from specter.models.cpu.live import RESIDENT, LiveModel
from specter.quantize.residual.__main__ import main
from specter.quantize.residual.directory import METADATA_KEY, file_name
from specter.resolve import read_blobs, resolve
from specter.session import Replayer
from tests.helpers import TINY
from tests.quantize.test_residual_directory import write_models

PROMPTS = [[5, 17, 3], list(range(1, 18)), [7] * 33]
WARMUP = [3, 1, 4]
TIERS = {"high": 4.0, "low": 1.5, "smallest": None}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    directory = tmp_path_factory.mktemp("residual")
    checkpoint, quantized = write_models(directory, TINY)
    residual = directory / "residual"
    main(["encode", f"checkpoint={checkpoint}", f"quantized={quantized}", f"out={residual}"])
    found = compose(["system=specter_plus", "max_new_tokens=24", "warmup_tokens=5", "budget.policy=same_experts"])
    model = replace(
        found.model, name="tiny", checkpoint=str(checkpoint), quantized=str(quantized), residual=str(residual),
        charged_as="itself", residents={"high": 4, "low": 1.5},
    )  # fmt: skip
    return replace(found, model=model)


@pytest.fixture(scope="module")
def live(config: RunConfig) -> LiveModel:
    with Progress(disable=True) as progress:
        return LiveModel.load(resolve(config), progress)


@pytest.fixture(scope="module")
def plain(live: LiveModel, config: RunConfig) -> dict[tuple[str, int], list[int]]:
    found = {}
    for sampling in ("greedy", "seeded"):
        for index, prompt in enumerate(PROMPTS):
            one = replace(config, system=RESIDENT, warmup_tokens=0, sampling=compose([f"sampling={sampling}"]).sampling)
            found[sampling, index] = live.run(resolve(one), prompt, ()).generation.tokens
    return found


def systems() -> list[list[str]]:
    named = [[f"system={name}"] for name in ("lru_residual", "specter_deadline_residual", "specter_plus")]
    others = ("on_demand", "lru_next_gate", "mixtral_offloading", "specter", "specter_retain", "specmoeoff_tuned")
    return [*named, *([f"system={name}", "codec=residual"] for name in others)]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("system", systems(), ids=lambda settings: settings[0])
def test_residual_experts_change_no_token(
    live: LiveModel, config: RunConfig, plain: dict[tuple[str, int], list[int]], system: list[str], tier: str
) -> None:
    chosen = compose([*system, "k=7"])
    for sampling, index in plain:
        one = replace(
            config, system=chosen.system, codec=chosen.codec, k=7, sampling=compose([f"sampling={sampling}"]).sampling,
            budget=BudgetConfig(tier, experts_per_layer=TIERS[tier], policy="same_experts"),
        )  # fmt: skip
        result = live.run(resolve(one), PROMPTS[index], WARMUP)
        assert result.generation.tokens == plain[sampling, index]


@pytest.mark.parametrize("k", [1, 16, 32])
def test_neither_does_the_depth(
    live: LiveModel, config: RunConfig, plain: dict[tuple[str, int], list[int]], k: int
) -> None:
    one = replace(config, system=compose(["system=specter_deadline_residual"]).system, k=k)
    assert live.run(resolve(one), PROMPTS[0], WARMUP).generation.tokens == plain["greedy", 0]


def test_a_replay_equals_the_live_run(live: LiveModel, config: RunConfig) -> None:
    run = resolve(replace(config, system=compose(["system=specter_deadline_residual"]).system, k=5))
    result = live.run(run, PROMPTS[1], WARMUP)
    assert result.warmup is not None
    replayed = Replayer().replay(run, result.recording, result.warmup)
    assert replayed.generation == result.generation and replayed.metrics == result.metrics


def test_bytes_are_those_of_the_blobs(live: LiveModel, config: RunConfig) -> None:
    """On the link, in slots and in the report; the checkpoint stands for itself, so nothing is scaled."""
    assert live.blobs is not None
    blobs = read_blobs(config, TINY)
    stored = [layer.blob(e).nbytes for layer in live.blobs.layers for e in range(TINY.num_experts)]
    assert list(blobs.sizes) == stored
    run = resolve(replace(config, system=compose(["system=lru_residual"]).system))
    result = live.run(run, PROMPTS[0], WARMUP)
    sizes = blobs.link_bytes(run.slots.num_bytes)
    for record in result.generation.rounds:
        assert record.fetch_bytes in range(record.num_misses * min(sizes), record.num_misses * max(sizes) + 1)
    assert result.metrics["device_staging_bytes"] == run.costs.num_staged * run.costs.expert_bytes
    assert result.metrics["device_draft_bytes"] > 0


def test_everything_that_fits_is_placed_and_nothing_moves(live: LiveModel, config: RunConfig) -> None:
    one = replace(config, budget=BudgetConfig("custom", experts_per_layer=TINY.num_experts, policy="same_experts"))
    result = live.run(resolve(one), PROMPTS[0], WARMUP)
    assert result.metrics["link_bytes"] == 0 and result.metrics["num_misses"] == 0


def test_a_damaged_blob_is_refused_before_use(config: RunConfig, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in Path(config.model.residual).iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    path = damaged / file_name(1, TINY.num_moe_layers)
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("residual"))
    tensors[name][len(tensors[name]) // 2] ^= 1
    original = Path(config.model.residual) / path.name
    save_file(tensors, path, metadata=_metadata(original))
    one = replace(config, model=replace(config.model, residual=str(damaged)))
    with pytest.raises(SpecterError, match="MoE layer 1, expert"), Progress(disable=True) as progress:
        LiveModel.load(resolve(one), progress)


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {METADATA_KEY: file.metadata()[METADATA_KEY]}


def test_most_blobs_are_residual(live: LiveModel) -> None:
    """So the tests above cover the decoder, not only raw copies."""
    assert live.blobs is not None
    kinds = [int(layer.blob(e)[1]) >> 8 & 1 for layer in live.blobs.layers for e in range(TINY.num_experts)]
    assert torch.tensor(kinds).float().mean() < 0.5
