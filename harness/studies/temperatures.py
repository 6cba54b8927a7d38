"""Texts by temperature: how near the paper's they are, and what LRU at equal bytes is against both Specters on them.

From `temperatures.parquet` of harness.jobs.temperatures: narrow stand-ins, virtual clock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.plotting.charts import PAPER, Grid
from harness.plotting.frames import Frames, blocks, rows_of, table_rows
from harness.plotting.tables import Table
from harness.plotting.titles import title
from harness.scales import load
from harness.studies import published
from harness.studies.registry import figure, table
from specter.config import ModelConfig

NAN = float("nan")
SYSTEMS = ("specter", "specter_deadline")
RATIOS, MOST = (0.5, 0.7, 1, 1.5, 2), 2.5  # ticks and the end of the scale of colours
TEXT = ["dataset", "input", "temperature"]
CAUTION = (
    "Few texts; the budget is artificial where a model fits the card whole; the paper does not compare with LRU. A "
    "star: the paper's acceptance and union, real checkpoint, whose ratio is unknown. The result follows acceptance "
    "and text: it says nothing about the real checkpoints."
)


def map_data(frames: Frames) -> pd.DataFrame:
    """[model, row, system, tier, acceptance, growth, hit_rate, ratio]: a row per text; growth: of the union, K = 1 to
    16; hit_rate: LRU's at the high tier's slots; ratio: TPOT of `system` over LRU's; NaN for the paper's point."""

    def cells(mine: pd.DataFrame) -> pd.DataFrame:
        keyed = mine.set_index(TEXT)
        model = mine["charged_as"].iloc[0]
        of = {name: rows_of(keyed, quantity=name)["value"] for name in ("acceptance", "distinct_4grams")}
        union = rows_of(keyed, quantity="union")
        growth = rows_of(union, k=16)["value"] / rows_of(union, k=1)["value"]
        tpot = rows_of(keyed, quantity="tpot_ms")
        parts = []
        for tier in ("high", "low"):
            lru = rows_of(tpot, tier=tier, system="lru")["value"]
            for system in SYSTEMS:
                ratio = rows_of(tpot, tier=tier, system=system)["value"] / lru
                block = pd.DataFrame({"acceptance": of["acceptance"] * 100, "growth": growth, "ratio": ratio})
                paper = published.ACCEPTANCE.get(model, published.ACCEPTANCE_MEAN) * 100
                star = pd.DataFrame({"acceptance": [paper], "growth": published.UNION_GROWTH[model], "ratio": NAN})
                parts.append(pd.concat([block.reset_index(), star]).assign(system=system, tier=tier))
        return pd.concat(parts)

    data = blocks(frames["temperatures"], ["charged_as"], cells)
    rows = [f"{title('system', system)},\n{tier}" for system, tier in zip(data["system"], data["tier"], strict=True)]
    return data.assign(row=rows)


@figure(
    "device.lru_map", "temperatures", data=map_data,
    shown=lambda frames: frames["temperatures"].drop(columns="temperature"),
    key="A point is a text at a temperature (greedy and 0.3 to 1), at equal device bytes. Star: the "
    "paper's text, whose ratio is unknown.",
    footer=lambda frames: [
        "TPOT over that of LRU with the draft's bytes as slots (equal device bytes), virtual A100 40 GB; a point is a "
        f"text at a temperature (greedy and 0.3 to 1); blue: LRU is faster. {CAUTION}"
    ],
    draws_published=True, about="TPOT of both Specters over LRU's at equal bytes, by acceptance and union",
)  # fmt: skip
def draw_map(data: pd.DataFrame) -> Grid:
    from matplotlib.colors import LogNorm

    labels = ("union, K = 1 to 16 (×)", "acceptance (%)")
    grid = Grid(data, rows="row", columns="model", height=1.5, sharex="col", sharey=True, x=labels[0])
    colours: dict[str, Any] = {
        "cmap": "RdBu",
        "norm": LogNorm(1 / MOST, MOST),
        "edgecolors": "#555555",
        "linewidths": 0.3,
    }
    for panel, part in grid:
        texts, paper = part[part["ratio"].notna()], part[part["ratio"].isna()]
        drawn = panel.scatter(texts["growth"], texts["acceptance"], c=texts["ratio"], s=16, **colours)
        panel.plot(paper["growth"], paper["acceptance"], "*", color=PAPER, ms=8)
    for row, name in zip(grid.axes, grid.row_values, strict=True):
        row[0].set_ylabel(f"{name}\n{labels[1]}", fontsize=7)
    for panel, model in zip(grid.axes[0], grid.column_values, strict=True):
        panel.set_title(title("model", model))
    panels = [panel for row in grid.axes for panel in row]
    bar = grid.figure.colorbar(drawn, ax=panels, location="top", aspect=60, extend="max", pad=0.02)
    bar.set_label("TPOT over LRU's (red: faster than LRU, blue: slower)", fontsize=7)
    bar.set_ticks(RATIOS, labels=[f"{ratio:g}" for ratio in RATIOS])
    bar.ax.minorticks_off()
    return grid


def deviations(mine: pd.DataFrame) -> dict[str, Any]:
    """Of one model and temperature: means over texts, and relative deviations from the paper's values, in per cent."""
    model = mine["charged_as"].iloc[0]
    means = mine.groupby(["quantity", "k"])["value"].mean()
    alpha, growth = means["acceptance", 0], means["union", 16] / means["union", 1]
    paper = published.ACCEPTANCE.get(model, published.ACCEPTANCE_MEAN)
    off = [abs(alpha / paper - 1) * 100, abs(growth / published.UNION_GROWTH[model] - 1) * 100]
    rates = published.HIT_RATE_LRU.get(model, {})
    hits = [abs(means["hit_rate", slots] / rate - 1) * 100 for slots, rate in rates.items()]
    hit = float(np.mean(hits)) if hits else NAN
    chosen = load(ModelConfig, "model", mine["model"].iloc[0]).paper_like_temperature
    return {
        "is": "paper_like" if mine["temperature"].iloc[0] == chosen else "",
        "acceptance (%)": alpha * 100,
        "union (×)": growth,
        "distinct 4-grams": means["distinct_4grams", 0],
        "off: acceptance (%)": off[0],
        "off: union (%)": off[1],
        "off: LRU hits (%)": hit,
        "off: sum": float(np.nansum([*off, hit])),
        "texts": str(len(mine[["dataset", "input"]].drop_duplicates())),
    }


@table("device.temperatures", "temperatures", about="texts by temperature, and how far they are from the paper's")
def temperatures_table(frames: Frames) -> Table:
    frame = frames["temperatures"].assign(T=frames["temperatures"]["temperature"].map("{:g}".format))
    rows = table_rows(frame, ["charged_as", "T"], deviations)
    what = (
        "T = 0: greedy. Off: relative deviation of the mean over texts from the paper's value (real checkpoint); LRU "
        "hits: mean deviation at 6, 16 and 32 slots per layer, published for DeepSeek-V2-Lite only. The least sum is "
        "the sampling nearest to the paper's text; paper_like: what sampling=paper_like takes, the nearest sampled. "
        f"Virtual clock, narrow stand-ins, GPTQ drafts. {CAUTION}"
    )
    return Table("Texts by temperature, and their distance from the paper's", rows, 3, [what], {"clock": "virtual"})
