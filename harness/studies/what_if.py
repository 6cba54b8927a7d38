"""Where each system wins, as link, budget and text vary, with 16-bit experts and with residual ones."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap

from harness.plotting import notes
from harness.plotting.charts import Grid
from harness.plotting.frames import Frames, Row, blocks, macro, names, rows_of, sampling_title, table_rows
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import colour, title
from harness.studies.registry import figure, table

CELL = ["sampling", "hardware", "budget"]
SIDES = {"16-bit experts": False, "residual, too": True}  # whether systems on residual experts take part


def what_if_data(frames: Frames) -> pd.DataFrame:
    """[sampling, side, panel, hardware, budget, system, tpot_ms, lead]: the fastest system of each cell, and the
    second's time over its own; means over data sets. `side`: which systems take part."""
    frame = frames["what_if"]
    acceptance = {kind: macro(rows_of(frame, sampling=kind, speculative=True), "acceptance")
                  for kind in names(frame, "sampling")}  # fmt: skip
    rows = []
    for side, with_residual in SIDES.items():
        part = frame if with_residual else rows_of(frame, codec="bf16")
        times = blocks(part, [*CELL, "system"], lambda mine: pd.DataFrame([{"tpot_ms": macro(mine, "tpot_ms")}]))
        for _, mine in times.groupby(CELL, sort=False):
            first, *rest = mine.sort_values("tpot_ms").to_dict("records")
            kind = str(first["sampling"])
            panel = f"{side}, {sampling_title(frame, kind)}\n{100 * acceptance[kind]:.1f} % accepted"
            rows.append({**first, "side": side, "panel": panel, "lead": rest[0]["tpot_ms"] / first["tpot_ms"]})
    return pd.DataFrame(rows)


def finding(frames: Frames) -> str:
    """What the figure shows, in numbers."""
    data = what_if_data(frames)
    parts = []
    for side in SIDES:
        won = rows_of(data, side=side)["system"].value_counts()
        wins = ", ".join(f"{title('system', str(name))} in {count}" for name, count in won.items())
        parts.append(f"with {side}: {wins} of {won.sum()} cells")
    return f"The fastest system by link, budget and text, {'; '.join(parts)}."


@figure(
    "what_if", "what_if", one_model=True, minutes=2, data=what_if_data, finding=finding,
    key="Colour and name: the fastest system at equal device bytes; its ms per token (the second's time over its own).",
    footer=lambda frames: [
        f"{finding(frames)} The error of these charges on a measured machine is that of the profile before, in the "
        "table device.validation.",
        *notes.run_notes(frames["what_if"], "Mean over data sets.", with_k=True),
    ],
    about="the fastest system by link, budget and text, with and without residual experts",
)  # fmt: skip
def draw_what_if(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="sampling", columns="side", height=2.1, sharex=True, sharey=True, x="budget")
    machines, budgets = names(data, "hardware"), names(data, "budget")
    for panel, part in grid:
        times = {system: np.full((len(machines), len(budgets)), np.nan) for system in names(part, "system")}
        for cell in part.itertuples(index=False):
            x, y = budgets.index(str(cell.budget)), machines.index(str(cell.hardware))
            times[str(cell.system)][y, x] = cell.tpot_ms
            words = f"{title('system', str(cell.system))}\n{cell.tpot_ms:.1f} ms ({cell.lead:.2f}×)"
            panel.text(x, y, words, ha="center", va="center", fontsize=6.4)
        for system, mine in times.items():
            shade = ListedColormap([colour(system)])
            panel.pcolormesh(mine, shading="nearest", cmap=shade, alpha=0.35, edgecolors="white", lw=2)
        panel.set_xticks(range(len(budgets)), budgets)
        panel.set_yticks(range(len(machines)), [title("hardware", name) for name in machines], fontsize=6.6)
        panel.set_xlim(-0.5, len(budgets) - 0.5)
        panel.set_ylim(len(machines) - 0.5, -0.5)
        panel.tick_params(length=0)
        panel.grid(visible=False)
    return grid


@table("what_if", "what_if", model_by_model=True)
def what_if_table(frames: Frames) -> Table:
    frame = frames["what_if"]

    def numbers(mine: pd.DataFrame) -> Row:
        cell = {key: mine.iloc[0][key] for key in CELL}
        best = min(macro(rows_of(frame, system=name, **cell), "tpot_ms") for name in names(frame, "system"))
        mean = macro(mine, "tpot_ms")
        return {"TPOT (ms)": mean, "× the fastest": mean / best, "acceptance (%)": macro(mine, "acceptance") * 100}

    rows = table_rows(frame, [*CELL, "system"], numbers)
    return run_table("What if: link, budget and text", rows, 4, "Means over data sets, equal device bytes.", frame)
