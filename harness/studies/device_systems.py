"""Whole systems measured on a device at both budgets, and every baseline beside ours on the same texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import WHISKER, Grid, mark, note, whiskers
from harness.plotting.frames import MIN_INPUTS, Frames, demand_lossless, rows_of, table_rows
from harness.plotting.tables import Table
from harness.plotting.titles import colour, short_title
from harness.studies.registry import figure, table

OURS = "specter_deadline"
SHOWN = (OURS, "specter", "lru", "on_demand", "resident")
FLOORLESS = ("on_demand", "resident")  # they keep no expert, and all experts
TIERS, SAMPLINGS = ("high", "low"), ("greedy", "seeded")
FLOORS = (
    f"K = 16. Whiskers: least to greatest text, of {MIN_INPUTS} or more. Black line: floor_trace of the same texts at "
    "the link's measured rate. On demand, which loads as much for any text, was measured once and stands everywhere."
)


def shown_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs of `SHOWN` with everything switched on, at the published K."""
    usual = frame["fused"] & frame["graphs"] & frame["overlap"]
    return frame[usual & frame["system"].isin(SHOWN) & frame["k"].isin((0, 16))]


def rounds_data(frames: Frames) -> pd.DataFrame:
    """[budget, sampling, panel, system, tpot_ms, least, greatest, floor_trace_ms]: over texts.

    A system that ignores budget or sampling was measured once, and stands in every panel of its kind.
    """
    frame = shown_runs(frames["systems"])
    rows = []
    for tier in TIERS:
        for sampling in SAMPLINGS:
            everywhere = {"resident": {"sampling": sampling}, "on_demand": {}}
            for system in (name for name in SHOWN if name in set(frame["system"])):
                where = everywhere.get(system, {"budget": tier, "sampling": sampling})
                mine = rows_of(frame, system=system, **where)
                times, floors = mine["tpot_ms"], mine["floor_trace_ms"]
                is_extent = len(times) >= MIN_INPUTS
                rows.append(
                    {
                        "budget": tier,
                        "sampling": sampling,
                        "panel": f"{tier} budget, {sampling}",
                        "system": system,
                        "tpot_ms": times.mean(),
                        "least": times.min() if is_extent else float("nan"),
                        "greatest": times.max() if is_extent else float("nan"),
                        "floor_trace_ms": float("nan") if system in FLOORLESS else floors.mean(),
                    }
                )
    return pd.DataFrame(rows)


@figure(
    "device.rounds", "systems", data=rounds_data, shown=lambda frames: shown_runs(frames["systems"]),
    key=f"K = 16. Whiskers: least to greatest text, of {MIN_INPUTS} or more; black line: floor_trace. Equal slots.",
    footer=lambda frames: [*notes.device_texts(shown_runs(frames["systems"])), FLOORS],
    about="systems measured at both budgets, greedy and seeded",
)  # fmt: skip
def draw_rounds(data: pd.DataFrame) -> Grid:
    grid = Grid(data, columns="panel", height=2.1, sharey=True, title_size=7.5, y="TPOT (ms per token)", legend=True)
    for panel, part in grid:
        for x, row in enumerate(part.to_dict("records")):
            spread = whiskers(rows_of(part, system=row["system"]), "tpot_ms")
            panel.bar(x, row["tpot_ms"], yerr=spread, color=colour(row["system"]), label=short_title(row["system"]),
                      error_kw=WHISKER)  # fmt: skip
            note(panel, f"{row['tpot_ms']:.1f}", (x, np.nanmax([row["tpot_ms"], row["greatest"]])))
            if row["floor_trace_ms"] == row["floor_trace_ms"]:
                mark(panel, x, row["floor_trace_ms"], half=0.4, label="floor_trace")
        panel.set_xticks([])
    return grid


@table("device.rivals", "rivals", "provenance", about="every baseline beside ours, on the same texts")
def rivals_table(frames: Frames) -> Table:
    """Raises SpecterError if the tokens of a run were not shown to equal plain decoding's."""
    frame = demand_lossless(frames["rivals"], "rivals")
    at = frame.set_index(["dataset", "input"])

    def numbers(mine: pd.DataFrame) -> dict[str, Any]:
        one = mine.iloc[0]
        ours = rows_of(at, budget=one["budget"], system=OURS)["tpot_ms"][mine.index]
        return {
            "K": str(one["k"] or "–"),
            "TPOT (ms)": mine["tpot_ms"].mean(),
            "× ours": mine["tpot_ms"].mean() / ours.mean(),
            "× floor_trace": mine["over_floor_trace"].mean(),
            "hits (%)": mine["hit_rate"].mean() * 100,
            "acceptance (%)": mine["acceptance"].mean() * 100,
            "texts": str(len(mine)),
        }

    one = frame.iloc[0]
    kept: dict[str, str] = frames["provenance"].query("table == 'rivals'")["notes"].iloc[0]
    words = [
        f"Device clock; {one['gpu']}; {one['checkpoint']}; greedy, {one['max_new_tokens']} tokens; tokens of all equal "
        "plain decoding's. × ours: over our TPOT on the same texts. × floor_trace: mean of the texts' ratios.",
        *[f"{key}: {text}." for key, text in kept.items()],
    ]
    rows = table_rows(at, ["budget", "system"], numbers)
    return Table("Rivals on a device, at equal slots", rows, 3, words, notes.device_stated(frame))
