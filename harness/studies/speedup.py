"""The first figure: the speed-up of Specter under the published protocol, and at equal bytes."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.plotting import frames as tidy
from harness.plotting import notes
from harness.plotting.charts import MODES, PAPER, Grid, grouped_bars
from harness.plotting.frames import MACRO, Frames, macro, names, rows_of, table_rows
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import title
from harness.studies import disagreements, published
from harness.studies.registry import figure, table
from harness.studies.rivals import MISFIT

BASELINES = ("specmoeoff", "mixtral_offloading", "lru")
POLICIES = {"published": "published residents", "same_bytes": "equal device bytes"}
KEY = "The baseline's mean TPOT over Specter's (planner as published). Dots: data sets; bars: mean of their ratios."
CELL = ("charged_as", "budget", "sampling")


def _runs(frames: Frames) -> pd.DataFrame:
    frame = frames["main"]
    return frame[frame["system"].isin(["specter", *BASELINES]) & frame["policy"].isin(POLICIES)]


def _ratios(part: pd.DataFrame) -> pd.DataFrame:
    """[baseline, dataset, speedup] of one cell: ratios of mean TPOTs, and last of each baseline their mean."""
    times = part.groupby(["system", "dataset"])["tpot_ms"].mean().unstack("system")
    blocks = []
    for baseline in (name for name in BASELINES if name in times):
        block = tidy.with_macro((times[baseline] / times["specter"]).to_frame("speedup"))
        blocks.append(block.rename_axis("dataset").reset_index().assign(baseline=baseline))
    return pd.concat(blocks)


def speedup_data(frames: Frames) -> pd.DataFrame:
    """[policy, model, budget, sampling, cell, panel, baseline, dataset, speedup (none: does not fit)].

    The data set `MACRO` has the mean of the others.
    """
    data = tidy.blocks(_runs(frames), ["policy", *CELL], _ratios)
    order = [list(POLICIES).index(policy) for policy in data["policy"]]
    rank = [BASELINES.index(baseline) for baseline in data["baseline"]]
    data = data.assign(order=order, rank=rank).sort_values(["rank", "order"], kind="stable", ignore_index=True)
    panels = [
        f"over {title('system', row.baseline)}, {POLICIES[str(row.policy)]}" for row in data.itertuples(index=False)
    ]
    cells = [f"{title('model', row.model).split('-')[0]}\n{row.budget}" for row in data.itertuples(index=False)]
    return data.drop(columns=["order", "rank"]).assign(panel=panels, cell=cells)


def overall(data: pd.DataFrame, **settings: str) -> dict[str, float]:
    """Number, mean, least and greatest of the cells' speed-ups with these settings, and the greatest of a data set."""
    mine = rows_of(data, **settings).dropna(subset="speedup")
    cells = rows_of(mine, dataset=MACRO)["speedup"]
    return {
        "cells": len(cells),
        "mean": cells.mean(),
        "least": cells.min(),
        "greatest": cells.max(),
        "greatest of a data set": mine["speedup"].max(),
    }


def finding(frames: Frames) -> str:
    """What the figure shows, in numbers."""
    data = speedup_data(frames)
    paper = overall(data, policy="published", baseline="specmoeoff", sampling="greedy")
    sampled = overall(data, policy="published", baseline="specmoeoff", sampling="seeded")
    equal = rows_of(data, policy="same_bytes", baseline="lru", dataset=MACRO).dropna(subset="speedup")
    return (
        f"With the published residents, greedy, Specter is {paper['mean']:.2f} times as fast as SpecMoEOff (mean of "
        f"{paper['cells']} cells, {paper['least']:.2f} to {paper['greatest']:.2f}; paper: "
        f"{published.SPEEDUP_MEAN:.2f}, at most {published.SPEEDUP_MAX:.2f}), and {sampled['mean']:.2f} times on "
        "sampled text; at equal device bytes LRU is faster than "
        f"Specter in {int((equal['speedup'] < 1).sum())} of {len(equal)} cells of model, tier and sampling."
    )


def speedup_footer(frames: Frames) -> list[str]:
    frame = _runs(frames)
    words = f"{disagreements.SPEEDUP} {disagreements.LRU}"
    return [words, *notes.run_notes(frame, KEY), *notes.residents(frame)]


@figure(
    "speedup", "main", minutes=9, data=speedup_data, footer=speedup_footer, leads=True, draws_published=True,
    key=KEY, shown=_runs, finding=finding,
    about="Specter over SpecMoEOff, Mixtral-Offloading and LRU, three models, published residents and equal bytes",
)  # fmt: skip
def draw_speedup(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="baseline", columns="policy", height=1.6, sharey="row", y="speed-up (×)", legend=True)
    samplings = {name: (name, MODES[name]) for name in names(data, "sampling")}
    for panel, part in grid:
        bars, points = part[part["dataset"] == MACRO], part[part["dataset"] != MACRO]
        highest = part.groupby(["cell", "sampling"])["speedup"].max().rename("highest").reset_index()
        centres = grouped_bars(
            panel, bars.merge(highest), groups="cell", series="sampling", value="speedup", styles=samplings,
            value_format="{:.2f}", above="highest",
        )  # fmt: skip
        for cell, sampling in bars.loc[bars["speedup"].isna(), ["cell", "sampling"]].to_numpy().tolist():
            panel.text(centres[cell, sampling], 0.02, MISFIT, rotation=90, fontsize=5.5, ha="center", va="bottom")
        at = [centres[pair] for pair in zip(points["cell"], points["sampling"], strict=True)]
        panel.plot(at, points["speedup"], "o", ms=2.2, mfc="white", mec=PAPER, mew=0.5, label="data set")
        panel.axhline(1, color="black", lw=0.8)
        if len(part) and (part["baseline"].iloc[0], part["policy"].iloc[0]) == ("specmoeoff", "published"):
            panel.axhline(published.SPEEDUP_MEAN, color=PAPER, lw=0.9, ls="--", label="paper: mean")
            panel.axhline(published.SPEEDUP_MAX, color=PAPER, lw=0.9, ls=":", label="paper: greatest")
    return grid


@table("speedup", "main")
def speedup_table(frames: Frames) -> Table:
    data = speedup_data(frames)

    def numbers(mine: pd.DataFrame) -> dict[str, Any]:
        one = mine.iloc[0]
        numbers = overall(mine)
        is_papers = (one["baseline"], one["policy"], one["sampling"]) == ("specmoeoff", "published", "greedy")
        paper = (published.SPEEDUP_MEAN, published.SPEEDUP_MAX) if is_papers else (float("nan"),) * 2
        return {
            "policy": POLICIES[one["policy"]],
            "baseline": title("system", one["baseline"]),
            **numbers,
            "cells": str(numbers["cells"]),
            "paper, mean": paper[0],
            "paper, greatest": paper[1],
        }

    rows = table_rows(data, ["policy", "baseline", "sampling"], numbers)
    words = (
        "Speed-up: the baseline's mean TPOT over Specter's on one data set. A cell, of one model and tier, is the mean "
        f"of its data sets' ratios; mean, least, greatest: of cells. {finding(frames)}"
    )
    frame = _runs(frames)
    made = run_table("Speed-up of Specter", rows, 3, words, frame)
    return Table(made.title, made.frame, made.keys, [*made.notes, *notes.residents(frame)], made.stated)


@table(
    "absolute", "main", minutes=9,
    about="Specter's TPOT in ms beside that of the paper's first version",
)  # fmt: skip
def absolute_table(frames: Frames) -> Table:
    frame = rows_of(frames["main"], system="specter", policy="published")

    def numbers(mine: pd.DataFrame) -> dict[str, Any]:
        one = mine.iloc[0]
        given = published.TPOT_V1.get(one["charged_as"], {}).get(one["budget"], float("nan"))
        times = {name: macro(rows_of(mine, sampling=name), "tpot_ms") for name in names(mine, "sampling")}
        return {
            "experts per layer": f"{one['experts_per_layer']:g}",
            "K": str(one["k"]),
            **{f"{name} (ms)": value for name, value in times.items()},
            "paper, v1 (ms)": given,
            **{f"{name} / paper": value / given for name, value in times.items()},
        }

    words = (
        "Specter, planner as published: mean TPOT over data sets. Paper, v1: MoE-SpeQ (arXiv 2511.14102v1), real "
        "checkpoints on an A100 40 GB with PCIe 4.0; –: not in its text, and later versions give none. "
        f"{disagreements.ABSOLUTE}"
    )
    return run_table("Time per output token beside the paper's", table_rows(frame, CELL[:2], numbers), 2, words, frame)
