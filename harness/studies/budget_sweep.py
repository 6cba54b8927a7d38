"""TPOT and hit rate against the budget, from two slots to every expert on the device."""

from __future__ import annotations

import numpy as np
import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import Grid, log2_axis
from harness.plotting.frames import Frames, blocks, depths, names, rows_of, split, spread_budgets
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import colour, short_title, title
from harness.studies.registry import figure, table

QUANTITIES = {"tpot_ms": "TPOT (ms per token)", "hit_rate": "hit rate (%)"}
FLOORS_SHOWN = ("specter", "lru")


def _per_layer(frame: pd.DataFrame) -> pd.Series:
    """What the budget of each row buys Specter: experts per layer."""
    return frame["budget"].map(rows_of(frame, system="specter").groupby("budget")["experts_per_layer"].first())


def budget_sweep_data(frames: Frames) -> pd.DataFrame:
    """[quantity, system, experts_per_layer, value, floor_trace_ms]: means over data sets; hit rates in per cent.

    A system that ignores the budget has one row, without experts_per_layer.
    """
    frame = frames["budget_sweep"]
    per_layer = _per_layer(frame).where(frame["uses_budget"])
    frame = frame.assign(experts_per_layer=per_layer, hit_rate=frame["hit_rate"] * 100)

    def means(mine: pd.DataFrame) -> pd.DataFrame:
        by = mine.groupby("experts_per_layer", dropna=False)[[*QUANTITIES, "floor_trace_ms"]].mean().reset_index()
        return by.melt(["experts_per_layer", "floor_trace_ms"], list(QUANTITIES), "quantity")

    data = blocks(frame, ["system"], means)
    is_tpot = data["quantity"] == "tpot_ms"
    data.loc[~(is_tpot & data["system"].isin(FLOORS_SHOWN)), "floor_trace_ms"] = np.nan
    return data[is_tpot | (data["experts_per_layer"].notna() & (data["system"] != "on_demand"))]


@figure(
    "budget_sweep", "budget_sweep", one_model=True, minutes=2, data=budget_sweep_data,
    key="Mean over data sets, at equal device bytes.",
    footer=lambda frames: notes.run_notes(frames["budget_sweep"], "Mean over data sets.", with_k=True),
    about="TPOT and hit rate from two slots to all experts",
)  # fmt: skip
def draw_budget_sweep(data: pd.DataFrame) -> Grid:
    grid = Grid(data, columns="quantity", height=2.3, x="budget (BF16 experts per MoE layer)", legend=True)
    ticks = sorted(data["experts_per_layer"].dropna().unique())
    for panel, part in grid:
        for named, mine in split(part, "system"):
            name, shade = title("system", named["system"]), colour(named["system"])
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
    return grid


def sweep_rows(frame: pd.DataFrame, key: str) -> pd.DataFrame:
    """TPOT of every system, macro averages: a row for each value of `key` and budget."""
    times = frame.groupby([key, "budget", "system", "dataset"])["tpot_ms"].mean().groupby([key, "budget", "system"])
    rows = times.mean().unstack()[names(frame, "system")].rename(columns=lambda name: f"{short_title(name)} (ms)")
    floors = rows_of(frame, system="specter").groupby([key, "budget"])["floor_trace_ms"].mean()
    rows["floor_trace of Specter (ms)"] = floors
    return rows.assign(**{"× LRU": rows["LRU (ms)"] / rows["Specter (ms)"]}).reset_index()


def sweep_table(heading: str, rows: pd.DataFrame, keys: int, frame: pd.DataFrame) -> Table:
    """A table of `sweep_rows`."""
    return run_table(heading, rows, keys, f"Mean TPOT over data sets; K = {depths(frame)}.", frame)


@table("budget_sweep", "budget_sweep", model_by_model=True)
def budget_sweep_table(frames: Frames) -> Table:
    frame = spread_budgets(frames["budget_sweep"])
    rows = sweep_rows(frame.assign(**{"experts per layer": _per_layer(frame)}), "experts per layer")
    rows["experts per layer"] = [f"{value:.3g}" for value in rows["experts per layer"]]
    return sweep_table("Cache budget", rows.drop(columns="budget"), 1, frame)
