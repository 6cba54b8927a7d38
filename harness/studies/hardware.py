"""The same runs on several machines of the virtual clock."""

from __future__ import annotations

import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import Grid, grouped_bars
from harness.plotting.frames import Frames, names, spread_budgets, summary, with_panels
from harness.plotting.tables import Table
from harness.plotting.titles import styles, title
from harness.studies.budget_sweep import sweep_rows, sweep_table
from harness.studies.registry import figure, table


def hardware_data(frames: Frames) -> pd.DataFrame:
    """[budget, panel, hardware (its title), system, tpot_ms (none: does not fit)]: means of all runs."""
    frame = spread_budgets(frames["hardware"])
    fitting = frame.assign(tpot_ms=frame["tpot_ms"].where(frame["fits_device"]))
    data = summary(fitting, ["budget", "hardware", "system"], lambda mine: {"tpot_ms": mine["tpot_ms"].mean()})
    return with_panels(data.assign(hardware=[title("hardware", name) for name in data["hardware"]]), frame)


@figure(
    "hardware", "hardware", one_model=True, minutes=2, data=hardware_data,
    key="Mean over data sets, at equal device bytes.",
    footer=lambda frames: notes.run_notes(spread_budgets(frames["hardware"]), "Mean over data sets.", with_k=True),
    about="the same runs on three machines",
)  # fmt: skip
def draw_hardware(data: pd.DataFrame) -> Grid:
    lines = data.assign(hardware=data["hardware"].str.replace(", ", "\n"))
    grid = Grid(lines, columns="budget", height=2.3, sharey=True, y="TPOT (ms per token)", legend=True)
    for panel, part in grid:
        grouped_bars(panel, part, groups="hardware", series="system", value="tpot_ms", styles=styles(data["system"]))
    return grid


@table("hardware", "hardware", model_by_model=True)
def hardware_table(frames: Frames) -> Table:
    frame = spread_budgets(frames["hardware"])
    rows, machines = sweep_rows(frame, "hardware"), names(frame, "hardware")
    rows = rows.sort_values("hardware", key=lambda column: column.map(machines.index), kind="stable")
    rows["hardware"] = [title("hardware", name) for name in rows["hardware"]]
    return sweep_table("Machines", rows, 2, frame)
