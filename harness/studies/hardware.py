"""The same runs on several machines of the virtual clock."""

from __future__ import annotations

import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import Grid, grouped_bars
from harness.plotting.frames import Frames, budget_title, spread_budgets, systems, tiers
from harness.plotting.tables import Table
from harness.plotting.titles import in_order, styles, title
from harness.studies.budget_sweep import sweep_table
from harness.studies.registry import figure, table


def hardware_data(frames: Frames) -> pd.DataFrame:
    """[budget, panel, hardware (its title), system, tpot_ms] of systems that fit the machine: means of all runs."""
    frame = spread_budgets(frames["hardware"])
    fitting = frame[frame["fits_device"].astype(bool)]
    means = fitting.groupby(["budget", "hardware", "system"])["tpot_ms"].mean()
    rows = [
        {"budget": budget, "panel": budget_title(frame, budget), "hardware": title("hardware", machine),
         "system": system, "tpot_ms": means.get((budget, machine, system), float("nan"))}
        for budget in tiers(frame)[1]
        for machine in in_order("hardware", fitting["hardware"])
        for system in systems(frame)
    ]  # fmt: skip
    return pd.DataFrame(rows)


@figure(
    "hardware", "hardware", one_model=True, minutes=2, data=hardware_data,
    footer=lambda frames: notes.run_notes(spread_budgets(frames["hardware"]), "Mean over data sets.", with_k=True),
    about="the same runs on three machines",
)  # fmt: skip
def draw_hardware(data: pd.DataFrame) -> Grid:
    grid = Grid(data.assign(hardware=data["hardware"].str.replace(", ", "\n")), columns="budget", height=2.3,
                sharey=True)  # fmt: skip
    for panel, part in grid:
        grouped_bars(panel, part, groups="hardware", series="system", value="tpot_ms", styles=styles(data["system"]))
    grid.label(y="TPOT (ms per token)")
    grid.legend()
    return grid


@table("hardware", "hardware", model_by_model=True)
def hardware_table(frames: Frames) -> Table:
    return sweep_table(spread_budgets(frames["hardware"]), "hardware", "hardware", "Machines")
