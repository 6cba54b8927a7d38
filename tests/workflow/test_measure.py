"""Scales on the device clock: what the GPU would run, run here by the CPU's decoder on the virtual clock."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml

from harness import scales
from harness.jobs import charge, preflight, write_table
from harness.jobs.measure import Options as MeasureOptions
from harness.jobs.measure import Runs, check_lossless, measure, publish, recorded, slots_of
from harness.jobs.measure import main as measure_job
from harness.jobs.tidy import Options as TidyOptions
from harness.jobs.tidy import gather
from harness.jobs.tidy import main as gather_tables
from harness.plan import TextKey, compose, experiment_runs
from harness.recordings import RECORDING, read_manifest
from specter.config import BudgetConfig, ModelConfig, RunConfig
from specter.errors import SpecterError
from specter.execution import ExecutionConfig
from specter.models.cpu.live import LiveModel
from specter.prompts import load_tokenizer
from specter.resolve import ResolvedRun
from specter.session import RunResult
from tests.helpers import TINY, load_system, open_live, write_random

SPEC = dataclasses.replace(TINY, vocab=8192)  # the shipped tokenizer's
SYSTEMS = ("specter_deadline", "lru", "specmoeoff")
MISFIT = ("specmoeoff", "low")


@dataclasses.dataclass
class Runner:
    """Counts runs and loads, and fails at a given run."""

    live: LiveModel
    notes: dict[str, str] = dataclasses.field(default_factory=lambda: {"gpu": "none"})
    names: list[str] = dataclasses.field(default_factory=list)
    loads: list[bool] = dataclasses.field(default_factory=list)  # whether with a draft
    fails_at: int | None = None
    lies: bool = False

    def load(self, config: RunConfig) -> Runner:
        self.loads.append(config.system.speculative)
        return self

    def run(self, run: ResolvedRun, prompt: Sequence[int], warmup: Sequence[int]) -> RunResult:
        system = run.config.system
        assert system.speculative == self.loads[-1]
        if len(self.names) == self.fails_at:
            raise KeyboardInterrupt
        self.names.append(system.name)
        on_cpu = dataclasses.replace(run.config, clock="virtual")
        result = self.live.run(dataclasses.replace(run, config=on_cpu), prompt, warmup)
        if self.lies and system.speculative:
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
    """Five runs that fit, and SpecMoEOff at the low budget, which gets no slots."""
    tokenizer = "data/standins/tokenizer.json"
    model = ModelConfig("tiny", live.notes["checkpoint"], "standin", "", "itself", tokenizer, {"high": 4, "low": 2})
    base = dataclasses.replace(
        compose(["dataset=gsm8k"]), model=model, clock="device", max_new_tokens=8, warmup_tokens=4
    )
    return [
        dataclasses.replace(
            base,
            k=1 if system == "lru" else 3,
            system=load_system(system),
            budget=BudgetConfig(tier, policy="same_bytes" if (system, tier) == MISFIT else "same_experts"),
        )
        for system in SYSTEMS
        for tier in ("high", "low")
    ]


def run(configs: list[RunConfig], runner: Runner, root: Path) -> Runs:
    runs = Runs.of(configs, load_tokenizer(configs[0]), root)
    num_unfinished = sum(not one.is_finished for one in runs.each)
    assert measure(runs, runner.load, {"driver_version": "1"}, "test") == num_unfinished
    return runs


def test_every_run_is_kept_compared_and_recorded(live: LiveModel, configs: list[RunConfig], tmp_path: Path) -> None:
    runner = Runner(live)
    runs = run(configs, runner, tmp_path / "measured")
    check_lossless(runs)
    assert runner.loads == [False, True]
    publish(runs, tmp_path / "out")
    frame, rounds = gather([tmp_path / "out"])
    assert len(frame) == len(configs)
    keys = ["system", "budget"]
    assert rounds.groupby(keys).size().to_dict() == frame[frame["fits_budget"]].set_index(keys)["num_rounds"].to_dict()
    first = next(run for run in runs.planned if run.config.system.name == "specter_deadline")
    lines = [json.loads(line) for line in (first.directory / "rounds.jsonl").read_text().splitlines()]
    mine = rounds[(rounds["system"] == "specter_deadline") & (rounds["budget"] == first.config.budget.tier)]
    assert mine["round"].tolist() == list(range(len(lines))) and mine["k"].unique().tolist() == [3]
    for key in ("end_ms", "fetch_bytes", "accepted_len"):
        assert mine[key].tolist() == [line[key] for line in lines]
    misfit = frame[~frame["fits_budget"]]
    assert misfit[["system", "budget", "clock"]].values.tolist() == [[*MISFIT, "device"]]
    assert frame[frame["fits_budget"]]["agrees_with_plain"].eq(True).all()
    found = recorded(runs)
    assert set(found) == {TextKey("greedy", 16, k, 0, draft) for k, draft in ((0, "shared"), (3, "shared"), (3, "own"))}
    assert all(path.is_file() for pair in found.values() for path in pair)
    noted = json.loads((runs.planned[0].directory / "env.json").read_text())
    assert noted["gpu"] == "none" and noted["driver_version"] == "1"


def test_each_data_set_of_a_job_has_a_reference_of_its_own(
    live: LiveModel, configs: list[RunConfig], tmp_path: Path
) -> None:
    other = compose(["dataset=prose"]).dataset
    both = [dataclasses.replace(configs[0], dataset=one) for one in (configs[0].dataset, other)]
    runs = run(both, Runner(live), tmp_path / "measured")
    check_lossless(runs)
    assert {name for name, _ in runs.plain} == {"gsm8k", "prose"} and len(runs.each) == 4


def test_executions_are_runs_of_their_own_with_one_reference(
    live: LiveModel, configs: list[RunConfig], tmp_path: Path
) -> None:
    executions = [ExecutionConfig(), ExecutionConfig(fused=False), ExecutionConfig(overlap=False)]
    both = [dataclasses.replace(configs[0], execution=one) for one in executions]
    runner = Runner(live)
    runs = run(both, runner, tmp_path / "measured")
    assert runner.names == ["lru", *["specter_deadline"] * 3] and len(runs.plain) == 1
    publish(runs, tmp_path / "out")
    frame, rounds = gather([tmp_path / "out"])
    assert frame["execution"].tolist() == ["default", "serial", "unfused"]
    assert frame[["fused", "graphs", "overlap"]].to_numpy().tolist() == [[1, 1, 1], [1, 1, 0], [0, 1, 1]]
    assert set(rounds["execution"]) == set(frame["execution"])
    assert set(frame["gpu"]) == {"none"} and set(frame["driver_version"]) == {"1"} and "commit" in frame
    whole, part = tmp_path / "whole.parquet", tmp_path / "part.parquet"
    write_table(whole, frame)
    write_table(part, frame[:2])
    gather_tables(TidyOptions(sources=(whole, part), out=tmp_path / "both.parquet"))
    assert len(pd.read_parquet(tmp_path / "both.parquet")) == 3


def test_the_first_job_of_an_experiment_measures_all_data_sets(
    live: LiveModel, configs: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(scale: str, experiment: str, model: str, dataset: str) -> list[RunConfig]:
        named = dataclasses.replace(configs[0].dataset, name=dataset)
        return [dataclasses.replace(config, dataset=named) for config in configs[:4]]

    runner = Runner(live)
    replaced = {
        "experiment_runs": planned,
        "datasets": lambda *names: ["gsm8k", "prose"],
        "load_scale": lambda name: None,
        "preflight.check_device": lambda scale: None,
        "provenance.of_device": lambda device: {"gpu": "none", "commit": "abc"},
        "check_paths": lambda config: None,
        "origin": lambda config, where: "origin",
        "DeviceBudget": lambda device: SimpleNamespace(device=device),
        "CudaModel.load": lambda resolved, console: runner.load(resolved.config),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(f"harness.jobs.measure.{name}", value)
    for dataset in ("gsm8k", "prose"):
        out, manifest = tmp_path / dataset, tmp_path / f"{dataset}.json"
        measure_job(MeasureOptions(str(tmp_path), "main", "tiny", dataset, out, manifest))
        assert len(runner.names) == 8 and runner.loads == [False, True]
        frame, _ = gather([out])
        assert len(frame) == 4 and set(frame["dataset"]) == {dataset} and set(frame["commit"]) == {"abc"}
        assert set(read_manifest(manifest)[0]) == {TextKey("greedy", 16, k, 0) for k in (0, 3)}


def test_a_resident_run_is_no_recording(live: LiveModel, configs: list[RunConfig], tmp_path: Path) -> None:
    """On a device its routing stays there, so it cannot be replayed."""
    resident = dataclasses.replace(configs[2], system=load_system("resident"))
    runs = run([resident], Runner(live), tmp_path)
    (plain,) = runs.plain.values()
    assert [recording for recording, _ in recorded(runs).values()] == [plain.directory / RECORDING]


def test_a_run_without_its_trace_is_measured_again(live: LiveModel, configs: list[RunConfig], tmp_path: Path) -> None:
    run(configs[:1], Runner(live), tmp_path)
    again = Runner(live)
    runs = run([dataclasses.replace(configs[0], trace=True)], again, tmp_path)
    assert again.names == ["specter_deadline"]  # not the reference
    assert runs.planned[0].is_finished and (runs.planned[0].directory / "trace.json").is_file()


def test_what_is_larger_than_the_device_is_a_result(live: LiveModel, configs: list[RunConfig], tmp_path: Path) -> None:
    small = dataclasses.replace(configs[0].hardware, device_memory_bytes=1000)
    runner = Runner(live)
    runs = run([dataclasses.replace(config, hardware=small) for config in configs], runner, tmp_path)
    assert runner.loads == []
    assert [run.metrics["fits_device"] for run in runs.planned] == [False] * len(configs)
    assert runs.planned[0].metrics["num_slots"] > 0


def test_an_interrupted_measurement_keeps_what_is_finished(
    live: LiveModel, configs: list[RunConfig], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(configs, Runner(live, fails_at=3), tmp_path)
    again = Runner(live)
    run(configs, again, tmp_path)
    assert len(again.names) == 5 - 3  # plain decoding at the high budget is LRU's run there
    third = Runner(live)
    run(configs, third, tmp_path)
    assert third.names == [] and third.loads == []


def test_experiments_share_their_runs_and_name_their_own(
    live: LiveModel, configs: list[RunConfig], tmp_path: Path
) -> None:
    first = run([dataclasses.replace(config, results="first") for config in configs], Runner(live), tmp_path)
    other = Runner(live)
    second = run([dataclasses.replace(config, results="second") for config in configs], other, tmp_path)
    assert other.names == []
    for name, runs in (("first", first), ("second", second), ("first", first)):
        publish(runs, tmp_path / name)
        shown = [yaml.safe_load(path.read_text())["results"] for path in (tmp_path / name).glob("*/config.yaml")]
        assert shown == [name] * len(configs)


def test_another_text_is_another_run(
    live: LiveModel, configs: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(configs, Runner(live), tmp_path)
    monkeypatch.setattr("harness.jobs.measure.warmup_text", lambda: "Another warm-up, of other words than before.")
    again = Runner(live)
    run(configs, again, tmp_path)
    assert len(again.names) == 5


def test_other_tokens_than_plain_decodings_are_refused_by_name(
    live: LiveModel, configs: list[RunConfig], tmp_path: Path
) -> None:
    runs = run(configs, Runner(live, lies=True), tmp_path)
    with pytest.raises(SpecterError, match="(?s)3 runs differ from plain decoding: .*specter_deadline.*delete these"):
        check_lossless(runs)


def test_a_clock_charged_against_itself_is_right(live: LiveModel, configs: list[RunConfig], tmp_path: Path) -> None:
    """Replays of what the virtual clock has timed are charged the same to the bit."""
    runs = run(configs, Runner(live), tmp_path / "measured")
    publish(runs, tmp_path / "out")
    measured = sorted(path.parent for path in (tmp_path / "out").glob(f"*/{RECORDING}"))
    cells = [charge.charge(path) for path in measured]
    assert len(cells) == 5
    for cell in cells:
        assert cell["charged_tpot_ms"] == cell["measured_tpot_ms"] > 0
        assert cell["charged_bytes_per_token"] == cell["measured_bytes_per_token"]
    where = charge.provenance(measured)
    assert where["gpu"] == "none" and where["max_new_tokens"] == 8
    assert charge.medians(pd.DataFrame(cells))["all"] == 1
    cells[0]["measured_tpot_ms"] *= 2
    assert charge.medians(pd.DataFrame(cells))[cells[0]["system"]] < 1
    path = measured[0] / "config.yaml"
    path.write_text(path.read_text().replace("clock: device", "clock: virtual"))
    with pytest.raises(SpecterError, match="was not measured: its clock is virtual"):
        charge.charge(measured[0])
    path.write_text(path.read_text().replace("max_new_tokens: 8", "max_new_tokens: 9"))
    with pytest.raises(SpecterError, match="different machines or lengths"):
        charge.provenance(measured)


@pytest.mark.parametrize("scale", ["standin", "paper"])
def test_every_model_can_be_loaded_for_every_experiment(scale: str) -> None:
    """What decodes plainly, and what drafts: something fits the scale's machine."""
    size = scales.load_scale(scale)
    for experiment in size.experiments:
        for model in size.models_of(experiment):
            configs = experiment_runs(scale, experiment, model, size.datasets[0])
            fitting = {config.system.speculative for config in configs if slots_of(config)[1]}
            assert fitting == {config.system.speculative for config in configs}, (experiment, model)


def test_a_scale_measures_on_its_machine() -> None:
    for name in ("standin", "paper"):
        size = scales.load_scale(name)
        runs = experiment_runs(name, "main", size.models[0], size.datasets[0])
        assert {config.clock for config in runs} == {"device"}
        assert {config.hardware.name for config in runs} == set(size.hardware)


def test_a_scale_without_its_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    size = scales.load_scale("standin")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SpecterError, match="needs a CUDA GPU.* no CUDA device"):
        preflight.check(size)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "one")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (8 * 10**9, 150 * 10**9))
    with pytest.raises(SpecterError, match="(?s)150000000000, of which 8000000000 are free.*end what else"):
        preflight.check(size)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (149 * 10**9, 150 * 10**9))
    assert preflight.check(size)["clock"] == "device"
