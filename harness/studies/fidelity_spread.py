"""Distributions and least values of routing fidelity over instances, layers and requests."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import PAPER, Grid
from harness.plotting.frames import Frames, blocks, rows_of, split, table_rows
from harness.plotting.tables import Table
from harness.plotting.titles import title
from harness.studies import published
from harness.studies.methods import COLOURS
from harness.studies.probe import CHECKPOINT, STANDINS_ONLY
from harness.studies.registry import figure, table

NAN = float("nan")
# What one value is the mean of: positions of a request in a layer, and then requests or layers.
LEVELS: dict[str, list[str]] = {"instance": ["request", "layer"], "layer": ["layer"], "request": ["request"]}


def values_of(mine: pd.DataFrame, level: str) -> pd.Series:
    """Expert match in per cent of one model and method, one value per instance, layer or request."""
    values: pd.Series = rows_of(mine, quantity="set_match").groupby(LEVELS[level])["value"].mean() * 100
    return values


def spread_data(frames: Frames) -> pd.DataFrame:
    """[model, panel, level, method, value, share, mean, least]: per cent of the values of a level at or below `value`;
    mean and least: the paper's, or NaN."""

    def levels(mine: pd.DataFrame) -> pd.DataFrame:
        one = mine.iloc[0]
        parts = []
        for level in LEVELS:
            ordered = values_of(mine, level).sort_values(ignore_index=True)
            share = (ordered.index + 1) / len(ordered) * 100
            parts.append(pd.DataFrame({"value": ordered, "share": share, "level": level}))
        given = (published.FIDELITY, published.FIDELITY_LEAST)
        mean, least = (by.get(one["charged_as"], {}).get(one["method"], NAN) * 100 for by in given)
        return pd.concat(parts).assign(mean=mean, least=least)

    data = blocks(frames["fidelity"], ["charged_as", "method"], levels)
    panels = [f"{title('model', model)}: by {level}" for model, level in zip(data["model"], data["level"], strict=True)]
    return data.assign(panel=panels)


@figure(
    "fidelity_spread", "fidelity", minutes=6, data=spread_data, draws_published=True,
    key="Cumulative distribution. Dashed: the paper's mean of that method; dotted: its least. Axes do not start at 0.",
    footer=lambda frames: [
        "Cumulative distribution of the share of the target's top-k experts that the draft chooses too. Instance: one "
        "request in one layer. Dashed: the paper's mean of that method, real checkpoint; dotted: its least value. The "
        f"axis does not start at 0. {notes.fidelity_line(frames['fidelity'])}."
    ],
    about="distributions and least values of expert match over instances, layers and requests",
)  # fmt: skip
def draw_spread(data: pd.DataFrame) -> Grid:
    grid = Grid(
        data, rows="model", columns="level", height=1.9, sharex=True, sharey=True, legend=True,
        x="experts chosen alike (%)", y="values at or below (%)",
    )  # fmt: skip
    for panel, part in grid:
        for named, mine in split(part, "method"):
            method = named["method"]
            panel.step(mine["value"], mine["share"], where="post", color=COLOURS[method], label=title("method", method))
            panel.axvline(mine["mean"].iloc[0], color=COLOURS[method], lw=0.8, ls="--", label="paper, mean")
            panel.axvline(mine["least"].iloc[0], color=PAPER, lw=0.8, ls=":", label="paper, least")
    return grid


@table("fidelity_spread", "fidelity")
def spread_table(frames: Frames) -> Table:
    frame = frames["fidelity"]
    parts = [table_rows(frame, ["charged_as", "method"], partial(_spread, level)) for level in LEVELS]
    rows = pd.concat(parts)
    line = notes.fidelity_line(frame)
    what = (
        "Expert match in per cent, one value per instance (a request in a layer), layer or request. The paper has "
        f"{published.FIDELITY_REQUESTS:,} requests and states means of instances within 90 to 92 % for Qwen. "
    )
    stated = {"protocol": line}
    return Table("Spread of routing fidelity", rows, 3, [what + STANDINS_ONLY, f"{line}."], stated)


def _spread(level: str, mine: pd.DataFrame) -> dict[str, Any]:
    values, one = values_of(mine, level), mine.iloc[0]
    least = published.FIDELITY_LEAST.get(one["charged_as"], {}).get(one["method"], NAN) * 100
    return {
        "values by": level,
        "values": str(len(values)),
        "mean": values.mean(),
        "least": values.min(),
        "5 % below": values.quantile(0.05),
        "median": values.median(),
        "greatest": values.max(),
        f"{CHECKPOINT}, mean": published.FIDELITY.get(one["charged_as"], {}).get(one["method"], NAN) * 100,
        "paper, least": least,
    }
