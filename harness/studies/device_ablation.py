"""What each choice of ours costs on a device when it is switched off, or done as published."""

from __future__ import annotations

import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import PAPER, Grid, note
from harness.plotting.frames import Frames, rows_of
from harness.plotting.tables import Table
from harness.studies.device_systems import OURS, TIERS
from harness.studies.registry import figure, table

EXECUTION = ("fused", "graphs", "overlap")
# What is switched, by system and by what its execution does without.
CHOICES = {
    (OURS, ""): "Specter, deadline + retain",
    ("specter", ""): "planner and eviction as published",
    ("specter_deadline_lru", ""): "eviction as published (LRU)",
    ("specter_retain", ""): "planner as published (cold start, barrier)",
    ("specter_cold_start", ""): "cold start as published",
    ("specter_barrier", ""): "barrier before verification as published",
    ("specter_no_prefetch", ""): "no prefetch, eviction as published",
    (OURS, "fused"): "no fused INT4 kernel",
    (OURS, "graphs"): "no CUDA graphs",
    (OURS, "overlap"): "no overlap of copies and compute",
}
SWITCHED = (
    "Greedy, K = 16, only the texts that every choice was measured on. Each name but the first is the one thing "
    "switched, with three exceptions: planner as published is cold start and barrier together; planner and eviction as "
    "published is the whole published system; no prefetch comes with eviction as published."
)
COLOURS = {"high": "#0072B2", "low": "#56B4E9"}


def choice_runs(frames: Frames) -> pd.DataFrame:
    """The greedy runs of `CHOICES` at K = 16, with a column `choice`, on the texts that all of them share."""
    frame = frames["systems"]
    frame = rows_of(frame, sampling="greedy", k=16)
    without = frame[list(EXECUTION)].apply(lambda run: "".join(name for name in EXECUTION if not run[name]), axis=1)
    frame = frame.assign(choice=[CHOICES.get(pair, "") for pair in zip(frame["system"], without, strict=True)])
    frame = frame[frame["choice"] != ""]
    texts = frame["dataset"] + " " + frame["input"].astype(str)
    shared: set[str] = set.intersection(*texts.groupby([frame["choice"], frame["budget"]]).agg(set))
    return frame[texts.isin(list(shared))]


def ablation_data(frames: Frames) -> pd.DataFrame:
    """[choice, budget, ratio]: mean TPOT over mean floor_trace.

    Means are divided, not ratios averaged: a text that repeats itself has next to no floor.
    """
    means = choice_runs(frames).groupby(["choice", "budget"])[["tpot_ms", "floor_trace_ms"]].mean()
    ratios = (means["tpot_ms"] / means["floor_trace_ms"]).rename("ratio").reset_index()
    order = list(CHOICES.values())
    return ratios.sort_values(["choice", "budget"], key=lambda column: column.map([*order, *TIERS].index))


@figure(
    "device.ablation", "systems", data=ablation_data, shown=choice_runs,
    key="Greedy, K = 16, the texts that every choice was measured on. Black: the floor.",
    footer=lambda frames: [*notes.device_texts(choice_runs(frames)), SWITCHED],
    about="the cost of each choice, against the floor of the same texts",
)  # fmt: skip
def draw_ablation(data: pd.DataFrame) -> Grid:
    grid = Grid(data, height=3.0, legend=True, x="mean TPOT over mean floor_trace of the same texts")
    ((panel,),) = grid.axes
    names = data["choice"].unique().tolist()
    for offset, tier in zip((-0.2, 0.2), TIERS, strict=True):
        mine = rows_of(data, budget=tier)
        heights = [names.index(name) + offset for name in mine["choice"]]
        panel.barh(heights, mine["ratio"], 0.36, color=COLOURS[tier], label=f"{tier} budget")
        for height, value in zip(heights, mine["ratio"], strict=True):
            note(panel, f"{value:.2f}×", (value, height), offset=(2, 0), size=6)
    panel.margins(x=0.08)
    panel.axvline(1, color=PAPER, linewidth=0.8)
    panel.set_yticks(range(len(names)), names, fontsize=6.5)
    panel.invert_yaxis()
    return grid


@table("device.choices", "systems", about="the cost of each choice in numbers")
def choices_table(frames: Frames) -> Table:
    runs = choice_runs(frames)
    data = ablation_data(frames)
    ratios = data.pivot(index="choice", columns="budget", values="ratio").loc[data["choice"].unique(), list(TIERS)]
    rows = ratios.add_suffix(" budget (× floor)").reset_index(names="switched")
    words = [
        "× floor: mean TPOT over mean floor_trace of the same texts: the fewest loads possible, at the link's measured "
        f"rate. {SWITCHED}",
        *notes.device_texts(runs),
    ]
    return Table("The cost of each choice on a device", rows, 1, words, notes.device_stated(runs))
