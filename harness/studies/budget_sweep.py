"""TPOT and hit rate against the budget, from two slots to every expert on the device."""

from __future__ import annotations

import numpy as np
import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import Grid, log2_axis
from harness.plotting.frames import Frames, depths, each, macro_by, rows_of, spread_budgets, systems
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import colour, in_order, short_title, title
from harness.studies.registry import figure, table

QUANTITIES = {"tpot_ms": "TPOT (ms per token)", "hit_rate": "hit rate (%)"}
FLOORS_SHOWN = ("specter", "lru")


def _experts_per_layer(frame: pd.DataFrame) -> pd.Series:
    """What each budget buys Specter."""
    per_layer: pd.Series = rows_of(frame, system="specter").groupby("budget")["experts_per_layer"].first()
    return per_layer


def budget_sweep_data(frames: Frames) -> pd.DataFrame:
    """[quantity, system, experts_per_layer, value, floor_trace_ms]: means over data sets; hit rates in per cent.

    A system that ignores the budget has one row, without experts_per_layer.
    """
    frame = frames["budget_sweep"]
    frame = frame.assign(per_layer=frame["budget"].map(_experts_per_layer(frame)).where(frame["uses_budget"]))
    blocks = []
    for system, mine in each(frame, "system"):
        by = mine.groupby("per_layer", dropna=False)
        means = by[["tpot_ms", "hit_rate", "floor_trace_ms"]].mean().rename_axis("experts_per_layer").reset_index()
        tpot = means[["experts_per_layer", "floor_trace_ms"]].assign(quantity="tpot_ms", value=means["tpot_ms"])
        if system not in FLOORS_SHOWN:
            tpot["floor_trace_ms"] = np.nan
        blocks.append(tpot.assign(system=system))
        if system != "on_demand" and means["experts_per_layer"].notna().all():
            hits = means[["experts_per_layer"]].assign(quantity="hit_rate", value=means["hit_rate"] * 100)
            blocks.append(hits.assign(system=system))
    return pd.concat(blocks, ignore_index=True)


@figure(
    "budget_sweep", "budget_sweep", one_model=True, minutes=2, data=budget_sweep_data,
    footer=lambda frames: notes.run_notes(frames["budget_sweep"], "Mean over data sets.", with_k=True),
    about="TPOT and hit rate from two slots to all experts",
)  # fmt: skip
def draw_budget_sweep(data: pd.DataFrame) -> Grid:
    grid = Grid(data, columns="quantity", height=2.3)
    ticks = sorted(data["experts_per_layer"].dropna().unique())
    for panel, part in grid:
        for system, mine in part.groupby("system", sort=False):
            name, shade = title("system", system), colour(str(system))
            if mine["experts_per_layer"].isna().all():
                panel.axhline(mine["value"].iloc[0], color=shade, lw=1, label=name)
                continue
            panel.plot(mine["experts_per_layer"], mine["value"], "o-", color=shade, label=name, ms=3)
            if mine["floor_trace_ms"].notna().any():
                label = f"floor_trace of {name}"
                panel.plot(mine["experts_per_layer"], mine["floor_trace_ms"], "--", color=shade, lw=0.9, label=label)
        panel.set_ylabel(QUANTITIES[part["quantity"].iloc[0]])
        panel.set_ylim(bottom=0)
        log2_axis(panel, ticks, ["2 slots" if tick < 1 else "" if tick == 48 else f"{tick:g}" for tick in ticks])
        panel.set_xlabel("budget (BF16 experts per MoE layer)")
    grid.legend(3)
    return grid


def sweep_table(frame: pd.DataFrame, group: str, key: str, heading: str) -> Table:
    """TPOT of every system along one axis, macro averages; a row for each value of `key` and budget.

    Args:
        group: of the titles of `key`; without titles, values are sorted as numbers.
    """
    floors = rows_of(frame, system="specter").groupby([key, "budget"])["floor_trace_ms"].mean()
    rows = macro_by(frame, [key, "budget", "system"], "tpot_ms").unstack()[systems(frame)]
    rows.columns = [f"{short_title(name)} (ms)" for name in rows.columns]
    rows["floor_trace of Specter (ms)"] = floors
    rows["× LRU"] = rows["LRU (ms)"] / rows["Specter (ms)"]
    rows = rows.reset_index().sort_values([key, "budget"])
    if group:
        order = in_order(group, rows[key])
        rows = rows.sort_values(key, key=lambda column: column.map(order.index), kind="stable")
        rows[key] = [title(group, value) for value in rows[key]]
    return run_table(heading, rows, 2, f"Mean TPOT over data sets; K = {depths(frame)}.", frame)


@table("budget_sweep", "budget_sweep", model_by_model=True)
def budget_sweep_table(frames: Frames) -> Table:
    frame = spread_budgets(frames["budget_sweep"])
    frame["experts per layer"] = frame["budget"].map(_experts_per_layer(frame))
    found = sweep_table(frame, "", "experts per layer", "Cache budget")
    formatted = [f"{float(value):.3g}" for value in found.frame["experts per layer"]]
    rows = found.frame.assign(**{"experts per layer": formatted}).drop(columns="budget")
    return Table(found.title, rows, 1, found.notes, found.stated)
