"""Scales on the device clock: what the GPU would run, run here by the CPU's decoder on the virtual clock."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from rich.progress import Progress

from harness import charge, preflight, scales
from harness.measure import entries, is_finished, measure, plain_runs, publish, run_directory
from harness.plan import Live, compose, matrix
from harness.recordings import RECORDING
from harness.tidy import gather
from specter.config import BudgetConfig, ModelConfig, RunConfig
from specter.errors import SpecterError
from specter.live import LiveModel
from specter.memory import DoesNotFit
from specter.prompts import load_tokenizer
from specter.session import RunResult
from tests.helpers import TINY, load_system, open_live, write_random

SPEC = dataclasses.replace(TINY, vocab=8192)  # the shipped tokenizer's
SYSTEMS = ("specter_deadline", "lru", "specmoeoff")


@dataclasses.dataclass
class Runner:
    """Counts runs, and fails when it is told to."""

    live: LiveModel
    notes: dict[str, str] = dataclasses.field(default_factory=lambda: {"gpu": "none"})
    names: list[str] = dataclasses.field(default_factory=list)
    fails_at: int | None = None
    lies: bool = False

    def run(self, config: RunConfig, prompt: Sequence[int], warmup: Sequence[int]) -> RunResult:
        if len(self.names) == self.fails_at:
            raise KeyboardInterrupt
        if config.budget.tier == "low" and config.system.name == "lru":
            raise DoesNotFit("it does not fit", "give more")
        self.names.append(config.system.name)
        result = self.live.run(dataclasses.replace(config, clock="virtual"), prompt, warmup)
        if self.lies and config.system.speculative:
            result.generation.tokens[-1] ^= 1
        return result


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> LiveModel:
    directory = tmp_path_factory.mktemp("tiny")
    write_random(directory, SPEC)
    opened = open_live(directory, num_slots=SPEC.num_experts)
    return LiveModel(opened.decoder, opened.store, {"checkpoint": str(directory)})


@pytest.fixture
def configs(live: LiveModel) -> list[RunConfig]:
    tokenizer = "data/standins/tokenizer.json"
    model = ModelConfig("tiny", live.notes["checkpoint"], "standin", "", "itself", tokenizer, {"high": 4, "low": 2})
    base = dataclasses.replace(
        compose(["dataset=gsm8k"]), model=model, clock="device", k=3, max_new_tokens=8, warmup_tokens=4
    )
    return [
        dataclasses.replace(base, system=load_system(system), budget=BudgetConfig(tier, policy="same_experts"))
        for system in SYSTEMS
        for tier in ("high", "low")
    ]


def run(configs: list[RunConfig], runner: Runner, root: Path) -> None:
    tokenizer = load_tokenizer(configs[0])
    measure(plain_runs(configs), configs, runner, tokenizer, root, Progress(disable=True), "test")


def test_every_run_is_kept_compared_and_recorded(live: LiveModel, configs: list[RunConfig], tmp_path: Path) -> None:
    root, out = tmp_path / "measured", tmp_path / "out"
    run(configs, Runner(live), root)
    frame = gather([_published(configs, root, out)])
    assert len(frame) == len(configs)
    misfit = frame[~frame["fits_budget"]]
    assert misfit[["system", "budget", "clock"]].values.tolist() == [["lru", "low", "device"]]
    assert frame[frame["fits_budget"]]["agrees_with_plain"].eq(True).all()
    found = {entry.live: Path(entry.recording) for entry in entries(plain_runs(configs), configs, root)}
    assert set(found) == {Live("greedy", 16, 0, 0), Live("greedy", 16, 3, 0), Live("greedy", 16, 3, 0, "own")}
    assert all(path.is_file() for path in found.values())


def test_an_interrupted_measurement_keeps_what_is_finished(
    live: LiveModel, configs: list[RunConfig], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(configs, Runner(live, fails_at=3), tmp_path)
    finished = [config for config in configs if is_finished(run_directory(tmp_path, config))]
    again = Runner(live)
    run(configs, again, tmp_path)
    assert 0 < len(finished) < len(configs)
    assert len(again.names) == 6 - 3  # five that fit, and plain decoding, of which three were there
    third = Runner(live)
    run(configs, third, tmp_path)
    assert third.names == []


def test_experiments_share_their_runs(live: LiveModel, configs: list[RunConfig], tmp_path: Path) -> None:
    run(configs, Runner(live), tmp_path)
    other = Runner(live)
    run([dataclasses.replace(config, results="elsewhere") for config in configs], other, tmp_path)
    assert other.names == []


def test_other_tokens_than_plain_decodings_are_refused(
    live: LiveModel, configs: list[RunConfig], tmp_path: Path
) -> None:
    root = tmp_path / "measured"
    run(configs, Runner(live, lies=True), root)
    with pytest.raises(SpecterError, match="differ from plain decoding"):
        gather([_published(configs, root, tmp_path / "out")])


def test_a_clock_charged_against_itself_is_right(live: LiveModel, configs: list[RunConfig], tmp_path: Path) -> None:
    """Replays of what the virtual clock has timed are charged the same to the bit."""
    root = tmp_path / "measured"
    run(configs, Runner(live), root)
    out = _published(configs, root, tmp_path / "out")
    cells = [charge.charge(path) for path in sorted(out.iterdir()) if (path / RECORDING).is_file()]
    assert len(cells) == 5
    for cell in cells:
        assert cell["charged_tpot_ms"] == cell["measured_tpot_ms"] > 0
        assert cell["charged_bytes_per_token"] == cell["measured_bytes_per_token"]
    summary = charge.record(cells, {})["summary"]
    assert summary["charged_over_measured.all"] == 1
    cells[0]["measured_tpot_ms"] *= 2
    assert charge.record(cells, {})["summary"][f"charged_over_measured.{cells[0]['system']}"] < 1


def test_a_scale_measures_on_its_machine() -> None:
    for name in ("standin", "paper"):
        size = scales.load_scale(name)
        runs = matrix(name, "main", size.models[0], size.datasets[0]).runs()
        assert {config.clock for config in runs} == {"device"}
        assert {config.hardware.name for config in runs} == set(size.hardware)


def test_a_scale_without_its_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    size = scales.load_scale("standin")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SpecterError, match="needs a CUDA GPU.* no CUDA device"):
        preflight.check(size)

    class Small:
        total_memory = 8_000_000_000

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: Small)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "a small one")
    with pytest.raises(SpecterError, match="(?s)a small one has 8000000000.*name a smaller machine"):
        preflight.check(size)
    Small.total_memory = 150_000_000_000
    assert preflight.check(size)["clock"] == "device"


def _published(configs: list[RunConfig], root: Path, out: Path) -> Path:
    publish(configs, root, out)
    kept = yaml.safe_load((next(iter(out.iterdir())) / "config.yaml").read_text())
    assert kept["clock"] == "device"
    assert json.loads((next(iter(out.iterdir())) / "env.json").read_text())["gpu"] == "none"
    return out
