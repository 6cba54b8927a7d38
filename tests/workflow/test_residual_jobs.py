"""The jobs of the residual codec's cells: what is run in which order, within which time, and what is recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.jobs import residual, residual_record
from harness.jobs.residual import Cell, Record, by_cell, cell_of, measure_all, planned
from specter.config import RunConfig
from specter.errors import SpecterError
from specter.resolve import ResolvedRun
from specter.session import RunResult
from specter.timeline.trace import TraceOp

MODEL = "deepseek_v2_lite"
OPTIONS = residual.Options(MODEL, Path("unused"), max_new_tokens=9, warmup_tokens=3)
NOTES = {"residual_bits_per_weight": "7.02", "residual_experts_compared": "1664"}


@dataclass
class Clock:
    """Stands for `time` in the job; a run takes a second."""

    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Runner:
    """Answers with the same tokens at once, but for one system."""

    clock: Clock
    liar: str = ""
    seen: list[RunConfig] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=lambda: dict(NOTES))

    def load(self, config: RunConfig) -> Runner:
        self.loads.append(config.payload_codec)
        return self

    def run(self, run: ResolvedRun, prompt: Sequence[int], warmup: Sequence[int]) -> RunResult:
        config = run.config
        self.seen.append(config)
        self.clock.now += 1
        tokens = [1, 2, 4 if config.system.name == self.liar else 3]
        trace = [
            TraceOp("compute", "decode", 0, 2_000_000),
            TraceOp("host", "wait", 0, 1),
            TraceOp("link", "f", 0, 10**6),
        ]
        metrics = {"tpot_ms": float(len(self.seen)), "num_new_tokens": 3}
        result = SimpleNamespace(
            generation=SimpleNamespace(tokens=tokens), metrics=metrics, trace=trace if config.trace else None
        )
        return cast(RunResult, result)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    clock = Clock()
    monkeypatch.setattr(residual, "time", clock)
    monkeypatch.setattr(residual, "resolve", lambda config: SimpleNamespace(config=config))
    return Runner(clock)


def record_of(runner: Runner, tmp_path: Path, seconds: float = 1e9) -> dict[str, Any]:
    record = Record(
        tmp_path / "record.json", {"model": MODEL, "provenance": {}, "max_new_tokens": 9, "warmup_tokens": 3}
    )
    measure_all(planned(OPTIONS), runner.load, record, seconds, traced=True)
    written: dict[str, Any] = json.loads((tmp_path / "record.json").read_text())
    return written


def test_the_plan_has_every_cell_on_five_texts() -> None:
    cells = by_cell(planned(OPTIONS))
    assert {len({run.dataset.name for run in runs}) for runs in cells.values()} == {5}
    assert {cell.system for cell in cells} == {*residual_record.SUMMARISED, "specter_deadline_residual"}
    assert {cell.k for cell in cells if cell.system == "specter_deadline_residual"} == {"8", "16", "32"}
    assert Cell("low", "seeded", "specter_plus", "auto") in cells and Cell("high", "greedy", "lru", "0") in cells
    few = planned(residual.Options(MODEL, Path("unused"), ks=(8,)))
    assert {run.k for run in few if run.system.name == "specter_deadline_residual"} == {8}
    assert {run.max_new_tokens for run in planned(OPTIONS)} == {9}


def test_16_bit_experts_and_plain_decoding_come_first_and_every_text_is_run(runner: Runner, tmp_path: Path) -> None:
    written = record_of(runner, tmp_path)
    assert runner.loads == ["bf16", "residual"] == list(written["loaded"])
    assert cell_of(runner.seen[0]).system == "lru"
    timed = [run for run in written["runs"] if not run["is_traced"]]
    assert len(timed) == len(planned(OPTIONS)) and all(run["agrees_with_plain"] for run in timed)
    traced = [run for run in written["runs"] if run["is_traced"]]
    assert {run["codec"] for run in traced} == {"residual"} and traced[0]["ms_by_work"] == {
        "decode": 2.0,
        "copies": 1.0,
    }


def test_time_that_is_short_is_shared_by_the_cells(runner: Runner, tmp_path: Path) -> None:
    num_cells = len(by_cell(planned(OPTIONS)))
    written = record_of(runner, tmp_path, seconds=2.5 * num_cells)
    counts = [row["num_texts"] for row in residual_record.cells(written)]
    assert len(counts) == num_cells and min(counts) >= 1 and runner.clock.now <= 3.6 * num_cells


def test_a_summary_is_flat_and_a_cell_has_its_spread(runner: Runner, tmp_path: Path) -> None:
    written = record_of(runner, tmp_path)
    bench = {"provenance": {}, "summary": {
        "decode_us_16": 19.0, "delivered_gb_per_s": 119.0, "bit_equal": True, "delivered_bit_equal": True,
    }}  # fmt: skip
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    out = tmp_path / "residual.json"
    residual_record.main(residual_record.Options((tmp_path / "record.json",), tmp_path / "bench.json", out))
    joined = json.loads(out.read_text())
    summary = joined["summary"]
    assert summary["bit_equal"] is True and summary["decode_us"] == 19.0
    assert summary[f"bits_per_weight.{MODEL}"] == 7.02
    [cell] = [
        row for row in joined["cells"]
        if (row["tier"], row["sampling"], row["system"]) == ("high", "seeded", "specter_plus")
    ]  # fmt: skip
    assert summary[f"tpot_ms.{MODEL}.high.seeded.specter_plus"] == cell["tpot_ms"]
    assert cell["tpot_ms_min"] < cell["tpot_ms"] < cell["tpot_ms_max"] and cell["num_texts"] == 5
    assert len(joined["best_fixed_k"]) == 4
    assert not any(isinstance(value, dict | list) for value in summary.values())
    assert written["runs"]


def test_other_tokens_than_plain_decodings_are_refused_by_name(runner: Runner, tmp_path: Path) -> None:
    runner.liar = "specter_plus"
    record_of(runner, tmp_path)
    (tmp_path / "bench.json").write_text("{}")
    options = residual_record.Options((tmp_path / "record.json",), tmp_path / "bench.json", tmp_path / "out.json")
    with pytest.raises(SpecterError, match=f"{MODEL} high greedy specter_plus auto"):
        residual_record.main(options)
    assert not (tmp_path / "out.json").exists()


def test_a_text_that_plain_decoding_did_not_run_is_not_counted_as_compared(runner: Runner, tmp_path: Path) -> None:
    written = record_of(runner, tmp_path)
    for run in written["runs"]:
        run["agrees_with_plain"] = None if run["text"] == "prose" else run["agrees_with_plain"]
    cells = residual_record.cells(written)
    assert all(cell["agrees_with_plain"] and cell["num_compared"] >= 4 for cell in cells)
    assert all(cell["num_compared"] <= cell["num_texts"] for cell in cells)
