"""Plans: which runs an experiment is, and which live runs it needs."""

from __future__ import annotations

import pytest

from harness import plan
from harness.live_check import sample
from specter.errors import SpecterError
from specter.run import run_id

ARGUMENTS = ("laptop", "main", "deepseek_v2_lite", "gsm8k")


def test_compose_names_a_wrong_key() -> None:
    with pytest.raises(SpecterError, match="kk"):
        plan.compose(["kk=3"])
    with pytest.raises(SpecterError, match="k=0 is outside"):
        plan.compose(["k=0"])
    assert plan.compose(["k=3", "system=lru"]).system.name == "lru"


def test_runs_have_names_of_their_own_and_are_recorded() -> None:
    for experiment in plan.load_scale("laptop").experiments:
        arguments = ("laptop", experiment, *ARGUMENTS[2:])
        runs = plan.matrix(*arguments).runs()
        assert len({run_id(config) for config in runs}) == len(runs)
        recorded = {plan.Live(*live) for live in plan.live_plan(*arguments).lives}
        assert {plan.live_of(config) for config in runs} <= recorded


def test_a_system_without_a_cache_runs_at_one_budget_only() -> None:
    runs = plan.matrix(*ARGUMENTS).runs()
    budgets = {name: {c.budget.tier for c in runs if c.system.name == name} for name in ("specter", "resident")}
    assert budgets == {"specter": {"high", "low"}, "resident": {"high"}}


def test_recorded_runs_are_what_was_planned() -> None:
    lives = plan.live_plan(*ARGUMENTS)
    assert [plan.live_of(config) for config in lives.runs()] == [plan.Live(*live) for live in lives.lives]


def test_the_digest_tells_plans_apart() -> None:
    here = plan.digest(plan.matrix(*ARGUMENTS))
    assert here == plan.digest(plan.matrix(*ARGUMENTS))
    assert here != plan.digest(plan.matrix("smoke", *ARGUMENTS[1:]))


def test_the_live_sample_spreads_over_all_runs(tmp_path) -> None:  # type: ignore[no-untyped-def]
    runs = [tmp_path / dataset / f"run{number}" for dataset in "ab" for number in range(6)]
    chosen = sample(runs, 4)
    assert len(chosen) == 4
    assert {path.parent.name for path in chosen} == {"a", "b"} or len({path.name for path in chosen}) == 4
    assert sample(runs, 100) == sorted(runs, key=lambda path: (path.name, path.parent.name))
