"""One round of the published planner and one of deadline order on a device, lane by lane."""

from __future__ import annotations

import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import Grid
from harness.plotting.frames import Frames
from harness.plotting.titles import title
from harness.studies.device_systems import OURS, shown_runs
from harness.studies.registry import figure

LANES = {"compute": 1.0, "link": 0.0}
ATTENTION = ("attention, router, shared experts", "#009E73")
PARTS = {
    "draft_step": ("draft step", "#56B4E9"),
    "attend_and_route": ATTENTION,
    "mix": ATTENTION,  # its name in the traces of data/reference/h200
    "experts": ("routed experts", "#E69F00"),
    "combine": ATTENTION,
    "head": ("head", "#CC79A7"),
    "prefetch": ("prefetch", "#0072B2"),
    "fetch": ("fetch: compute waits", "#D55E00"),
}


def second_round(spans: pd.DataFrame) -> pd.DataFrame:
    """[lane, part, begin_ms, length_ms] from the second round's first draft step to its head; begin is relative."""
    spans = spans[spans["lane"].isin(list(LANES))]
    heads = spans.loc[spans["name"] == "head", "begin_ms"].tolist()  # prefill's, then one a round
    drafts = spans.loc[spans["name"] == "draft_step", "begin_ms"]
    begin = drafts[drafts > heads[1]].min()
    inside = spans[spans["begin_ms"].between(begin, heads[2])]
    part = inside["name"].str.split().str[0]
    return inside[["lane", "length_ms"]].assign(part=part, begin_ms=inside["begin_ms"] - begin)


def trace_data(frames: Frames) -> pd.DataFrame:
    """`second_round` of each system, with [system, panel]."""
    blocks = [
        second_round(frames[f"rounds_{system}"]).assign(system=system, panel=title("system", system))
        for system in ("specter", OURS)
    ]
    return pd.concat(blocks, ignore_index=True)


@figure(
    "device.trace", "rounds_specter", f"rounds_{OURS}", "systems", data=trace_data,
    shown=lambda frames: shown_runs(frames["systems"])[["gpu", "charged_as"]],
    key="One round each, high budget, greedy, K = 16, from the events of its streams.",
    footer=lambda frames: [
        f"{notes.device_line(shown_runs(frames['systems']))}.",
        "High budget, greedy, K = 16: one round each, from the events of its streams.",
    ],
    about="one round's streams, of the published planner and of deadline order",
)  # fmt: skip
def draw_trace(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="system", height=1.5, sharex=True, x="time since the round began (ms)", legend=True)
    for panel, part in grid:
        for row in part.to_dict("records"):
            label, colour = PARTS.get(row["part"], (row["part"], "#999999"))
            panel.broken_barh(
                [(row["begin_ms"], row["length_ms"])], (LANES[row["lane"]], 0.8), facecolors=colour, label=label,
                linewidth=0,
            )  # fmt: skip
        panel.set_yticks([0.4, 1.4], ["link", "compute"])
    grid.axes[-1][0].set_xlim(0, (data["begin_ms"] + data["length_ms"]).max() * 1.01)
    return grid
