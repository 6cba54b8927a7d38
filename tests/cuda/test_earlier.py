"""A bench in several calls: finished sections are kept, and nothing of other code or another device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench.cells import Cell, digest
from bench.measure import Sample
from bench.report import Report, Row
from bench.resume import Earlier, compare_texts
from specter.errors import SpecterError

HERE = {
    "gpu": "Test GPU", "commit": "abc", "source_sha256": "1", "torch": "0", "triton": "0", "int4_sha256": "2",
    "hardware": {"name": "test"}, "num_prompts": 5,
}  # fmt: skip
MAIN = Cell("specter_deadline", "high", "greedy", 16)


def record(cell: Cell, texts: list[list[int]]) -> dict[str, Any]:
    content = dataclasses.asdict(cell)
    return {**content, "num_prompts": len(texts), "text_digests": [digest(text) for text in texts]}


def first_call(path: Path) -> Report:
    report = Report(path, dict(HERE))
    report.add(Row("link", "GB/s", Sample((1.0, 2.0)), note="why"))
    report.facts |= {
        "cells": [record(MAIN, [[1, 2]])],
        "seconds: link": 0.5,
        "seconds: main": 300.0,
        "seconds: all": 350,
    }
    report.summary["tpot_ms.high.greedy"] = 11.0
    report.facts["seconds: traces"] = 1.0
    report.skipped["traces"] = "FAILED: no"
    report.write()
    return report


def test_finished_sections_are_kept_and_failed_ones_are_not(tmp_path: Path) -> None:
    before, now = first_call(tmp_path / "rounds.json"), Report(tmp_path / "rounds.json", dict(HERE))
    earlier = Earlier.read(now, ["depth", "traces"])
    assert earlier.sections == ["link", "main"] and list(earlier.cells) == [MAIN]
    assert now.rows == before.rows and now.summary == before.summary and not now.skipped
    assert now.facts["seconds: main"] == 300.0


def test_nothing_is_kept_where_all_is_measured_anew_or_there_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    assert Earlier.read(Report(path, dict(HERE)), ["main"]) == Earlier()
    first_call(path)
    now = Report(path, HERE | {"commit": "other"})
    assert Earlier.read(now, ["link", "main", "traces", "depth"]) == Earlier() and not now.facts


@pytest.mark.parametrize("name", HERE)
def test_results_of_something_else_are_refused_by_name(tmp_path: Path, name: str) -> None:
    first_call(tmp_path / "rounds.json")
    with pytest.raises(SpecterError, match=f"holds link, main of {name}=.*, and this is {name}=other") as caught:
        Earlier.read(Report(tmp_path / "rounds.json", HERE | {name: "other"}), ["depth"])
    assert "out=" in caught.value.remedy


@pytest.mark.parametrize("text", ["{}", "[]", "nothing"])
def test_another_file_is_not_overwritten(tmp_path: Path, text: str) -> None:
    (tmp_path / "rounds.json").write_text(text)
    with pytest.raises(SpecterError, match="is not a report of this bench"):
        Earlier.read(Report(tmp_path / "rounds.json", dict(HERE)), ["depth"])


def test_texts_are_held_against_plain_decoding_whichever_call_measured_them() -> None:
    plain = record(Cell("resident", "high", "greedy", 0), [[1, 2], [3, 4], [5, 6]])
    same, fewer = record(MAIN, [[1, 2], [3, 4], [5, 6]]), record(Cell("specter", "low", "greedy", 16), [[1, 2]])
    more = record(Cell("specter", "high", "greedy", 16), [[1, 2], [3, 4], [5, 6], [7, 8]])
    wrong, unknown = (
        record(Cell("lru", "low", "greedy", 0), [[1, 2], [3, 5]]),
        record(Cell("lru", "low", "seeded", 0), [[0]]),
    )
    cells = [same, plain, wrong, fewer, more, unknown]
    assert compare_texts(cells) == {"cells": 4, "different": ["lru, low, greedy"]}
    assert compare_texts([plain]) == compare_texts([same, wrong]) == {"cells": 0, "different": []}


def test_a_section_that_runs_again_is_not_finished_until_it_is(tmp_path: Path) -> None:
    first_call(tmp_path / "rounds.json")
    now = Report(tmp_path / "rounds.json", dict(HERE))
    Earlier.read(now, ["main"])
    assert "seconds: main" not in now.facts and now.facts["seconds: link"] == 0.5
    now.write()  # and killed
    assert Earlier.read(Report(now.path, dict(HERE)), ["depth"]).sections == ["link"]


def test_a_row_comes_back_whole_and_gives_way_to_a_new_one_of_its_name(tmp_path: Path) -> None:
    before = Report(tmp_path / "rounds.json", dict(HERE))
    rate = Row("rate", "GB/s", Sample((3.0,)), floor=1.0, goal=2.0, is_rate=True, note="why")
    before.add(Row("first", "ms", Sample((1.0,))))
    before.add(rate)
    before.facts["seconds: link"] = 1.0
    before.write()
    now = Report(before.path, dict(HERE))
    Earlier.read(now, ["depth"])
    assert now.rows == before.rows and now.rows[1].is_reached
    again = Row("first", "ms", Sample((2.0,)))
    now.add(again)
    assert now.rows == [again, rate]
