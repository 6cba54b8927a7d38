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
from harness.studies import published
from harness.studies.registry import figure, table

NAN = float("nan")
SYSTEMS = ("specter", "specter_deadline")
TEXT = ["dataset", "input", "temperature"]
CAUTION = (
    "Few texts; the budget is artificial where a model fits the card whole; the paper does not compare with LRU. A "
    "star: the paper's acceptance and union, real checkpoint, whose ratio is unknown. The result follows acceptance "
    "and text: it says nothing about the real checkpoints."
)


def map_data(frames: Frames) -> pd.DataFrame:
    """[model, panel, system, tier, acceptance, growth, hit_rate, ratio]: a row per text; growth: of the union, K = 1 to
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
    rows = [f"{title('system', system)}, {tier}" for system, tier in zip(data["system"], data["tier"], strict=True)]
    panels = [f"{title('model', model)}\n{row}, over LRU" for model, row in zip(data["model"], rows, strict=True)]
    return data.assign(row=rows, panel=panels)


@figure(
    "device.lru_map", "temperatures", data=map_data,
    footer=lambda frames: [
        "TPOT over that of LRU with the draft's bytes as slots (equal device bytes), virtual A100 40 GB; a point is a "
        f"text at a temperature (greedy and 0.3 to 1); blue: LRU is faster. {CAUTION}"
    ],
    draws_published=True, about="TPOT of both Specters over LRU's at equal bytes, by acceptance and union",
)  # fmt: skip
def draw_map(data: pd.DataFrame) -> Grid:
    labels = ("union, K = 1 to 16 (×)", "acceptance (%)")
    grid = Grid(data, rows="row", columns="model", height=1.9, title_size=6.5, x=labels[0], y=labels[1])
    for panel, part in grid:
        texts, paper = part[part["ratio"].notna()], part[part["ratio"].isna()]
        colours = np.where(texts["ratio"] > 1, "#0072B2", "#D55E00").tolist()
        panel.scatter(texts["growth"], texts["acceptance"], c=colours, s=12 * texts["ratio"] ** 2)
        for _, one in texts.iterrows():
            panel.annotate(f"{one['ratio']:.2f}", (one["growth"], one["acceptance"]), fontsize=4)
        panel.plot(paper["growth"], paper["acceptance"], "*", color=PAPER, ms=9)
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
    return {
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
        f"the sampling nearest to the paper's text. Virtual clock, narrow stand-ins, GPTQ drafts. {CAUTION}"
    )
    return Table("Texts by temperature, and their distance from the paper's", rows, 2, [what], {"clock": "virtual"})
