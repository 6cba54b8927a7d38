"""Which measured runs are predicted, and from which recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.jobs.residual import Options as Cells
from harness.jobs.residual import cell_of, planned
from harness.jobs.validate import recorder_of, runs_of
from harness.plan import text_key

LENGTH = {"max_new_tokens": 16, "warmup_tokens": 4}


def measured() -> dict[str, Any]:
    """A file of harness.jobs.residual with every planned run, the first of them traced, too."""
    plan = planned(Cells(model="qwen1_5_moe", out=Path(), max_new_tokens=16, warmup_tokens=4))
    rows = [cell_of(run)._asdict() | {"text": run.dataset.name, "is_traced": False} for run in plan]
    return {"model": "qwen1_5_moe", **LENGTH, "runs": [*rows, rows[0] | {"is_traced": True}]}


def test_runs_with_16_bit_experts_and_a_fixed_depth_are_predicted_once() -> None:
    pairs = list(runs_of(measured()))
    assert {run.system.name for run, _ in pairs} == {"lru", "specter_deadline", "specmoeoff_tuned"}
    assert len(pairs) == 3 * 2 * 2 * 5  # systems, budgets, samplings, texts
    for run, row in pairs:
        assert (*cell_of(run), run.dataset.name) == tuple(
            row[key] for key in ("tier", "sampling", "system", "k", "text")
        )
        assert (run.clock, run.max_new_tokens, run.warmup_tokens) == ("virtual", 16, 4)


def test_a_text_is_recorded_under_the_key_that_its_runs_replay(tmp_path: Path) -> None:
    for run, _ in runs_of(measured()):
        assert text_key(recorder_of(run, tmp_path)) == text_key(run)
