"""Two rounds of every system, operation by operation, against expectations written by hand in rounds/*.txt.

Each line of an expectation is one call of the timeline: what is issued, under which charge of `tariff.TARIFF`, behind
which events, into which slot; or what the host waits for. Nothing else may be issued, in no other order.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from specter.timeline.costs import CostModel
from tests.charges.runs import open_run
from tests.charges.tariff import KV_CAPACITY, PAYLOAD, SPEC, TARIFF, TILE_ROWS
from tests.helpers import CONF

ROUNDS = sorted((Path(__file__).parent / "rounds").glob("*.txt"))
# Systems that combine what others show: a planner or an eviction of one with that of another.
COMBINED = {
    "lru_residual",
    "specmoeoff_no_plans",
    "specter_auto",
    "specter_cold_start",
    "specter_deadline_lru",
    "specter_deadline_residual",
    "specter_early",
    "specter_late",
    "specter_no_barrier",
    "specter_plus",
    "specter_retain",
}


def expectation(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("path", ROUNDS, ids=lambda path: path.stem)
def test_rounds_issue_and_charge_what_is_written_by_hand(path: Path, tmp_path: Path) -> None:
    system, _, name = path.stem.rpartition("-")
    link: Literal["slow", "fast"] = "fast" if name == "fast" else "slow"
    run = open_run(system, tmp_path, link)
    log = run.generate(prompt_len=1, num_tokens=8 if run.engine.depth.max_len else 3)
    assert log[log.index("round 1") :] == expectation(path)


def test_every_system_has_an_expectation() -> None:
    systems = {path.stem for path in (CONF / "system").glob("*.yaml")}
    assert {path.stem.rpartition("-")[0] for path in ROUNDS} == systems - COMBINED


def test_the_payload_is_one_expert() -> None:
    assert CostModel(SPEC, TILE_ROWS, KV_CAPACITY).payload_bytes == PAYLOAD


def test_the_cache_is_read_whole_and_the_new_rows_are_written() -> None:
    """44 positions and four rows: 48 rows of 9 numbers of 2 bytes, 72 bytes more than with 40 positions."""
    costs = CostModel(SPEC, TILE_ROWS, kv_capacity=44)
    shared = TARIFF["attention, router, shared"][1]
    assert costs.attend_and_route(1).hbm_bytes == shared + 4 * 9 * 2
    assert costs.draft_step().hbm_bytes == TARIFF["draft step"][1] + 3 * 4 * 9 * 2


def test_a_draft_of_its_own_in_int4_reads_fewer_bytes_of_all_but_the_embedding() -> None:
    """48 tokens instead of 32: 128 weights more in the head, so 2238 at 4.125 bits instead of 16."""
    spec = replace(SPEC, vocab=48)
    own = CostModel(spec, TILE_ROWS, KV_CAPACITY, draft_shared_bits=4.125)
    shared = CostModel(spec, TILE_ROWS, KV_CAPACITY)
    assert shared.draft_step().hbm_bytes == TARIFF["draft step"][1] + 2 * 128 + 2 * 16
    assert shared.draft_step().hbm_bytes - own.draft_step().hbm_bytes == int(2238 * (16 - 4.125) / 8)
