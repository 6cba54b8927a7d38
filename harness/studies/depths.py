"""How the K of a round is chosen: the paper's offline profile, one K for all texts, `k=auto`, and an oracle.

From `depths.parquet` of harness.jobs.depths: narrow stand-ins, virtual clock.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.plotting.charts import Grid, grouped_bars
from harness.plotting.frames import Frames, blocks, table_rows
from harness.plotting.tables import Table
from harness.plotting.titles import title
from harness.studies import published
from harness.studies.registry import figure, table

CELL = ["charged_as", "sampling", "system", "budget"]
CHOICES = {
    "paper's K": "#bbbbbb",
    "profile": "#E69F00",
    "auto": "#0072B2",
    "oracle": "#009E73",
}
WHAT = (
    "TPOT over that of the best single K of the cell, found on the same texts. Profile: the best K of the data set's "
    "other inputs, as k=profiled reads it; auto: k=auto; oracle: drafts exactly what will be accepted"
)


def choices(cell: pd.DataFrame) -> dict[str, Any]:
    """Of one cell: the best single K, and the mean TPOT over data sets of it and of every choice.

    A profile needs two inputs of each data set: NaN without.
    """
    by_text = cell.pivot_table(index=["dataset", "input"], columns="depth", values="tpot_ms")
    ks = [str(k) for k in sorted(int(depth) for depth in map(str, by_text) if depth.isdigit())]
    fixed = by_text[ks]
    sums = fixed.groupby("dataset").transform("sum")
    others = (sums - fixed).idxmin(axis=1)  # the best K of the data set's other inputs
    has_others = bool((fixed.groupby("dataset").size() > 1).all())
    profiled = pd.Series([fixed.at[text, k] for text, k in others.items()], index=fixed.index)

    def mean(times: pd.Series) -> float:
        return float(times.groupby("dataset").mean().mean())

    best = min(ks, key=lambda k: mean(fixed.loc[:, k]))
    paper = str(published.DEPTH[cell["charged_as"].iloc[0]])
    return {
        "best K": best,
        "best": mean(fixed[best]),
        "paper's K": mean(fixed[paper]),
        "profile": mean(profiled) if has_others else float("nan"),
        "auto": mean(by_text["auto"]),
        "oracle": mean(by_text["oracle"]),
        "texts": len(by_text),
    }


def depths_data(frames: Frames) -> pd.DataFrame:
    """[model, sampling, system, budget, panel, cell, choice, value (TPOT over that of the best single K)]."""

    def ratios(cell: pd.DataFrame) -> pd.DataFrame:
        found = choices(cell)
        return pd.DataFrame([{"choice": name, "value": found[name] / found["best"]} for name in CHOICES])

    data = blocks(frames["depths"], CELL, ratios)
    rows = list(zip(data["model"], data["budget"], strict=True))
    panels = [f"{title('system', name)}, {one}" for name, one in zip(data["system"], data["sampling"], strict=True)]
    cells = [f"{title('model', model).split('-')[0]}\n{budget}" for model, budget in rows]
    return data.assign(panel=panels, cell=cells)


@figure(
    "device.depths", "depths", data=depths_data,
    key="Over the cell's best single K. Profile: best K of the data set's other inputs. Oracle: knows the acceptance.",
    footer=lambda frames: [f"{WHAT}. Virtual A100 40 GB, narrow stand-ins."],
    about="the paper's K, its offline profile, k=auto and an oracle, over the best single K",
)  # fmt: skip
def draw_depths(data: pd.DataFrame) -> Grid:
    grid = Grid(
        data, rows="sampling", columns="system", height=1.9, sharey=True, y="TPOT, × best single K", legend=True
    )
    for panel, part in grid:
        grouped_bars(
            panel, part, groups="cell", series="choice", value="value", value_format="{:.2f}", rotation=90,
            styles={name: (name, colour) for name, colour in CHOICES.items()},
        )  # fmt: skip
        panel.axhline(1, color="black", lw=0.6)
    return grid


@table("device.depths", "depths")
def depths_table(frames: Frames) -> Table:
    def numbers(cell: pd.DataFrame) -> dict[str, Any]:
        found = choices(cell)
        best = found["best"]
        return {
            "best K": found["best K"],
            "TPOT there (ms)": best,
            **{f"{name} (ms)": found[name] for name in CHOICES},
            **{f"× {name}": found[name] / best for name in CHOICES},
            "texts": str(found["texts"]),
        }

    rows = table_rows(frames["depths"], CELL, numbers)
    words = f"{WHAT}. Macro average over data sets. Virtual A100 40 GB, K of the paper's sweep, narrow stand-ins."
    return Table("Choosing the depth", rows, 4, [words], {"clock": "virtual"})
