"""TTFT, TPOT and end-to-end time against the length of the prompt."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import Grid
from harness.plotting.frames import Frames, blocks, macro, split, spread_budgets, table_rows
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import styles
from harness.studies.registry import figure, table

QUANTITIES = {"ttft_ms": "TTFT (ms)", "tpot_ms": "TPOT (ms per token)", "end_to_end_ms": "end to end (ms)"}
COLUMNS = {
    "num_prompt_tokens": "prompt tokens, mean",
    "ttft_ms": "TTFT (ms)",
    "tpot_ms": "TPOT (ms)",
    "tpot_after_first_round_ms": "after 1st round (ms)",
    "end_to_end_ms": "end to end (ms)",
}


def prompt_length_data(frames: Frames) -> pd.DataFrame:
    """[budget, quantity, panel, system, num_prompt_tokens, value]: means of all runs."""

    def means(mine: pd.DataFrame) -> pd.DataFrame:
        by_length = mine.groupby("prompt_tokens")[["num_prompt_tokens", *QUANTITIES]].mean()
        return by_length.sort_values("num_prompt_tokens").melt("num_prompt_tokens", list(QUANTITIES), "quantity")

    data = blocks(spread_budgets(frames["prompt_length"]), ["budget", "system"], means)
    return data.assign(panel=data["quantity"].map(QUANTITIES) + ", " + data["budget"])


@figure(
    "prompt_length", "prompt_length", one_model=True, minutes=2, data=prompt_length_data,
    key="Mean over data sets, at equal device bytes.",
    footer=lambda frames: notes.run_notes(spread_budgets(frames["prompt_length"]), "Mean over data sets."),
    about="TTFT, TPOT and end to end for prompts of 16, 64 and all tokens",
)  # fmt: skip
def draw_prompt_length(data: pd.DataFrame) -> Grid:
    grid = Grid(
        data,
        rows="budget",
        columns="quantity",
        height=1.8,
        sharex=True,
        sharey="col",
        x="prompt tokens (mean)",
        legend=True,
    )
    shown = styles(data["system"])
    for panel, part in grid:
        for named, mine in split(part, "system"):
            label, colour = shown[named["system"]]
            panel.plot(mine["num_prompt_tokens"], mine["value"], "o-", ms=3, color=colour, label=label)
    for panel in grid.axes[0]:
        panel.set_ylim(bottom=0)
    return grid


def _times(mine: pd.DataFrame) -> dict[str, Any]:
    length = mine["prompt_tokens"].iloc[0]
    shown = {"prompt": f"first {length}" if length else "whole"}
    return shown | {heading: macro(mine, column) for column, heading in COLUMNS.items()}


@table("prompt_length", "prompt_length", model_by_model=True)
def prompt_length_table(frames: Frames) -> Table:
    frame = spread_budgets(frames["prompt_length"])
    rows = table_rows(frame, ["budget", "prompt_tokens", "system"], _times)
    return run_table("Prompt length", rows, 3, "Macro average over data sets.", frame)
