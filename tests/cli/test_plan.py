"""The plan: what fits where, and what a token moves; numbers against counts made by hand."""

from __future__ import annotations

import io
import itertools

import pytest
from rich.console import Console

from specter.cli.choice import Choice, configure
from specter.cli.plan import expect, expectations, plan, residency_table
from specter.errors import SpecterError
from specter.generation import GREEDY
from specter.resolve import ResolvedRun, resolve


def resolved(system: str = "specter_deadline", budget: str = "20GB", model: str = "deepseek_v2_lite") -> ResolvedRun:
    console = Console(file=io.StringIO())
    return resolve(configure(Choice(model, system, budget), console, 256, GREEDY, is_plan=True))


def printed(choice: Choice) -> str:
    console = Console(file=io.StringIO(), width=140)
    plan(choice, 256, 0.95, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_decoding_loads_the_absent_share_of_its_experts() -> None:
    run = resolved("lru")
    one = expect(run, 0, 0.5)
    absent = 1 - run.num_slots / (26 * 64)
    assert one.tokens == 1
    assert one.loads == pytest.approx(6 * 26 * absent)
    assert one.bytes_per_token == pytest.approx(one.loads * 17_301_504)


def test_a_longer_draft_shares_experts_over_its_tokens() -> None:
    run = resolved()
    found = expectations(run, 0.95)
    assert [one.k for one in found] == [0, 2, 4, 8, 16, 32]
    assert all(more.bytes_per_token < less.bytes_per_token for less, more in itertools.pairwise(found))
    assert found[3].tokens == pytest.approx(sum(0.95**i for i in range(9)))
    assert expect(run, 8, 1.0).tokens == 9
    assert max(one.loads for one in found) <= 26 * 64


def test_a_system_without_a_draft_has_one_depth() -> None:
    assert [one.k for one in expectations(resolved("lru"), 0.9)] == [0]


def test_the_plan_compares_systems_and_details_the_best() -> None:
    text = printed(Choice("deepseek_v2_lite", budget="20GB"))
    assert all(name in text for name in ("lru", "specter_deadline", "specter_plus", "best", "not measured"))
    assert "INT4 copy of the routed experts" in text and "in all: fits" in text


def test_a_system_that_does_not_fit_is_named_beside_those_that_do() -> None:
    text = printed(Choice("phi3_5_moe", budget="20GB", hardware="rtx4090_ddr4"))
    assert "specter_plus: specter_plus on phi3_5_moe needs" in text and "Phi-3.5-MoE with lru" in text
    with pytest.raises(SpecterError, match="device memory"):
        printed(Choice("phi3_5_moe", budget="1GB", hardware="rtx4090_ddr4"))


def test_the_residency_says_when_a_tier_does_not_fit_the_card() -> None:
    console = Console(file=io.StringIO(), width=140)
    choice = Choice("phi3_5_moe", "specter_deadline", "high", hardware="rtx4090_ddr4")
    console.print(residency_table(resolve(configure(choice, console, 256, GREEDY, is_plan=True))))
    assert isinstance(console.file, io.StringIO)
    assert "does NOT fit 25.8 GB" in console.file.getvalue()
