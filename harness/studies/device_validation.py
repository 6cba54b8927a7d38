"""The virtual clock on models it was not fitted on: predicted against measured, text by text."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.plotting.charts import PAPER, Grid, mark
from harness.plotting.frames import Frames, names, rows_of, split, table_rows
from harness.plotting.notes import counted
from harness.plotting.tables import Table
from harness.plotting.titles import colour, title
from harness.studies.device_clock import BAND, MARKERS, WITHIN, draw_diagonal
from harness.studies.registry import figure, table

BEFORE = "#aaaaaa"
LOOPS_BELOW = 0.9  # distinct 4-grams


def validation_data(frames: Frames) -> pd.DataFrame:
    """[model, system, measured_tpot_ms, charged_tpot_ms, ratio, before_ratio, bytes_ratio, fitted, loops, …], a row per
    text that the recording shares with the measured run; ratios: charged over measured."""
    frame = frames["validation"]
    same = frame[frame["same_text"]]
    return same.assign(
        ratio=same["charged_tpot_ms"] / same["measured_tpot_ms"],
        before_ratio=same["before_tpot_ms"] / same["measured_tpot_ms"],
        bytes_ratio=same["charged_bytes_per_token"] / same["measured_bytes_per_token"],
        loops=same["distinct_4grams"] < LOOPS_BELOW,
    )


def errors(data: pd.DataFrame, ratio: str = "ratio") -> tuple[float, float]:
    """The median and the greatest error of the predictions of models that were not fitted, as shares."""
    error = (data[~data["fitted"]][ratio] - 1).abs()
    return float(error.median()), float(error.max())


def wrong_orders(data: pd.DataFrame) -> tuple[int, int]:
    """Of the pairs of systems on one text, at one budget and sampling, that differ by more than the median error: how
    many are predicted in the wrong order, and how many there are. Models that were not fitted."""
    median, wrong, pairs = errors(data)[0], 0, 0
    for _, cell in data[~data["fitted"]].groupby(["model", "budget", "sampling", "dataset"]):
        times = cell[["measured_tpot_ms", "charged_tpot_ms"]].to_numpy().tolist()
        for index, (measured, charged) in enumerate(times):
            for other, predicted in times[:index]:
                if abs(measured / other - 1) > median:
                    pairs += 1
                    wrong += (measured - other) * (charged - predicted) <= 0
    return wrong, pairs


def finding(frames: Frames) -> str:
    """What the figure shows, in numbers."""
    data = validation_data(frames)
    (median, worst), (wrong, pairs) = errors(data), wrong_orders(data)
    old_median, old_worst = errors(data, "before_ratio")
    return (
        "With captured graphs, waits and copies charged as the runtime issues them, and fitted on DeepSeek-V2-Lite "
        f"alone, the virtual clock predicts other models within {100 * median:.1f} % in the median and "
        f"{100 * worst:.0f} % at most ({100 * old_median:.1f} and {100 * old_worst:.0f} % before); {wrong} of {pairs} "
        "pairs of systems come out in the wrong order."
    )


def _line(frames: Frames) -> str:
    """Provenance of the comparison."""
    frame, one = frames["validation"], frames["validation"].iloc[0]
    left = counted(int((~frame["same_text"]).sum()), "run")
    return (
        f"Runs with 16-bit experts at equal bytes on {one['gpu']} (commit {one['commit'][:7]}; inflated stand-ins), "
        f"and CPU recordings of the same settings replayed on conf/hardware/{one['hardware']}.yaml; {left} left out, "
        f"since the device computed another text there (other rounds, or bytes per token that differ by more than 3 %)"
    )


def validation_footer(frames: Frames) -> list[str]:
    data = validation_data(frames)
    loops = counted(int(data["loops"].sum()), "text")
    off = 100 * (data["bytes_ratio"] - 1).abs().median()
    return [
        f"{_line(frames)}. {finding(frames)} Bytes per token are {off:.1f} % off in the median. {loops} of {len(data)} "
        f"loop (distinct 4-grams below {LOOPS_BELOW})."
    ]


@figure(
    "device.validation", "validation", data=validation_data, footer=validation_footer, finding=finding,
    key="A point is a text; bars: medians; light grey: the profile before; band: within 10 %.",
    about="the virtual clock on models that it was not fitted on, text by text",
)  # fmt: skip
def draw_validation(data: pd.DataFrame) -> Grid:
    both = pd.concat([data.assign(side=side) for side in ("scatter", "strip")])
    grid = Grid(both, columns="side", height=2.9, legend=True)
    ((scatter, strip),) = grid.axes
    kinds = [
        (model, system) for model in names(data, "model") for system in names(rows_of(data, model=model), "system")
    ]
    markers = dict(zip(names(data, "model"), MARKERS, strict=False))
    for row, (model, system) in enumerate(kinds):
        mine, shade = rows_of(data, model=model, system=system), colour(system)
        style: dict[str, Any] = {"s": 12, "lw": 0, "marker": markers[model]}
        scatter.scatter(mine["measured_tpot_ms"], mine["charged_tpot_ms"], color=shade, **style)
        strip.scatter(mine["before_ratio"], [row] * len(mine), color=BEFORE, zorder=4, **style)
        strip.scatter(mine["ratio"], [row] * len(mine), color=shade, zorder=5, **style)
        mark(strip, row, mine["ratio"].median(), half=0.3, upright=True)
    draw_diagonal(scatter, data["measured_tpot_ms"])
    for model, marker in markers.items():
        kind = "fitted" if rows_of(data, model=model)["fitted"].all() else "not fitted"
        label = f"{title('model', model)} ({kind})"
        scatter.scatter([], [], s=12, color="#555555", lw=0, marker=marker, label=label)
    scatter.set_xlabel("measured TPOT (ms per token)")
    scatter.set_ylabel("predicted TPOT (ms per token)")
    strip.axvline(1, color=PAPER, lw=0.8)
    strip.axvspan(1 - WITHIN, 1 + WITHIN, color=BAND, lw=0, zorder=0)
    labels = [f"{title('model', model).split('-')[0]}: {title('system', system)}" for model, system in kinds]
    strip.set_yticks(range(len(kinds)), labels, fontsize=6.6)
    strip.invert_yaxis()
    strip.set_xlabel("predicted over measured TPOT")
    return grid


def _row(mine: pd.DataFrame) -> dict[str, Any]:
    return {
        "measured TPOT (ms)": mine["measured_tpot_ms"].mean(),
        "predicted TPOT (ms)": mine["charged_tpot_ms"].mean(),
        "predicted over measured, median": mine["ratio"].median(),
        "least": mine["ratio"].min(),
        "greatest": mine["ratio"].max(),
        "before, median": mine["before_ratio"].median(),
        "bytes, predicted over measured": mine["bytes_ratio"].median(),
        "texts": str(len(mine)),
        "that loop": str(int(mine["loops"].sum())),
    }


@table("device.validation", "validation")
def validation_table(frames: Frames) -> Table:
    data = validation_data(frames)
    keys = ["model", "system", "budget", "sampling"]
    rows = pd.concat([table_rows(part, keys, _row) for _, part in split(data, "model")], ignore_index=True)
    one = data.iloc[0]
    stated = {"clock": "virtual against device", "hardware": one["gpu"], "checkpoint": "narrow stand-ins, inflated"}
    words = [f"{_line(frames)}. DeepSeek-V2-Lite is the model of the fit. {finding(frames)}"]
    return Table("The virtual clock, predicted against measured", rows, 3, words, stated)
