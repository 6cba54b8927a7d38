"""Whole systems on residual experts, measured on a device, beside the same systems on 16-bit experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from harness.plotting.charts import WHISKER, Grid, note
from harness.plotting.frames import MIN_INPUTS, Frames, rows_of
from harness.plotting.notes import counted
from harness.plotting.tables import Table
from harness.plotting.titles import colour, in_order, title
from harness.studies.registry import figure, table

SYSTEMS = ("specmoeoff_tuned", "specter_deadline", "lru", "lru_residual", "specter_deadline_residual", "specter_plus")
OURS, RESIDENT = "specter_plus", "resident"
WHAT = (
    "Inflated stand-ins, equal device bytes, device clock; medians over the first texts of up to five data sets. 96 "
    "tokens after 64 of warm-up (Phi: 32 after 8). Greedy texts of the stand-ins loop. Missing bars were not measured; "
    "least and greatest text where there are five."
)


def _cells(frames: Frames, tiers: Sequence[str] = ("high", "low")) -> pd.DataFrame:
    """One row per model, tier, sampling and system; of several fixed K the fastest."""
    cells = frames["residual"].dropna(subset="model")
    cells = cells[cells["system"].isin([*SYSTEMS, RESIDENT]) & cells["tier"].isin(tiers)]
    return cells.sort_values("tpot_ms").drop_duplicates(["model", "tier", "sampling", "system"])


def _gpu(frames: Frames) -> str:
    return " / ".join(dict.fromkeys(frames["residual"]["gpu"]))


def residual_data(frames: Frames) -> pd.DataFrame:
    """[panel, model, sampling, tier, system, value (ms), least, most, num_texts]."""
    cells = _cells(frames).rename(columns={"tpot_ms": "value", "tpot_ms_min": "least", "tpot_ms_max": "most"})
    order = {name: index for index, name in enumerate(in_order("model", cells["model"].unique()))}

    def place(column: pd.Series) -> pd.Series:
        return column.map(order) if column.name == "model" else column

    cells = cells.sort_values(["model", "sampling", "tier"], key=place)
    cells = cells.assign(model=[title("model", name) for name in cells["model"]])
    cells = cells.assign(panel=cells["model"] + ", " + cells["sampling"])
    return cells[["panel", "model", "sampling", "tier", "system", "value", "least", "most", "num_texts"]]


def finding(frames: Frames) -> str:
    """What the figure shows, in numbers."""
    cells = _cells(frames)
    wide = cells.pivot(index=["model", "tier", "sampling"], columns="system", values="tpot_ms")
    parts = []
    for rival in ("lru", "lru_residual"):
        ratio = (wide[rival] / wide[OURS]).dropna()
        spread = f"{ratio.min():.2f} to {ratio.max():.2f} times as fast as {title('system', rival)}"
        parts.append(f"{spread} (mean {ratio.mean():.2f} of {counted(len(ratio), 'cell')})")
    machine = f"Measured on one {_gpu(frames)} at equal device bytes"
    return f"{machine}, greedy and sampled, {title('system', OURS)} is {', and '.join(parts)}."


@figure(
    "device.residual", "residual", data=residual_data, finding=finding,
    footer=lambda frames: [f"{_gpu(frames)}. {WHAT}"],
    shown=_cells,
    key="Medians over texts; whiskers: least to greatest of five texts; no bar: not measured. Equal device bytes.",
    about="TPOT of whole systems on residual and on 16-bit experts, three models, at equal device bytes",
)  # fmt: skip
def draw_residual(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="model", columns="sampling", height=1.9, sharey="row", y="ms per token", legend=True)
    tiers = ["high", "low"]
    for panel, part in grid:
        for index, system in enumerate(SYSTEMS):
            found = rows_of(part, system=system).set_index("tier").reindex(tiers)
            x = np.arange(len(tiers)) + (index - (len(SYSTEMS) - 1) / 2) * 0.15
            many = found["num_texts"] >= MIN_INPUTS
            spread = [(found["value"] - found["least"]).where(many), (found["most"] - found["value"]).where(many)]
            panel.bar(x, found["value"], 0.14, color=colour(system), label=title("system", system))
            panel.errorbar(x, found["value"], yerr=spread, fmt="none", **WHISKER)
            for at, value, top in zip(x, found["value"], found["most"].where(many, found["value"]), strict=True):
                if np.isfinite(value):
                    note(panel, f"{value:.3g}", (at, top))
        panel.margins(y=0.1)  # room for the values
        panel.set_xticks(range(len(tiers)), tiers)
    return grid


@table("device.residual", "residual", about="the same as numbers, with × floor_trace and what it is over")
def residual_table(frames: Frames) -> Table:
    cells = _cells(frames)
    key = ["model", "tier", "sampling"]
    wide = cells.pivot(index=key, columns="system", values="tpot_ms").reindex(columns=list(SYSTEMS))
    ours = wide[OURS].fillna(wide["specter_deadline_residual"])
    floors = cells[cells["system"].isin([OURS, "specter_deadline_residual"])].sort_values("system")
    over = floors.drop_duplicates(key, keep="last").set_index(key)["over_floor_trace"]
    rows = wide.rename(columns={name: f"{title('system', name)} (ms)" for name in SYSTEMS})
    rows["× floor_trace"] = over
    for name in ("lru", "lru_residual", "specmoeoff_tuned"):
        rows[f"over {title('system', name)}"] = wide[name] / ours
    order = in_order("model", cells["model"].unique())
    rows = rows.reindex(order, level="model").reset_index()
    rows["model"] = [title("model", name) for name in rows["model"]]
    words = [f"{_gpu(frames)}. {WHAT} Last columns: of Specter+, or of the fixed K where it was not measured."]
    return Table("Whole systems on residual experts", rows, 3, words, {"clock": "device", "hardware": _gpu(frames)})


@table("device.residual_card", "residual", about="cards that hold all experts as INT4 codes and residual, measured")
def card_table(frames: Frames) -> Table:
    """TPOT by model and sampling where every expert has a slot; `resident` has all experts in 16 bits."""
    cells = _cells(frames, ["card"])
    systems = [RESIDENT, *(name for name in SYSTEMS if name in set(cells["system"]))]
    rows = cells.pivot(index=["model", "sampling"], columns="system", values="tpot_ms")[systems]
    rows = rows.rename(columns={name: f"{title('system', name)} (ms)" for name in systems})
    rows = rows.reindex(in_order("model", cells["model"].unique()), level="model").reset_index()
    rows["model"] = [title("model", name) for name in rows["model"]]
    words = [
        f"{_gpu(frames)}. {WHAT} Two texts. 24 GB of device memory, Phi-3.5-MoE 80 GB; resident takes 31 and 84 GB."
    ]
    return Table("Every expert on the device", rows, 3, words, {"clock": "device", "hardware": _gpu(frames)})
