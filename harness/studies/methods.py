"""The fidelity study: routing fidelity by quantization method and precision (the paper's Table 1)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import PAPER, Grid, plain_log
from harness.plotting.frames import Frames, blocks, rows_of, split, table_rows
from harness.plotting.tables import Table
from harness.plotting.titles import title
from harness.studies import published
from harness.studies.probe import CHECKPOINT, STANDINS_ONLY
from harness.studies.registry import figure, table

COLOURS = {
    "gptq": "#0072B2",
    "awq": "#E69F00",
    "rtn": "#9a9a9a",
    "q8_0": "#009E73",
    "q4_k": "#56B4E9",
    "q2_k": "#D55E00",
}
TOGETHER = 8  # positions per point of the curve over positions
AXES = {"layer": "MoE layer", "position": "generated position", "margin": "router margin (logits)"}
SHARES = (0, 1, 2, 5, 10, 20, 50, 100)  # ticks, in per cent
FOOTER = (
    "Share of the target's top-k experts that the draft does not choose. Margin: the k-th router logit less the next, "
    "ten equally filled bins"
)


def _curve(mine: pd.DataFrame, axis: str) -> pd.DataFrame:
    """[x, value] along one of `AXES`, of one model and method."""
    if axis == "layer":
        layers = rows_of(mine, quantity="set_match").groupby("layer")["value"].mean()
        return pd.DataFrame({"x": layers.index, "value": layers.to_numpy()})
    if axis == "margin":
        return rows_of(mine, quantity="margin")[["margin", "value"]].rename(columns={"margin": "x"})
    steps = rows_of(mine, quantity="position")
    together = steps.groupby(steps["position"] // TOGETHER * TOGETHER + TOGETHER / 2)[["value", "num"]]
    weighted = together.apply(lambda part: np.average(part["value"], weights=part["num"]))
    return pd.DataFrame({"x": weighted.index, "value": weighted.to_numpy()})


def methods_data(frames: Frames) -> pd.DataFrame:
    """[model, axis, method, x, value, paper]: experts chosen otherwise, in per cent, along each of `AXES`; paper: the
    published mean, or NaN."""

    def curves(mine: pd.DataFrame) -> pd.DataFrame:
        one = mine.iloc[0]
        given = published.FIDELITY.get(one["charged_as"], {}).get(one["method"], np.nan)
        return pd.concat([_curve(mine, axis).assign(axis=axis, paper=given) for axis in AXES])

    data = blocks(frames["fidelity"], ["charged_as", "method"], curves)
    return data.assign(value=(1 - data["value"]) * 100, paper=(1 - data["paper"]) * 100)


@figure(
    "methods", "fidelity", minutes=6, data=methods_data, draws_published=True,
    key="Logarithmic above 1 %. Stars beside the layers: the paper's means, real checkpoints.",
    footer=lambda frames: [f"{FOOTER}. {notes.fidelity_line(frames['fidelity'])}."],
    about="experts chosen otherwise by method and precision, along layers, positions and router margins",
)  # fmt: skip
def draw_methods(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="model", columns="axis", height=1.9, sharex="col", sharey=True, legend=True)
    for panel, part in grid:
        axis = part["axis"].iloc[0]
        for named, mine in split(part, "method"):
            dot, method = "o" if axis == "margin" else None, named["method"]
            colour = COLOURS.get(method)
            panel.plot(mine["x"], mine["value"], color=colour, label=title("method", method), marker=dot, ms=2.5, lw=1)
            if axis == "layer":
                panel.plot(part["x"].max() + 1.5, mine["paper"].iloc[0], "*", color=colour, ms=6, mec=PAPER, mew=0.4,
                           label="paper, mean")  # fmt: skip
        if axis == "margin":
            panel.set_xscale("log")
            plain_log(panel.xaxis)
        panel.set_yscale("symlog", linthresh=1, linscale=0.6)
        ticks = [share for share in SHARES if share < 2 * data["value"].max()]
        panel.set_yticks(ticks, [f"{share}" for share in ticks])
        panel.minorticks_off()
    for row, model in zip(grid.axes, grid.row_values, strict=True):
        row[0].set_ylabel(f"{title('model', model)}\nchosen otherwise (%)")
    for panel, label in zip(grid.axes[-1], AXES.values(), strict=True):
        panel.set_xlabel(label)
    return grid


def _shares(mine: pd.DataFrame) -> dict[str, Any]:
    """One model and method, in per cent."""
    means = mine.groupby("quantity")["value"].mean() * 100
    matches, one = rows_of(mine, quantity="set_match"), mine.iloc[0]
    return {
        "expert match (%)": means["set_match"],
        f"{CHECKPOINT} (%)": published.FIDELITY.get(one["charged_as"], {}).get(one["method"], float("nan")) * 100,
        "worst layer (%)": matches.groupby("layer")["value"].mean().min() * 100,
        "worst request (%)": matches.groupby("request")["value"].mean().min() * 100,
        "whole set alike (%)": means["same_set"],
        "same rank (%)": means["order_match"],
        "same next token (%)": means["agreement"],
    }


@table("methods", "fidelity")
def methods_table(frames: Frames) -> Table:
    frame = frames["fidelity"]
    rows = table_rows(frame, ["charged_as", "method"], _shares)
    line = notes.fidelity_line(frame)
    what = (
        "Expert match: share of the target's top-k experts that the draft chooses too; whole set alike: all of them, "
        "in any order; same rank: share of ranks with the same expert; same next token: greedy acceptance on the given "
        "text. Only routed experts are quantised. GGUF columns run dequantised values; no mixture of types, no "
        f"importance matrix. {STANDINS_ONLY}"
    )
    return Table("Routing fidelity by method and precision", rows, 2, [what, f"{line}."], {"protocol": line})
