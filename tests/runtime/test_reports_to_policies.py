"""Everything that engine and cache report to a policy: each call with its arguments, in order, written by hand.

The run is the one of tests/charges: rounds of K = 3 and K = 2, three slots per MoE layer, copies that end when
something waits for them. On its logical clock each piece of work ends one millisecond after the one issued before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baselines.lru_next_gate import NextGate
from specter.experts.policies.base import Plan
from specter.models.spec import ExpertId
from tests.charges.logged import Issued, LoggedTimeline, Script
from tests.charges.runs import Run, open_run


class Spy:
    """Passes every call on to a policy, and writes it into the timeline's log."""

    def __init__(self, name: str, policy: Any, timeline: LoggedTimeline) -> None:
        self._name, self._policy, self._timeline = name, policy, timeline

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._policy, name)
        if not callable(value):
            return value

        def call(*arguments: Any, **named: Any) -> Any:
            result = value(*arguments, **named)
            self._log(name, [*arguments, *named.values()], result)
            return result

        return call

    def _log(self, name: str, arguments: list[Any], result: Any) -> None:
        shown = ", ".join(filter(None, map(show, arguments)))
        returned = f" -> {show(result)}" if isinstance(result, bool | ExpertId | Plan) else ""
        self._timeline.lines.append(f"{self._name}.{name}({shown}){returned}")


def spy_on(name: str, policy: Any, timeline: LoggedTimeline) -> Any:
    """The policy, as far as types go."""
    return Spy(name, policy, timeline)


def show(value: Any) -> str:
    """An argument as text; a function (`may_evict`, `is_present`) is left out."""
    if isinstance(value, np.ndarray):
        return show(value.tolist())
    if isinstance(value, ExpertId):
        return f"L{value.layer}E{value.expert}"
    if isinstance(value, Plan):
        return f"load {' '.join(f'L{layer}E{expert}' for layer, expert in value.loads) or 'nothing'}"
    if isinstance(value, Issued):
        return value.name
    if isinstance(value, list):
        if value and all(isinstance(one, int) for one in value):
            return "".join(str(int(one)) for one in value)
        return f"[{' '.join(map(show, value))}]"
    return "" if callable(value) else str(value)


def spied(system: str, directory: Path, **settings: Any) -> Run:
    run = open_run(system, directory, **settings)
    engine, timeline = run.engine, run.timeline
    engine.planner = spy_on("planner", engine.planner, timeline)
    engine.predictor = spy_on("predictor", engine.predictor, timeline)
    engine.cache._eviction = spy_on("eviction", engine.cache._eviction, timeline)
    return run


def reports(run: Run, to: str, num_tokens: int) -> list[str]:
    """The calls that one policy receives, by round."""
    log = run.generate(prompt_len=1, num_tokens=num_tokens)
    return [line.removeprefix(f"{to}.") for line in log if line.startswith((f"{to}.", "round ", "prefill"))]


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines() if not line.strip().startswith("#")]


# Draft tokens that chose each expert of L0 and of L1, and which experts are resident or loading.
THREE_PHASE = """
    prefill
    round 1
    begin_round(3)
    is_boundary(1) -> True
    skips_boundary() -> False
    plan(1, [101000 001100], [110000 110000]) -> load L0E2 L1E2 L1E3
    is_boundary(2) -> True
    skips_boundary() -> False
    # one step since the first
    observe_step(1.0)
    plan(2, [102100 102100], [111000 011100]) -> load L0E3 L1E0
    is_boundary(3) -> False
    barrier([[prefetch L0 E2 prefetch L1 E2 prefetch L1 E3] [prefetch L0 E3 prefetch L1 E0]])
    # of three copies and of two: the first only starts the watch
    observe_copies(384, 2.0)
    observe_copies(192, 1.0)
    round 2
    begin_round(2)
    is_boundary(1) -> True
    skips_boundary() -> False
    plan(1, [010010 100001], [001101 010110]) -> load L0E1 L0E4 L1E0 L1E5
    is_boundary(2) -> False
    barrier([[prefetch L0 E1 prefetch L0 E4 prefetch L1 E0 prefetch L1 E5]])
    observe_copies(576, 3.0)
"""
DEADLINE = """
    prefill
    round 1
    begin_round(3)
    is_boundary(1) -> True
    skips_boundary() -> False
    plan(1, [101000 001100], [110000 110000]) -> load L0E2 L1E2 L1E3
    is_boundary(2) -> True
    skips_boundary() -> False
    observe_step(1.0)
    # E1 of L0 made room for a load
    plan(2, [102100 102100], [101000 111100]) -> load L0E3
    is_boundary(3) -> True
    observe_step(1.0)
    plan(3, [202110 103101], [101000 111100]) -> load L0E3 L0E4 L1E5
    barrier([])
    round 2
    begin_round(2)
    is_boundary(1) -> True
    skips_boundary() -> False
    plan(1, [010010 100001], [100000 111011]) -> load L0E1 L0E4
    is_boundary(2) -> True
    observe_step(1.0)
    plan(2, [010120 111001], [110010 101001]) -> load L0E3 L1E1
    barrier([])
"""
# The host is late: whenever it has read a step, the next one has ended too. One plan then serves both.
LATE = """
    prefill
    round 1
    begin_round(3)
    is_boundary(1) -> True
    skips_boundary() -> True
    is_boundary(2) -> True
    skips_boundary() -> True
    is_boundary(3) -> True
    # the last of three steps, not all of them
    observe_step(1.0)
    plan(3, [202110 103101], [110000 110000]) -> load L0E2 L0E3 L0E4 L1E2 L1E3 L1E5
    barrier([])
    round 2
    begin_round(2)
    is_boundary(1) -> True
    skips_boundary() -> True
    is_boundary(2) -> True
    observe_step(1.0)
    plan(2, [010120 111001], [000010 011111]) -> load L0E1 L0E3 L1E0
    barrier([])
"""
TWO_PLANS = """
    prefill
    round 1
    begin_round(3)
    is_boundary(1) -> True
    skips_boundary() -> False
    plan(1, [101000 001100], [110000 110000]) -> load L0E2 L1E2 L1E3
    is_boundary(2) -> True
    skips_boundary() -> False
    observe_step(1.0)
    plan(2, [102100 102100], [111000 011100]) -> load L0E3 L1E0
    is_boundary(3) -> False
    barrier([[prefetch L0 E2 prefetch L1 E2 prefetch L1 E3] [prefetch L0 E3 prefetch L1 E0]])
    observe_copies(384, 2.0)
    observe_copies(192, 1.0)
    round 2
    begin_round(2)
    is_boundary(1) -> True
    skips_boundary() -> False
    plan(1, [010010 100001], [001101 010110]) -> load L0E1 L0E4 L1E0 L1E5
    is_boundary(2) -> True
    observe_step(1.0)
    plan(2, [010120 111001], [010011 100011]) -> load L0E3 L1E1 L1E2
    barrier([[prefetch L0 E1 prefetch L0 E4 prefetch L1 E0 prefetch L1 E5] [prefetch L0 E3 prefetch L1 E1]])
    observe_copies(576, 3.0)
    # no slot for E2 of L1: two copies were issued
    observe_copies(192, 1.0)
"""


@pytest.mark.parametrize(
    ("system", "lead", "expected"),
    [
        ("specter", 0, THREE_PHASE),
        ("specter", 1, THREE_PHASE),  # a plan that verification waits for is never left out
        ("specter_deadline", 0, DEADLINE),
        ("specter_deadline", 1, LATE),
        ("specmoeoff", 0, TWO_PLANS),
    ],
)
def test_reports_to_a_planner(system: str, lead: int, expected: str, tmp_path: Path) -> None:
    assert reports(spied(system, tmp_path, lead=lead), "planner", num_tokens=8) == lines(expected)


@pytest.mark.parametrize("system", ["lru_next_gate", "mixtral_speculative_loading"])
def test_reports_to_a_next_layer_predictor(system: str, tmp_path: Path) -> None:
    """Prefill too; of the last prediction, E2 is resident."""
    expected = """
        prefill
        plan(1, [01], 6) -> load L1E0 L1E1
        round 1
        plan(1, [32], 6) -> load L1E3 L1E2
        round 2
        plan(1, [24], 6) -> load L1E4
    """
    assert reports(spied(system, tmp_path), "predictor", num_tokens=3) == lines(expected)


def test_a_system_without_planner_drafts_without_plans(tmp_path: Path) -> None:
    log = open_run("specter_no_prefetch", tmp_path).generate(prompt_len=1, num_tokens=8)
    assert not [line for line in log if line.startswith("prefetch")]


def test_a_planner_is_asked_after_every_step_though_it_starts_late(tmp_path: Path) -> None:
    """K = 11: the cold start lasts two steps, which are counted at its end. Other steps cost no wait."""
    positions = range(14)
    script = Script(
        target=[([p % 6, (p + 1) % 6], [p % 6, (p + 2) % 6]) for p in positions],
        draft={p: ([p % 6, (p + 1) % 6], [p % 6, (p + 2) % 6]) for p in positions},
        predicted=[[0, 1] for _ in positions],
    )
    run = spied("specter", tmp_path, script=script, k=11)
    log = run.generate(prompt_len=1, num_tokens=13)
    asked = [line.removeprefix("planner.is_boundary") for line in log if line.startswith("planner.is_boundary")]
    # Every layer has its three experts after two steps, so there is no second plan.
    assert asked == [f"({n}) -> {n == 2}" for n in range(1, 12)]
    plans = [line for line in log if line.startswith("planner.plan")]
    assert plans[0].startswith("planner.plan(2, [012100 011110], [110000 101000])")
    assert [line for line in log if line.startswith("wait for draft")] == ["wait for draft 2", "wait for draft 11"]


@pytest.mark.parametrize("system", ["lru_next_gate", "mixtral_speculative_loading"])
def test_predictions_of_many_rows_are_loaded_by_votes_then_by_rank(system: str, tmp_path: Path) -> None:
    """Five rows name E2 four times and E1 twice, then E0 and E3 first and E4 and E5 second."""
    log = spied(system, tmp_path).generate(prompt_len=5, num_tokens=1)
    plans = [line for line in log if line.startswith("predictor.plan")]
    assert plans == ["predictor.plan(1, [01 32 24 12 25], 6) -> load L1E2 L1E1 L1E0 L1E3 L1E4 L1E5"]


def test_a_predictor_with_one_guess_believes_the_first_rank_alone() -> None:
    predicted = np.array([[0, 1], [3, 2], [2, 4], [1, 2], [2, 5]], np.int16)
    plan = NextGate(num_guesses=1).plan(1, predicted, 6, lambda expert: expert.expert == 3)
    assert plan.loads == [ExpertId(1, expert) for expert in (2, 0, 1)]
    assert plan.protect.tolist() == [[False] * 6, [True, True, True, True, False, False]]
    assert not plan.at_once
