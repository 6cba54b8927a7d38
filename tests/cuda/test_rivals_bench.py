"""What the bench says of rivals, from cells that were not run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench import rivals
from bench.cells import Beds, Cell, CellResult
from bench.report import Report
from specter.models.cuda.memory import DeviceBudget
from specter.timeline.hardware import Hardware, load_hardware
from tests.helpers import CONF

TPOTS_MS = {"specter_deadline": [10.0, 20.0], "resident": [3.0, 3.0]}


@pytest.mark.parametrize("wrong", ["", "mixtral_offloading"])
def test_ratios_are_of_the_same_texts_and_bits_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str
) -> None:
    def run(cell: Cell, *others: Any) -> CellResult:
        num_texts = rivals.num_prompts(cell.config().system)
        tpots_ms = TPOTS_MS.get(cell.system, [40.0, 50.0])[:num_texts]
        tokens = [[1, 2], [3, 4]][:num_texts]
        if cell.system == wrong:
            tokens[-1] = [1, 9]
        return CellResult(cell, [{"tpot_ms": tpot} for tpot in tpots_ms], tokens, 1.0, cell.name)

    own = SimpleNamespace(bytes_by_part={"draft_shared": 7, "draft_kv": 1})
    beds = SimpleNamespace(get=lambda cell, prompt_len: SimpleNamespace(own_memory=own))
    monkeypatch.setattr(rivals, "_run", run)
    report = Report(tmp_path / "rounds.json", {})
    machine: Hardware = load_hardware(CONF / "hardware" / "h200_pcie5.yaml")
    rivals.compare(cast(Beds, beds), cast(DeviceBudget, None), machine, [[1], [2], [3]], [4], report)
    assert report.summary["rivals_bit_equal"] == (not wrong)
    assert report.summary["tpot_of_ours_over.mixtral_offloading.low"] == 10 / 40  # one text
    assert report.summary["tpot_of_ours_over.lru_next_gate.high"] == 30 / 90
    cells = {(cell["system"], cell["tier"]): cell for cell in report.facts["rivals"]["cells"]}
    assert len(cells) == 2 * (1 + len(rivals.RIVALS))
    assert {cell["system"] for cell in cells.values() if not cell["bit_equal"]} == ({wrong} if wrong else set())
    assert cells["specmoeoff_tuned", "low"]["allocated_draft_shared_bytes"] == 7
    assert "INT4" in cells["specmoeoff_tuned", "low"]["draft_copy"]
    assert "draft_copy" not in cells["lru_next_gate", "low"]
    assert report.path.exists() and "same_experts" in report.facts["rivals"]["notes"]["memory"]
    assert "4 tokens" in report.facts["rivals"]["notes"]["warm-up"]
    assert cells["lru_next_gate", "low"]["warmed_by"] == "lru_next_gate, low, greedy"
