"""The error of the virtual clock: what it charges for runs that were measured on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from harness.plotting.charts import PAPER, Grid, mark, plain_log
from harness.plotting.frames import Frames, each, rows_of, systems
from harness.plotting.notes import counted
from harness.plotting.tables import Table
from harness.plotting.titles import colour, in_order, title
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
    names = " and ".join(title("model", model) for model in in_order("model", frame["model"]))
    num_prompts, one = len(frame[["dataset", "input"]].drop_duplicates()), frame.iloc[0]
    return (
        f"{len(frame)} runs of {counted(num_prompts, 'prompt')}, {one['max_new_tokens']} tokens each, measured once on "
        f"{one['gpu']} (commit {one['commit']}; inflated stand-ins of {names}), and their recordings replayed by the "
        f"virtual clock of conf/hardware/{one['hardware']}.yaml, whose rates come from other runs on such a machine"
    )


def clock_footer(frames: Frames) -> list[str]:
    frame = clock_data(frames)
    ratio = frame["ratio"]
    return [
        f"{_line(frame)}. A point is a run (budgets high and low, greedy and seeded); bars: medians; grey: within "
        f"10 %. All runs: median {ratio.median():.2f}, {ratio.min():.2f} to {ratio.max():.2f}."
    ]


@figure(
    "device.clock", "clock", data=clock_data, footer=clock_footer,
    about="how far the virtual clock is from the machine, run by run",
)  # fmt: skip
def draw_clock(data: pd.DataFrame) -> Grid:
    both = pd.concat([data.assign(side=side) for side in ("scatter", "strip")])
    grid = Grid(both, columns="side", height=2.6)
    ((scatter, strip),) = grid.axes
    names, shown = systems(data), in_order("model", data["model"])
    for row, (system, mine) in enumerate(each(data, "system")):
        for model, marker in zip(shown, MARKERS, strict=False):
            part, shade = rows_of(mine, model=model), colour(system)
            scatter.scatter(part["measured_tpot_ms"], part["charged_tpot_ms"], s=11, color=shade, lw=0, marker=marker)
            strip.scatter(part["ratio"], [row] * len(part), s=11, color=shade, lw=0, marker=marker)
        mark(strip, row, mine["ratio"].median(), half=0.3, upright=True)
    _draw_diagonal(scatter, data["measured_tpot_ms"])
    for model, marker in zip(shown, MARKERS, strict=False):
        scatter.scatter([], [], s=11, color="#555555", lw=0, marker=marker, label=title("model", model))
    scatter.legend(loc="upper left")
    scatter.set_xlabel("measured TPOT (ms per token)")
    scatter.set_ylabel("charged by the virtual clock (ms)")
    strip.axvline(1, color=PAPER, lw=0.8)
    strip.axvspan(1 - WITHIN, 1 + WITHIN, color=BAND, lw=0, zorder=0)
    strip.set_yticks(range(len(names)), [title("system", name) for name in names], fontsize=6.2)
    strip.invert_yaxis()
    strip.set_xlabel("charged over measured")
    return grid


def _draw_diagonal(panel: Axes, times: pd.Series) -> None:
    """Logarithmic axes with the line on which both clocks agree."""
    line = np.array([times.min() * 0.8, times.max() * 1.25])
    panel.plot(line, line, color=PAPER, lw=0.8)
    panel.fill_between(line, line * (1 - WITHIN), line * (1 + WITHIN), color=BAND, lw=0, zorder=0)
    panel.set(xscale="log", yscale="log")
    for axis in (panel.xaxis, panel.yaxis):
        plain_log(axis, subs=(1, 2, 5))


@table("device.clock", "clock")
def clock_table(frames: Frames) -> Table:
    frame = clock_data(frames)
    rows = []
    for model, of_model in each(frame, "model"):
        for system, runs in [*each(of_model, "system"), ("all", of_model)]:
            for tier in ("high", "low"):
                mine = rows_of(runs, budget=tier)
                if len(mine):
                    rows.append(
                        {
                            "model": title("model", model),
                            "system": title("system", system),
                            "budget": tier,
                            "measured TPOT (ms)": mine["measured_tpot_ms"].mean(),
                            "charged TPOT (ms)": mine["charged_tpot_ms"].mean(),
                            "charged over measured, median": mine["ratio"].median(),
                            "least": mine["ratio"].min(),
                            "greatest": mine["ratio"].max(),
                            "runs": str(len(mine)),
                        }
                    )
    gpu = frame["gpu"].iloc[0]
    stated = {"clock": "virtual against device", "hardware": gpu, "checkpoint": "narrow stand-ins, inflated"}
    words = [f"{_line(frame)}. Greedy and seeded runs together."]
    return Table("The virtual clock against the device", pd.DataFrame(rows), 3, words, stated)
