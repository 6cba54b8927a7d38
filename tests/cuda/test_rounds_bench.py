"""Which cells of the rounds bench start from whose warm-up, without a device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench import rounds
from bench.cells import Cell, CellResult, WarmCache
from bench.report import Report
from bench.resume import Earlier
from bench.rounds import Options, RoundsBench


def test_a_cells_record_says_whose_warm_up_it_starts_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run_cell(cell: Cell, *others: Any, warm: WarmCache | None) -> SimpleNamespace:
        return SimpleNamespace(cell=cell, warm=warm or WarmCache(cell.name, cast(Any, None)))

    def measure(generations: Any, hardware: Any) -> CellResult:
        return CellResult(generations.cell, [{"tpot_ms": 1.0}], [[1]], 1.0, generations.warm.warmed_by)

    monkeypatch.setattr(rounds, "run_cell", run_cell)
    monkeypatch.setattr(rounds, "measure", measure)
    monkeypatch.setattr(RoundsBench, "_link_rate", lambda self: 1.0)
    monkeypatch.setattr(RoundsBench, "_machine", lambda self, rate: None)
    report = Report(tmp_path / "rounds.json", {})
    some: Any = SimpleNamespace(
        device="cpu", add_task=lambda *_, **__: 0, refresh=lambda: None, remove_task=lambda task: None,
        get=lambda cell, prompt_len: None,
    )  # fmt: skip
    bench = RoundsBench(some, some, some, [[1]], [2], Options(), report, some, some, Earlier())
    first = Cell("specter_deadline", "high", "greedy", 16)
    cells = (first, Cell("specter_deadline", "high", "greedy", 4), Cell("lru", "high", "greedy", 0))
    for cell in cells:
        bench.run(cell, 1)
    warmed_by = [one["warmed_by"] for one in report.facts["cells"]]
    assert warmed_by == [first.name, first.name, cells[2].name]
