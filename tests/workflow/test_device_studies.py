"""Figures and tables of what was measured on a device: their data against the runs that it comes from."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness import catalogue
from harness.catalogue import FIGURES, TABLES
from harness.plotting.frames import Frames, read
from harness.studies import device_validation
from harness.studies.device_ablation import CHOICES
from harness.studies.device_families import LATENCIES, OFFLOADED
from specter.errors import SpecterError
from specter.timeline.trace import TraceOp, write_chrome_trace
from tests.workflow.made_up import not_drawn, one, runs, values

RECORDS = Path("data/reference/h200")
OURS = "specter_deadline"
ON = {"fused": True, "graphs": True, "overlap": True}
WHERE = {"gpu": "Test GPU", "driver_version": "1", "torch": "0", "commit": "abcdefghij", "checkpoint": "tiny"}
AXES: dict[str, Any] = {"budget": ("high", "low"), "sampling": ("greedy", "seeded"), "dataset": ("gsm8k", "prose")}


def measured(systems: tuple[str, ...], **axes: Any) -> pd.DataFrame:
    """Runs on a device; `fused`, `graphs` and `overlap` are axes like others."""
    given = {**dict.fromkeys(ON, (True,)), **axes}
    frame = runs(systems, **given).assign(**WHERE)
    return frame.assign(agrees_with_plain=True, clock="device", hardware="h200_pcie5")


def system_runs() -> pd.DataFrame:
    """What the rounds of a device hold: systems, other K, and every choice of the ablation on fewer texts."""
    at = AXES | {"sampling": ("greedy",), "dataset": ("gsm8k", "prose")}
    parts = [
        measured((OURS, "specter", "lru"), **AXES),
        measured(("on_demand",), budget=("high",), sampling=("greedy",), dataset=("gsm8k", "prose")),
        measured(("resident",), sampling=("greedy", "seeded"), dataset=("gsm8k", "prose")),
        measured((OURS,), **at, k=(2, 8)),
    ]
    for system, without in CHOICES:
        if without or system not in (OURS, "specter"):
            parts.append(measured((system,), **at | {name: (False,) for name in [without] if name}))
    frame = pd.concat(parts, ignore_index=True)
    return frame.drop(frame[~frame["graphs"] & (frame["dataset"] == "prose")].index)


def made(name: str, frames: Frames) -> pd.DataFrame:
    """A figure's data; what it draws is checked to be that."""
    study = FIGURES[f"device.{name}"]
    data = study.data(frames)
    columns = [
        column
        for column in ("tpot_ms", "least", "greatest", "floor_trace_ms", "ratio", "value", "charged_tpot_ms")
        if column in data
    ]
    assert not_drawn(study.make(frames), data[columns].to_numpy(float).ravel()) == []
    return data


def test_rounds_are_means_over_texts_of_what_runs_with_everything_on() -> None:
    frame = system_runs()
    data = made("rounds", {"systems": frame})
    assert data["panel"].unique().tolist() == [
        "high budget, greedy", "high budget, seeded", "low budget, greedy", "low budget, seeded",
    ]  # fmt: skip
    assert data["system"].head(5).tolist() == [OURS, "specter", "lru", "on_demand", "resident"]
    for system in (OURS, "lru"):
        where = {"budget": "low", "sampling": "greedy", "system": system}
        source = where | ON | {"k": 16 if system == OURS else 0}
        times, floors = values(frame, "tpot_ms", **source), values(frame, "floor_trace_ms", **source)
        row = one(data, **where)
        assert len(times) == 2 and row["tpot_ms"] == pytest.approx(fmean(times))
        assert np.isnan(row["least"]) and np.isnan(row["greatest"])  # of two texts
        assert row["floor_trace_ms"] == pytest.approx(fmean(floors))
    everywhere = values(data, "tpot_ms", system="on_demand")
    assert everywhere == [pytest.approx(fmean(values(frame, "tpot_ms", system="on_demand")))] * 4
    resident = one(data, system="resident", budget="low", sampling="seeded")
    expected = fmean(values(frame, "tpot_ms", system="resident", sampling="seeded"))
    assert resident["tpot_ms"] == pytest.approx(expected) and np.isnan(resident["floor_trace_ms"])


def test_five_texts_have_an_extent() -> None:
    frame = measured((OURS, "lru"), **AXES | {"dataset": ("gsm8k",), "input": range(5)})
    row = one(made("rounds", {"systems": frame}), budget="low", sampling="greedy", system="lru")
    times = values(frame, "tpot_ms", budget="low", sampling="greedy", system="lru")
    assert (row["least"], row["greatest"]) == (min(times), max(times))


def test_a_choice_is_a_ratio_of_means_on_the_texts_that_all_choices_share() -> None:
    frame = system_runs()
    data = made("ablation", {"systems": frame})
    assert data["choice"].unique().tolist() == list(CHOICES.values())
    shared: dict[str, Any] = {"dataset": "gsm8k", "sampling": "greedy", "k": 16, "budget": "low"}
    for (system, without), choice in CHOICES.items():
        source = shared | ON | {"system": system} | ({without: False} if without else {})
        [time], [floor] = values(frame, "tpot_ms", **source), values(frame, "floor_trace_ms", **source)
        assert one(data, choice=choice, budget="low")["ratio"] == pytest.approx(time / floor)
    frame = frame[frame["graphs"]]  # without that variant both texts are shared
    data = made("ablation", {"systems": frame})
    source = {"system": "specter_retain", "budget": "high"}
    ratio = fmean(values(frame, "tpot_ms", **source)) / fmean(values(frame, "floor_trace_ms", **source))
    row = one(data, choice=CHOICES["specter_retain", ""], budget="high")
    assert row["ratio"] == pytest.approx(ratio)


def test_the_table_of_choices_is_what_the_figure_shows() -> None:
    frames = {"systems": system_runs().assign(distinct_4grams=0.5)}
    data, table = made("ablation", frames), TABLES["device.choices"].build(frames)
    assert table.frame["switched"].tolist() == list(CHOICES.values())
    for tier in ("high", "low"):
        assert table.frame[f"{tier} budget (× floor)"].tolist() == values(data, "ratio", budget=tier)
    footer = " ".join(FIGURES["device.ablation"].caption(frames)["footer"])
    for words in (" ".join(table.notes), footer):
        assert "1 text." in words and "greedy 50% (" in words and "cold start and barrier together" in words


def test_a_trace_shows_the_second_round(tmp_path: Path) -> None:
    ops = []
    for number in range(3):  # prefill and two rounds, of 10 ms
        start = number * 10_000_000
        if number:
            ops += [TraceOp("compute", "draft_step", start + at, start + at + 500_000) for at in (0, 500_000)]
        ops.append(TraceOp("link", "prefetch L0 E1", start + number * 1000, start + 3_000_000, 17))
        ops.append(TraceOp("compute", "experts", start + 3_000_000, start + 4_000_000))
        ops.append(TraceOp("compute", "head", start + 4_000_000, start + 5_000_000))
    for system in ("specter", OURS):
        write_chrome_trace(tmp_path / f"rounds_{system}.trace.json.gz", ops, {})
    frames = read(sorted(tmp_path.iterdir())) | {"systems": system_runs()}
    data = made("trace", frames)
    ours = data[data["system"] == OURS]
    assert ours[["lane", "part"]].to_numpy().tolist() == [
        ["compute", "draft_step"], ["link", "prefetch"], ["compute", "draft_step"], ["compute", "experts"],
        ["compute", "head"],
    ]  # fmt: skip
    assert ours["begin_ms"].tolist() == pytest.approx([0.0, 0.002, 0.5, 3.0, 4.0])
    assert ours["length_ms"].tolist() == pytest.approx([0.5, 2.998, 0.5, 1.0, 1.0])


def test_rivals_are_divided_by_ours_on_the_same_texts() -> None:
    axes = {"budget": ("high", "low"), "dataset": ("gsm8k", "prose")}
    swap = measured(("mixtral_offloading",), **axes | {"dataset": ("prose",)})
    frame = pd.concat([measured((OURS, "lru_next_gate"), **axes), swap], ignore_index=True)
    provenance = pd.DataFrame([{"table": "rivals", "notes": {"memory": "equal slots"}}])
    frames = {"rivals": frame, "provenance": provenance}
    table = TABLES["device.rivals"].build(frames)
    for system, title, texts in (("mixtral_offloading", "Mixtral-Offloading", ["prose"]),
                                 ("lru_next_gate", "LRU, next gate", ["gsm8k", "prose"])):  # fmt: skip
        theirs, ours = (
            fmean(
                value for text in texts for value in values(frame, "tpot_ms", system=name, budget="low", dataset=text)
            )
            for name in (system, OURS)
        )
        row = one(table.frame, budget="low", system=title)
        assert (row["TPOT (ms)"], row["× ours"]) == pytest.approx((theirs, theirs / ours))
        hits = fmean(values(frame, "hit_rate", system=system, budget="low"))
        floor = fmean(values(frame, "over_floor_trace", system=system, budget="low"))
        assert (row["hits (%)"], row["× floor_trace"]) == pytest.approx((hits * 100, floor))
        assert (row["texts"], row["K"]) == (str(len(texts)), "–")
    assert one(table.frame, budget="high", system="Specter, deadline + retain")["× ours"] == 1
    assert "memory: equal slots." in table.notes
    for unknown in (False, None):
        frame["agrees_with_plain"] = [unknown, *[True] * (len(frame) - 1)]
        with pytest.raises(SpecterError, match="rivals: the tokens of specter_deadline were not shown"):
            TABLES["device.rivals"].build(frames)


def family_frames() -> Frames:
    """Two models: benches whose medians are all different, and whole systems."""
    found, number = {}, 0.0
    for model in ("phi3_5_moe", "qwen1_5_moe"):
        rows = []
        for name in [*LATENCIES.values(), "store_load_gb_per_s", "peak_device_gb"]:
            number += 1
            rows.append({"name": name, "median": number})
        found[f"kernels_{model}"] = pd.DataFrame(rows[::-1])
    axes: dict[str, Any] = {"model": ("phi3_5_moe", "qwen1_5_moe"), "dataset": ("gsm8k", "prose")}
    parts = [measured(("lru", OURS), **axes), measured((OURS,), fused=(False,), **axes)]
    parts[1]["execution"] = "unfused"
    return found | {"families": pd.concat(parts, ignore_index=True).assign(num_slots=64)}


def test_families_are_shown_in_the_order_of_models() -> None:
    frames = family_frames()
    data = made("families", frames)
    assert data["model"].head(2).tolist() == ["qwen1_5_moe", "phi3_5_moe"]
    frame, model = frames["families"], "phi3_5_moe"
    table = TABLES["device.families"].build(frames).frame.set_index("")
    assert table.columns.tolist() == ["Qwen1.5-MoE", "Phi-3.5-MoE"]
    bars = {"16 bit, LRU": "lru", "INT4 draft, plain torch": "unfused", "INT4 draft, fused": "fused"}
    for bar, name in bars.items():
        system = "lru" if name == "lru" else OURS
        expected = fmean(values(frame, "tpot_ms", model=model, system=system, fused=name != "unfused"))
        assert one(data, bar=bar, model=model)["value"] == pytest.approx(expected)
        tpot, rate = OFFLOADED[name]
        assert table.loc[[tpot, rate], "Phi-3.5-MoE"].tolist() == pytest.approx([expected, 1000 / expected])
    kernels = dict(frames[f"kernels_{model}"].to_numpy().tolist())
    for heading, name in LATENCIES.items():
        assert table.loc[heading, "Phi-3.5-MoE"] == kernels[name]
    steps = {"16 bit": "plain decoding, all resident, BF16", "INT4, fused": "draft step, graph, 1 row, INT4",
             "INT4, plain torch": "draft step, graph, 1 row, INT4 unfused"}  # fmt: skip
    for bar, name in steps.items():
        assert one(data, panel="all on the GPU: ms per step", bar=bar, model=model)["value"] == kernels[name]
    assert table.loc["store (GB/s)", "Phi-3.5-MoE"] == kernels["store_load_gb_per_s"]
    accepted = fmean(values(frame, "acceptance", model=model, system=OURS, fused=True))
    assert table.loc["acceptance (%)", "Phi-3.5-MoE"] == pytest.approx(accepted * 100)
    floor = fmean(values(frame, "over_floor_trace", model=model, system=OURS, fused=True))
    assert table.loc["× floor_trace, fused", "Phi-3.5-MoE"] == pytest.approx(floor)
    assert table.loc["peak device (GB)", "Phi-3.5-MoE"] == kernels["peak_device_gb"]
    frame["agrees_with_plain"] = frame["system"] != OURS
    with pytest.raises(SpecterError, match="families: the tokens of specter_deadline were not shown"):
        FIGURES["device.families"].make(frames)
    with pytest.raises(SpecterError, match="families: the tokens of specter_deadline were not shown"):
        TABLES["device.families"].build(frames)


def test_the_clock_is_charged_over_measured() -> None:
    named = {"model": "qwen1_5_moe", "dataset": "prose", "input": 0, "measured_tpot_ms": 10.0, "gpu": "Test GPU",
             "commit": "abc", "max_new_tokens": 8, "hardware": "h200_pcie5"}  # fmt: skip
    rows = (("lru", "high", 11.0), ("lru", "low", 8.0), ("specter", "high", 10.0))
    frame = pd.DataFrame(
        [named | {"system": system, "budget": tier, "charged_tpot_ms": charged} for system, tier, charged in rows]
    )
    data = made("clock", {"clock": frame})
    assert data["ratio"].tolist() == pytest.approx([1.1, 0.8, 1.0])
    table = TABLES["device.clock"].build({"clock": frame}).frame.set_index(["system", "budget"])
    assert table.loc[("LRU", "high"), "charged over measured, median"] == pytest.approx(1.1)
    assert table.loc[("all", "high"), "runs"] == "2" and table.loc[("all", "low"), "least"] == pytest.approx(0.8)
    footer = " ".join(FIGURES["device.clock"].caption({"clock": frame})["footer"])
    assert "median 1.00, 0.80 to 1.10" in footer


def test_the_validation_counts_same_texts_of_models_that_were_not_fitted() -> None:
    named = {"k": 0, "budget": "low", "sampling": "seeded", "gpu": "Test GPU", "commit": "abc", "hardware": "fitted",
             "measured_bytes_per_token": 100.0, "charged_bytes_per_token": 101.0}  # fmt: skip
    rows = (  # model, system, text, same, measured, charged, before, distinct 4-grams
        ("deepseek_v2_lite", "lru", "prose", True, 10.0, 10.0, 9.0, 1.0),
        ("qwen1_5_moe", "lru", "prose", True, 10.0, 11.0, 8.0, 1.0),
        ("qwen1_5_moe", "specter", "prose", True, 12.0, 10.8, 12.0, 0.5),
        ("qwen1_5_moe", "specter", "gsm8k", True, 10.0, 9.8, 9.0, 1.0),
        ("qwen1_5_moe", "lru", "gsm8k", False, 10.0, 50.0, 50.0, 1.0),
    )
    keys = ("model", "system", "dataset", "same_text", "measured_tpot_ms", "charged_tpot_ms", "before_tpot_ms",
            "distinct_4grams")  # fmt: skip
    frame = pd.DataFrame([named | dict(zip(keys, row, strict=True)) for row in rows])
    frame["fitted"] = frame["model"] == "deepseek_v2_lite"
    data = made("validation", {"validation": frame})
    assert data["ratio"].tolist() == pytest.approx([1.0, 1.1, 0.9, 0.98])  # not the other text
    assert device_validation.errors(data) == pytest.approx((0.1, 0.1))
    assert device_validation.errors(data, "before_ratio") == pytest.approx((0.1, 0.2))
    assert device_validation.wrong_orders(data) == (1, 1)  # LRU is faster by 20 %, and predicted slower
    assert data["loops"].tolist() == [False, False, True, False]
    mine = one(TABLES["device.validation"].build({"validation": frame}).frame, model="Qwen1.5-MoE", system="Specter")
    assert (mine["texts"], mine["that loop"], mine["least"]) == ("2", "1", pytest.approx(0.9))
    assert mine["bytes, predicted over measured"] == pytest.approx(1.01)


def test_the_committed_records_fill_every_figure_and_table() -> None:
    for studies in (FIGURES, TABLES):
        filled = {name for machine in RECORDS.parent.iterdir() for name in catalogue.of_device(studies, machine)}
        assert filled == set(catalogue.of_device(studies)) != set()
    for name, number in {"choices": 1, "rivals": 3, "families": 1, "clock": 3}.items():
        study = TABLES[f"device.{name}"]
        assert study.build(read(catalogue.records(RECORDS, study))).keys == number
    choices = TABLES["device.choices"]
    frame = choices.build(read(catalogue.records(RECORDS, choices))).frame.set_index("switched")
    assert frame.T["no CUDA graphs"].tolist() == pytest.approx([2.59137, 1.48803], rel=1e-5)
    for name in ("systems", "rivals", "families"):
        runs_of = pd.read_parquet(RECORDS / f"{name}.parquet")
        assert set(runs_of["clock"]) == {"device"} and runs_of["tpot_ms"].gt(0).all()
        compared = runs_of[runs_of["system"] != "resident"]
        assert compared["agrees_with_plain"].astype(bool).all() and compared["text_digest"].notna().all()
        # One text has one digest, whatever system generated it.
        same_text = ["model", "sampling", "dataset", "input", "max_new_tokens"]
        assert runs_of.groupby(same_text)["text_digest"].nunique().max() == 1


def test_what_has_no_records_is_not_offered(tmp_path: Path) -> None:
    (tmp_path / "clock.parquet").write_bytes((RECORDS / "clock.parquet").read_bytes())
    assert catalogue.of_device(FIGURES, tmp_path) == catalogue.of_device(TABLES, tmp_path) == ["clock"]


@pytest.mark.parametrize(
    ("name", "content"),
    [("systems.parquet", "no table"), ("kernels_a.json", '{"summary": '), ("rounds_specter.trace.json.gz", "{}")],
)
def test_a_damaged_record_is_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SpecterError, match=f"{name} cannot be read"):
        read([tmp_path / name])


def test_provenance_is_kept_for_every_table() -> None:
    listed = json.loads((RECORDS / "provenance.json").read_text())
    assert {entry["table"] for entry in listed} == {"systems", "rivals", "families", "clock", "validation"}
    for entry in listed:
        assert all(entry[key] for key in ("gpu", "driver_version", "torch", "triton", "commit", "source_sha256"))
