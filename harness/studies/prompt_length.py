"""TTFT, TPOT and end-to-end time against the length of the prompt."""

from __future__ import annotations

import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import Grid
from harness.plotting.frames import Frames, each, macro, rows_of, spread_budgets, tiers
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import styles, title
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
    frame = spread_budgets(frames["prompt_length"])
    blocks = []
    for budget in tiers(frame)[1]:
        for column, heading in QUANTITIES.items():
            for system, mine in each(rows_of(frame, budget=budget), "system"):
                means = mine.groupby("prompt_tokens")[["num_prompt_tokens", column]].mean()
                block = means.rename(columns={column: "value"}).sort_values("num_prompt_tokens")
                named = {"budget": budget, "quantity": column, "panel": f"{heading}, {budget}", "system": system}
                blocks.append(block.assign(**named))
    return pd.concat(blocks, ignore_index=True)


@figure(
    "prompt_length", "prompt_length", one_model=True, minutes=2, data=prompt_length_data,
    footer=lambda frames: notes.run_notes(spread_budgets(frames["prompt_length"]), "Mean over data sets."),
    about="TTFT, TPOT and end to end for prompts of 16, 64 and all tokens",
)  # fmt: skip
def draw_prompt_length(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="budget", columns="quantity", height=1.8, margin=0.3)
    shown = styles(data["system"])
    for panel, part in grid:
        for system, mine in part.groupby("system", sort=False):
            label, colour = shown[str(system)]
            panel.plot(mine["num_prompt_tokens"], mine["value"], "o-", ms=3, color=colour, label=label)
        panel.set_ylim(bottom=0)
    grid.label(x="prompt tokens (mean)")
    grid.legend(5)
    return grid


@table("prompt_length", "prompt_length", model_by_model=True)
def prompt_length_table(frames: Frames) -> Table:
    frame = spread_budgets(frames["prompt_length"])
    rows = []
    for budget in tiers(frame)[1]:
        for length in sorted(frame["prompt_tokens"].unique(), key=lambda tokens: tokens or float("inf")):
            shown = f"first {length}" if length else "whole"
            for system, mine in each(rows_of(frame, budget=budget, prompt_tokens=length), "system"):
                named = {"budget": budget, "prompt": shown, "system": title("system", system)}
                rows.append(named | {heading: macro(mine, column) for column, heading in COLUMNS.items()})
    return run_table("Prompt length", pd.DataFrame(rows), 3, "Macro average over data sets.", frame)
