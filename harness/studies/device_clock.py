"""The error of the virtual clock: what it charges for runs that were measured on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from harness.plotting.charts import PAPER, Grid, mark, plain_log
from harness.plotting.frames import Frames, names, rows_of, split, table_rows
from harness.plotting.notes import counted
from harness.plotting.tables import Table
from harness.plotting.titles import colour, title
from harness.studies.registry import figure, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WITHIN = 0.1  # the grey band
BAND = "#dddddd"
MARKERS = "o^s"  # by model


def clock_data(frames: Frames) -> pd.DataFrame:
    """[model, system, measured_tpot_ms, charged_tpot_ms, ratio] and settings, a row per run; ratio: charged over
    measured."""
    frame = frames["clock"]
    return frame.assign(ratio=frame["charged_tpot_ms"] / frame["measured_tpot_ms"])


def _line(frame: pd.DataFrame) -> str:
    """Provenance of the comparison."""
    models = " and ".join(title("model", model) for model in names(frame, "model"))
    num_prompts, one = len(frame[["dataset", "input"]].drop_duplicates()), frame.iloc[0]
    return (
        f"{len(frame)} runs of {counted(num_prompts, 'prompt')}, {one['max_new_tokens']} tokens each, measured once on "
        f"{one['gpu']} (commit {one['commit']}; inflated stand-ins of {models}), and their recordings replayed by the "
        f"virtual clock of conf/hardware/{one['hardware']}.yaml, whose rates come from other runs on such a machine"
    )


def finding(frames: Frames) -> str:
    """What the figure shows, in numbers."""
    ratio = clock_data(frames)["ratio"]
    return (
        f"The virtual clock charges {ratio.min():.2f} to {ratio.max():.2f} of what {counted(len(ratio), 'run')} took "
        f"on the machine, {ratio.median():.2f} in the median: times on it are no measurements."
    )


def clock_footer(frames: Frames) -> list[str]:
    frame = clock_data(frames)
    ratio = frame["ratio"]
    return [
        f"{_line(frame)}. A point is a run (budgets high and low, greedy and seeded); bars: medians; grey: within "
        f"10 %. All runs: median {ratio.median():.2f}, {ratio.min():.2f} to {ratio.max():.2f}."
    ]


@figure(
    "device.clock", "clock", data=clock_data, footer=clock_footer, finding=finding,
    key="A point is a run; bars: medians; grey: within 10 %.",
    about="how far the virtual clock is from the machine, run by run",
)  # fmt: skip
def draw_clock(data: pd.DataFrame) -> Grid:
    both = pd.concat([data.assign(side=side) for side in ("scatter", "strip")])
    grid = Grid(both, columns="side", height=2.6, legend=True)
    ((scatter, strip),) = grid.axes
    systems, shown = names(data, "system"), names(data, "model")
    for row, system in enumerate(systems):
        mine, shade = rows_of(data, system=system), colour(system)
        for model, marker in zip(shown, MARKERS, strict=False):
            part = rows_of(mine, model=model)
            scatter.scatter(part["measured_tpot_ms"], part["charged_tpot_ms"], s=11, color=shade, lw=0, marker=marker)
            strip.scatter(part["ratio"], [row] * len(part), s=11, color=shade, lw=0, marker=marker, zorder=5)
        mark(strip, row, mine["ratio"].median(), half=0.3, upright=True)
    draw_diagonal(scatter, data["measured_tpot_ms"])
    for model, marker in zip(shown, MARKERS, strict=False):
        scatter.scatter([], [], s=11, color="#555555", lw=0, marker=marker, label=title("model", model))
    scatter.set_xlabel("measured TPOT (ms per token)")
    scatter.set_ylabel("charged by the virtual clock (ms)")
    strip.axvline(1, color=PAPER, lw=0.8)
    strip.axvspan(1 - WITHIN, 1 + WITHIN, color=BAND, lw=0, zorder=0)
    strip.set_yticks(range(len(systems)), [title("system", name) for name in systems], fontsize=6.6)
    strip.invert_yaxis()
    strip.set_xlabel("charged over measured")
    return grid


def draw_diagonal(panel: Axes, times: pd.Series) -> None:
    """Logarithmic axes with the line on which both clocks agree."""
    line = np.array([times.min() * 0.8, times.max() * 1.25])
    panel.plot(line, line, color=PAPER, lw=0.8)
    panel.fill_between(line, line * (1 - WITHIN), line * (1 + WITHIN), color=BAND, lw=0, zorder=0)
    panel.set(xscale="log", yscale="log")
    for axis in (panel.xaxis, panel.yaxis):
        plain_log(axis, subs=(1, 2, 5))


def _ratios(mine: pd.DataFrame) -> dict[str, Any]:
    return {
        "measured TPOT (ms)": mine["measured_tpot_ms"].mean(),
        "charged TPOT (ms)": mine["charged_tpot_ms"].mean(),
        "charged over measured, median": mine["ratio"].median(),
        "least": mine["ratio"].min(),
        "greatest": mine["ratio"].max(),
        "runs": str(len(mine)),
    }


@table("device.clock", "clock")
def clock_table(frames: Frames) -> Table:
    frame = clock_data(frames)
    keys = ["model", "system", "budget"]
    parts = [table_rows(part, keys, _ratios) for _, of_model in split(frame, "model")
             for part in (of_model, of_model.assign(system="all"))]  # fmt: skip
    gpu = frame["gpu"].iloc[0]
    stated = {"clock": "virtual against device", "hardware": gpu, "checkpoint": "narrow stand-ins, inflated"}
    words = [f"{_line(frame)}. Greedy and seeded runs together."]
    return Table("The virtual clock against the device", pd.concat(parts, ignore_index=True), 3, words, stated)
