"""Operations by round, TPOT in parts, and acceptance by position, against the same counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest

from harness.catalogue import FIGURES, TABLES
from harness.jobs.lanes import operations
from harness.scales import load_scale
from harness.studies.positions import ALL, by_position
from harness.studies.timeline import DECODE, DRAFT, IDLE, LINK, PARTS, STALL, VERIFY, typical_round
from specter.session import RunResult
from specter.timeline.trace import TraceOp
from tests.workflow.made_up import lanes, one, rounds, values


def traced(ops: Sequence[TraceOp]) -> RunResult:
    """A run of two rounds, from 10 to 30 ms."""
    times = [(0, 10.0, 18.0, 3, 2), (1, 18.0, 30.0, 2, 3)]
    names = ("index", "start_ms", "end_ms", "draft_len", "new_len")
    found = [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in times]
    return cast(RunResult, SimpleNamespace(generation=SimpleNamespace(rounds=found), trace=list(ops)))


def test_operations_are_of_the_round_in_which_they_begin() -> None:
    ms = 1_000_000
    ops = [
        TraceOp("compute", "head", 8 * ms, 9 * ms),  # of prefill
        TraceOp("compute", "draft_step", 10 * ms, 12 * ms),
        TraceOp("host", "wait", 11 * ms, 12 * ms),
        TraceOp("link", "fetch L0 E1", 17 * ms, 21 * ms, 5),
        TraceOp("compute", "experts", 21 * ms, 22 * ms, 0, 0, 3 * ms),
        TraceOp("compute", "draft_step", 30 * ms, 31 * ms),  # of a round that was cut
    ]
    found = operations(traced(ops))
    columns = ["round", "draft_len", "new_len", "round_ms", "lane", "part", "begin_ms", "length_ms", "stall_ms"]
    assert found[columns].to_numpy().tolist() == [
        [0, 3, 2, 8.0, "compute", "draft_step", 0.0, 2.0, 0.0],
        [0, 3, 2, 8.0, "link", "fetch", 7.0, 4.0, 0.0],
        [1, 2, 3, 12.0, "compute", "experts", 3.0, 1.0, 3.0],
    ]


def test_the_parts_add_up_to_tpot() -> None:
    frame = lanes()
    data = FIGURES["breakdown"].data({"lanes": frame})
    system: dict[str, Any] = {"system": "specter"}

    def per_token(column: str, **settings: Any) -> float:
        texts = ("gsm8k", "prose")
        return fmean(sum(values(frame, column, dataset=text, **system, **settings)) / 8 for text in texts)

    found = {part: one(data, part=part, **system)["value"] for part in [*PARTS, LINK]}
    assert found[DRAFT] == pytest.approx(per_token("length_ms", part="draft_step"))
    assert found[DECODE] == pytest.approx(per_token("length_ms", part="decode"))
    verifying = ("attend_and_route", "experts", "combine", "head")
    assert found[VERIFY] == pytest.approx(sum(per_token("length_ms", part=part) for part in verifying))
    assert found[STALL] == pytest.approx(per_token("stall_ms"))
    assert found[LINK] == pytest.approx(per_token("length_ms", lane="link"))
    tpot = per_token("round_ms", part="head")  # once a round
    assert sum(found[part] for part in PARTS) == pytest.approx(tpot) and found[IDLE] > 0
    row = one(TABLES["breakdown"].build({"lanes": frame}).frame, system="Specter")
    assert row["TPOT (ms)"] == pytest.approx(tpot) and row[f"{STALL} (ms)"] == pytest.approx(found[STALL])


def test_the_gantt_chart_has_one_typical_round_of_each_system() -> None:
    frame = lanes()
    mine = frame[(frame["system"] == "specter") & (frame["dataset"] == "gsm8k")]
    times = {number: values(mine, "round_ms", round=number)[0] / 4 for number in (0, 1)}
    nearest = min(times, key=lambda number: (abs(times[number] - fmean(times.values())), number))
    assert abs(times[typical_round(mine)] - fmean(times.values())) == pytest.approx(
        abs(times[nearest] - fmean(times.values()))
    )
    plain = mine.assign(draft_len=(mine["round"] == 1) * 3)
    assert typical_round(plain) == 1
    data = FIGURES["gantt"].data({"lanes": frame})
    assert data["system"].unique().tolist() == ["specmoeoff", "specter", "specter_plus"]
    chosen = mine[mine["round"] == typical_round(mine)]
    assert values(data, "value", system="specter") == pytest.approx((chosen["begin_ms"] + chosen["length_ms"]).tolist())
    assert "K = 3, 4 tokens in 5" in data["panel"].iloc[0]


def test_rounds_are_shares_of_what_they_needed() -> None:
    frame = rounds(("specter", "lru"), dataset=("gsm8k", "prose"))
    data = FIGURES["rounds"].data({"rounds/timeline": frame})
    assert set(data["system"]) == {"specter"} and len(data) == 18
    row = frame[(frame["system"] == "specter") & (frame["dataset"] == "gsm8k") & (frame["round"] == 3)].iloc[0]
    at = data[data["begin_ms"] == row["start_ms"]]
    needed = row["num_hits"] + row["num_late_hits"] + row["num_misses"]
    assert one(at, outcome="late hit")["value"] == pytest.approx(row["num_late_hits"] / needed * 100)
    assert at["value"].sum() == pytest.approx(100) and at["length_ms"].unique() == row["end_ms"] - row["start_ms"]


def test_a_draft_is_examined_if_all_before_it_were_accepted() -> None:
    found = by_position(pd.DataFrame({"draft_len": [3, 3, 2], "accepted_len": [3, 0, 1]}))
    assert found["num"].tolist() == [3, 2, 1] and found["value"].tolist() == pytest.approx([200 / 3, 50, 100])
    frame = rounds(("specter", "lru"), budget=("high", "low"), dataset=("gsm8k", "prose"))
    data = FIGURES["positions"].data({"rounds/main": frame})
    mine = frame[(frame["system"] == "specter") & (frame["budget"] == "high")]
    first = one(data, dataset=ALL, position=1)
    assert first["num"] == 12 and first["value"] == pytest.approx((mine["accepted_len"] > 0).mean() * 100)
    prose = mine[mine["dataset"] == "prose"]
    assert one(data, dataset="prose", position=1)["value"] == pytest.approx((prose["accepted_len"] > 0).mean() * 100)


def test_tables_of_rounds_have_the_models_of_their_experiment() -> None:
    laptop = load_scale("laptop")
    assert laptop.models_of("rounds/timeline") == laptop.models_of("timeline") == laptop.models_of("lanes") != []
    assert laptop.models_of("rounds/k_sweep", "rounds/hardware") == laptop.models[:1]
    assert load_scale("standin").models_of("lanes") == []
