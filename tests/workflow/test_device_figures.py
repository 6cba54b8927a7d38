"""Figures and table of measured rounds, from a record that a bench could have left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.device import CHOICES, FIGURES, ORDER, OURS, ablation, read_cells
from harness.device_records import device_figures, device_tables
from harness.device_tables import choices, clock, families, rivals
from harness.drawing import save
from specter.errors import SpecterError
from specter.timeline.trace import TraceOp, write_chrome_trace


def cell(system: str, tier: str, sampling: str, tpot_ms: float, variant: str = "") -> dict[str, Any]:
    numbers = {"tpot_ms": tpot_ms} | (
        {} if system == "resident" else {"floor_trace_ms": tpot_ms / 1.2, "distinct_4grams": 0.5}
    )
    k = 16 if "specter" in system else 0
    return {
        "system": system, "tier": tier, "sampling": sampling, "k": k, "variant": variant, "num_prompts": 5,
        **{key: {"mean": value, "min": value * 0.9, "max": value * 1.1, "values": [value] * 5}
           for key, value in numbers.items()},
    }  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    cells = []
    for index, system in enumerate(ORDER):
        once = {"resident": [("high", "greedy"), ("high", "seeded")], "on_demand": [("high", "greedy")]}
        pairs = once.get(system, [(t, s) for t in ("high", "low") for s in ("greedy", "seeded")])
        cells += [cell(system, tier, sampling, 10.0 + index) for tier, sampling in pairs]
    for (system, variant), tier in ((choice, tier) for choice in CHOICES for tier in ("high", "low")):
        if variant:
            cells.append(cell(system, tier, "greedy", 15.0, variant))
    where = {"gpu": "Test GPU", "torch": "0", "model": "tiny"}
    (tmp_path / "rounds.json").write_text(json.dumps({"provenance": where, "summary": {}, "facts": {"cells": cells}}))
    ops = []
    for number in range(3):  # prefill and two rounds
        start = number * 10_000_000
        if number:
            ops.append(TraceOp("compute", "draft_step", start, start + 1_000_000))
        ops.append(TraceOp("link", "prefetch L0 E1", start, start + 3_000_000, 17))
        ops.append(TraceOp("compute", "experts", start + 3_000_000, start + 4_000_000))
        ops.append(TraceOp("compute", "head", start + 4_000_000, start + 5_000_000))
    for system in ("specter", OURS):
        write_chrome_trace(tmp_path / f"rounds_{system}.trace.json.gz", ops, {})
    return tmp_path


@pytest.mark.parametrize("name", ["rounds", "ablation", "trace"])
def test_every_figure_of_rounds_is_drawn(directory: Path, name: str) -> None:
    save(FIGURES[name](directory), [directory / "figure.png"])
    assert (directory / "figure.png").stat().st_size > 5000


def test_a_choice_is_held_against_the_floor_of_its_own_texts(directory: Path) -> None:
    table = choices(directory).frame.set_index("switched")
    assert table.loc["no CUDA graphs", "high budget (× floor)"] == pytest.approx(1.2)
    assert table.loc["planner and eviction as published", "low budget (× floor)"] == pytest.approx(1.2)
    assert len(table) == len(CHOICES)


def test_choices_are_compared_on_the_texts_that_they_share(directory: Path) -> None:
    path = directory / "rounds.json"
    content = json.loads(path.read_text())
    for one in content["facts"]["cells"]:
        one["num_prompts"] = 2 if one["variant"] else 3
        numbers = (("tpot_ms", [12, 6, 90]), ("floor_trace_ms", [10, 5, 10]), ("distinct_4grams", [0.5, 0.7, 0.1]))
        for key, values in numbers:
            if key in one:
                one[key] |= {"values": values[: one["num_prompts"]]}
    path.write_text(json.dumps(content))
    table = choices(directory)
    frame = table.frame.set_index("switched")
    assert frame.loc["Specter, deadline + retain", "high budget (× floor)"] == pytest.approx(1.2)
    for words in (" ".join(table.notes), " ".join(ablation(directory).texts[0].get_text().split())):
        assert "2 texts." in words and "greedy 50% to 70%" in words and "hiskers" not in words
        assert "cold start and barrier together" in words


def test_a_damaged_record_is_named(directory: Path) -> None:
    (directory / "rounds.json").write_text("{}")
    with pytest.raises(SpecterError, match="rounds.json is not a record"):
        read_cells(directory)


def test_rivals_are_held_against_ours_on_the_same_texts(directory: Path) -> None:
    with pytest.raises(SpecterError, match="has no rivals"):
        rivals(directory)
    assert device_tables(directory) == ["choices"]
    shared = {"k": 0, "over_floor_trace": {"mean": 2.0}, "hit_rate": {"mean": 0.5}}
    cells = [
        shared | {"system": system, "tier": tier, "num_prompts": len(values),
                  "tpot_ms": {"mean": sum(values) / len(values), "values": values}}
        for tier in ("high", "low")
        for system, values in ((OURS, [10.0, 30.0]), ("mixtral_offloading", [50.0]), ("lru_next_gate", [20.0, 60.0]))
    ]  # fmt: skip
    path = directory / "rounds.json"
    content = json.loads(path.read_text())
    content["facts"]["rivals"] = {"notes": {"memory": "equal slots"}, "num_tokens": 64, "cells": cells}
    for equal in (False, None):
        path.write_text(json.dumps(content | {"summary": {"rivals_bit_equal": equal}}))
        with pytest.raises(SpecterError, match=r"rounds.json: rivals_bit_equal is not true"):
            rivals(directory)
    path.write_text(json.dumps(content | {"summary": {"rivals_bit_equal": True}}))
    assert device_tables(directory) == ["choices", "rivals"]
    table = rivals(directory)
    assert dict(zip(table.frame["system"][:3], table.frame["× ours"][:3], strict=True)) == {
        "Specter, deadline + retain": 1.0, "Mixtral-Offloading": 5.0, "LRU, next gate": 2.0,
    }  # fmt: skip
    assert "memory: equal slots." in table.notes


def add_families(directory: Path) -> None:
    keys = ("tpot_ms.lru", "tok_per_s.lru", "tpot_ms.specter_deadline", "tok_per_s.specter_deadline",
            "over_floor_trace.specter_deadline", "acceptance.specter_deadline", "store_load_gb_per_s",
            "peak_device_gb")  # fmt: skip
    where = {"gpu": "Test GPU", "model": "tiny", "commit": "abc"}
    steps = {"INT4": 1.5, "INT4 unfused": 9.0}
    table = [{"name": f"draft step, graph, 1 row, {name}", "median": median} for name, median in steps.items()]
    content = {
        "provenance": where, "summary": dict.fromkeys(keys, 0.5) | {"bit_equal.texts": True},
        "facts": {"slots": "8", "cells": []}, "table": table[::-1],
    }  # fmt: skip
    for name in ("phi3_5_moe", "qwen1_5_moe"):
        (directory / f"families_{name}.json").write_text(json.dumps(content))


def test_families_are_shown_in_the_order_of_models(directory: Path) -> None:
    with pytest.raises(SpecterError, match=r"no families_\*.json"):
        families(directory)
    add_families(directory)
    assert device_tables(directory) == ["choices", "families"]
    assert device_figures(directory) == ["rounds", "ablation", "trace", "families"]
    frame = families(directory).frame.set_index("")
    assert frame.columns.tolist() == ["Qwen1.5-MoE", "Phi-3.5-MoE"]
    assert frame.loc["draft step, INT4 fused (ms)"].tolist() == [1.5, 1.5]
    assert frame.loc["draft step, INT4 unfused (ms)"].tolist() == [9.0, 9.0]
    assert frame.loc["acceptance (%)"].tolist() == [50.0, 50.0]
    save(FIGURES["families"](directory), [directory / "figure.png"])
    path = directory / "families_phi3_5_moe.json"
    content = json.loads(path.read_text())
    content["summary"]["bit_equal.texts"] = False
    path.write_text(json.dumps(content))
    with pytest.raises(SpecterError, match=r"families_phi3_5_moe.json: bit_equal.texts is not true"):
        families(directory)
    path.write_text('{"facts": ')
    with pytest.raises(SpecterError, match="families_phi3_5_moe.json is not a record of families"):
        families(directory)


def test_the_clock_is_held_against_the_device(directory: Path) -> None:
    cells = [
        {
            "model": "qwen1_5_moe",
            "dataset": "prose",
            "input": 0,
            "system": system,
            "tier": tier,
            "measured_tpot_ms": 10.0,
            "charged_tpot_ms": charged,
        }
        for system, tier, charged in (("lru", "high", 11.0), ("lru", "low", 8.0), ("specter", "high", 10.0))
    ]
    where = {"gpu": "Test GPU", "commit": "abc", "max_new_tokens": 8, "hardware": "h200_pcie5"}
    content = {"provenance": where, "summary": {}, "facts": {"cells": cells}}
    (directory / "clock.json").write_text(json.dumps(content))
    assert device_tables(directory) == ["choices", "clock"]
    table = clock(directory).frame.set_index(["system", "budget"])
    assert table.loc[("LRU", "high"), "charged over measured, median"] == pytest.approx(1.1)
    assert table.loc[("all", "high"), "runs"] == "2" and table.loc[("all", "low"), "least"] == pytest.approx(0.8)
    figure = FIGURES["clock"](directory)
    assert "median 1.00, 0.80 to 1.10" in " ".join(figure.texts[0].get_text().split())
    save(figure, [directory / "figure.png"])
