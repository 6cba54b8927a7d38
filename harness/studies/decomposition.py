"""Where the speed-up over each baseline comes from, one thing switched at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import Grid
from harness.plotting.frames import Frames, dataset_title, macro, rows_of, summary, table_rows
from harness.plotting.tables import Table
from harness.plotting.titles import in_order, title
from harness.studies import published
from harness.studies.registry import figure, table
from harness.studies.rivals import MISFIT

SAMPLING = "greedy"  # the paper's
PARTS = {
    "tokens": ("more tokens per round", "#0072B2"),
    "draft": ("cheaper draft (time, memory)", "#CC79A7"),
    "misses": ("fewer misses (link time)", "#D55E00"),
    "hidden": ("hidden transfers", "#009E73"),
    "launches": ("fewer launches", "#999999"),
}  # of a speed-up
WHAT = (
    "Parts in ms per token, negative where they cost; they add up to the difference. From the rival to ours: its "
    "policy at our K (tokens); our draft, in time and memory; our planner and eviction, as link time (misses) and as "
    "what covers it (hidden); launches, kernels and syncs of both, charged and not charged (launches). The order of "
    "switching matters: what one step leaves, the next cannot gain."
)


def explained(runs: pd.DataFrame, parts: pd.DataFrame) -> pd.DataFrame:
    """The runs of the texts that the parts explain: not all data sets and inputs are decomposed."""
    of = runs.merge(parts[["dataset", "input"]].drop_duplicates(), on=["dataset", "input"])
    return rows_of(of, sampling=SAMPLING)


def _selected(frames: Frames) -> tuple[pd.DataFrame, str]:
    """The parts on the first machine under the first memory policy, and that policy."""
    runs, parts = frames["main"], frames["decomposition"]
    policy = in_order("policy", runs["policy"])[0]
    return rows_of(parts, hardware=runs["hardware"].iloc[0], policy=policy), policy


def decomposition_data(frames: Frames) -> pd.DataFrame:
    """[budget, hero, panel, rival, part, ms]: milliseconds per token saved, means over texts; `hero` is our system.

    A rival that does not fit has a row without part and ms.
    """
    parts = _selected(frames)[0]
    data = summary(
        parts.fillna({"part": ""}), ["budget", "hero", "rival", "part"], lambda mine: {"ms": mine["ms"].mean()}
    )
    return data.assign(panel=data["hero"].map(partial(title, "system")) + ", " + data["budget"])


def decomposition_footer(frames: Frames) -> list[str]:
    parts, policy = _selected(frames)
    runs = rows_of(explained(frames["main"], parts), policy=policy)
    what = "What each rival's TPOT loses on the way to ours, one thing switched at a time; below zero: what that costs"
    return [f"{what}. {notes.provenance(runs)}.", *notes.caveats(runs)]


@figure(
    "decomposition", "main", "decomposition", one_model=True, minutes=4, data=decomposition_data,
    key="What each rival's TPOT loses on the way to ours, one thing switched at a time; below zero: what that costs.",
    shown=lambda frames: explained(frames["main"], _selected(frames)[0]),
    footer=decomposition_footer, about="where the speed-up over each rival comes from, one thing switched at a time",
)  # fmt: skip
def draw_decomposition(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="budget", columns="hero", height=2.3, sharey=True, y="saved (ms per token)",
                legend=True)  # fmt: skip
    rivals = in_order("system", data["rival"])
    for panel, part in grid:
        values = part.pivot(index="rival", columns="part", values="ms").reindex(rivals, columns=list(PARTS))
        x = np.arange(len(values))
        above, below = np.zeros(len(values)), np.zeros(len(values))
        for name, (label, colour) in PARTS.items():
            heights = values[name].fillna(0).to_numpy()
            panel.bar(x, heights, 0.7, bottom=np.where(heights > 0, above, below), color=colour, label=label)
            above, below = above + heights.clip(min=0), below + heights.clip(max=0)
        panel.plot(x, values.sum(axis=1, min_count=1), "D", color="black", ms=4, label="all together")
        for at in x[values.isna().all(axis=1)]:
            panel.text(at, 2, MISFIT, rotation=90, fontsize=5.5, ha="center", va="bottom")
        panel.axhline(0, color="black", lw=0.8)
        names = [title("system", name).replace(", ", "\n").replace("-Off", "-\nOff") for name in values.index]
        panel.set_xticks(x, names, fontsize=5.8)
    return grid


def _numbers(group: pd.DataFrame) -> dict[str, Any]:
    """Mean times and parts of a pair of systems; a rival that does not fit has no numbers."""
    if group["part"].isna().all():
        return {"K": MISFIT}
    rival, ours = macro(group, "rival_ms"), macro(group, "hero_ms")
    depths = f"{group['rival_k'].iloc[0] or '–'} : {group['hero_k'].iloc[0]}"
    return {
        "K": depths,
        "rival (ms)": rival,
        "ours (ms)": ours,
        "ratio": rival / ours,
        **{label: rows_of(group, part=part)["ms"].mean() for part, (label, _) in PARTS.items()},
    }


def _is_within(ratio: float) -> str:
    """Whether a ratio is between 1 and the paper's greatest; NaN of a rival that does not fit is not said to be."""
    return "–" if ratio != ratio else "yes" if 1 <= ratio <= published.SPEEDUP_MAX else "no"


@table("decomposition", "main", "decomposition", model_by_model=True)
def decomposition_table(frames: Frames) -> Table:
    runs = frames["main"]
    parts, policy = _selected(frames)
    rows = table_rows(parts, ["budget", "hero", "rival"], _numbers)
    of = notes.provenance(explained(runs, parts))
    words = [WHAT, f"Memory: {title('policy', policy)}. {of}."]
    return Table("Where the speed-up comes from", rows, 4, words, notes.stated(runs))


@table(
    "published_ratio", "main", "decomposition", model_by_model=True, minutes=4,
    about="K = 3 against K = 16 by policy, tier and link, beside the published 1.50 / 1.88",
)  # fmt: skip
def published_ratio_table(frames: Frames) -> Table:
    runs, parts = frames["main"], frames["decomposition"]
    parts = rows_of(parts, rival="specmoeoff")
    rows = table_rows(parts, ["hero", "hardware", "budget", "policy"], _numbers)
    rows = rows.sort_values(["hero", "hardware"], kind="stable", ignore_index=True)
    after = rows.columns.tolist().index("ratio") + 1
    rows.insert(after, "published, mean", published.SPEEDUP_MEAN)
    rows.insert(after + 1, "published, most", published.SPEEDUP_MAX)
    rows.insert(after + 2, "within", [_is_within(ratio) for ratio in rows["ratio"]])
    names = ", ".join(dataset_title(name) for name in parts["dataset"].unique())
    words = [
        "SpecMoEOff as published against ours: TPOT ratio. The published ratios are over its models and data sets; "
        f"within: from 1 to {published.SPEEDUP_MAX}. Where a ratio is not, the parts say why.",
        WHAT,
        f"{notes.checkpoint_line(runs)}, {SAMPLING}, one input of each of: {names}; virtual clock.",
        *notes.residents(rows_of(runs, system="specmoeoff")),
        notes.TRAINED,
    ]
    heading = "SpecMoEOff (K = 3) against Specter (the paper's K)"
    return Table(heading, rows, 5, words, notes.stated(runs) | {"hardware": "see rows"})
