"""INT4 experts by backend on a device, and everything that the bench of kernels measured."""

from __future__ import annotations

import numpy as np
import pandas as pd

from harness.plotting.charts import MODES, Grid, note, plain_log
from harness.plotting.frames import Frames, rows_of
from harness.plotting.tables import Table
from harness.plotting.titles import in_order, title
from harness.studies import disagreements
from harness.studies.registry import figure, table

# Backends, their colours, and the last words of the bench's rows.
BACKENDS = {
    "fused, 2 launches": ("#0072B2", "INT4 fused, 2 launches"),
    "the same kernel, launched per expert": (MODES["greedy"], "INT4 fused, one expert at a time"),
    "torch: dequantise, multiply": ("#9a9a9a", "INT4 reference (torch: dequantise, multiply)"),
}
PHASES = {"decode, 1 row": "experts of a layer: ", "prefill, 16 rows": "prefill of 16 rows, a layer: "}
WHAT = (
    "INT4 experts of one MoE layer (group 128, symmetric); device clock, median of 5. Floor: the layer's INT4 bytes at "
    "the device memory's measured rate."
)


def _gpu(frames: Frames) -> str:
    return " / ".join(dict.fromkeys(name for frame in frames.values() for name in frame["gpu"]))


def backends_data(frames: Frames) -> pd.DataFrame:
    """[panel, backend, model, value (µs), over_floor]: one layer's experts, by phase."""
    rows = []
    for panel, begin in PHASES.items():
        for backend, (_, end) in BACKENDS.items():
            for model in in_order("model", (name.removeprefix("kernels_") for name in frames)):
                found = frames[f"kernels_{model}"].set_index("name").loc[begin + end]
                numbers = {"value": found["median"], "over_floor": found["over_floor"]}
                rows.append({"panel": panel, "backend": backend, "model": model, **numbers})
    return pd.DataFrame(rows)


@figure(
    "device.int4_backends", "kernels_*", data=backends_data, key="Median of 5; one MoE layer, group 128, symmetric.",
    footer=lambda frames: [f"{_gpu(frames)}. {WHAT}", disagreements.BACKENDS],
    about="INT4 experts by backend, decode and prefill, three models",
)  # fmt: skip
def draw_backends(data: pd.DataFrame) -> Grid:
    grid = Grid(data, columns="panel", height=2.2, sharey=True, y="µs per layer (log)", legend=True)
    models = data["model"].unique().tolist()
    for panel, part in grid:
        for index, (backend, (colour, _)) in enumerate(BACKENDS.items()):
            values = rows_of(part, backend=backend).set_index("model")["value"][models]
            x = np.arange(len(models)) + (index - 1) * 0.27
            panel.bar(x, values, 0.25, color=colour, label=backend)
            for at, value in zip(x, values, strict=True):
                note(panel, f"{value:.0f}", (at, value))
        panel.set_yscale("log")
        plain_log(panel.yaxis)
        panel.margins(y=0.15)
        panel.set_xticks(range(len(models)), [title("model", model) for model in models])
    return grid


@table("device.int4_backends", "kernels_*")
def backends_table(frames: Frames) -> Table:
    data = backends_data(frames)
    columns = {
        f"{panel}{unit}": part.set_index(["model", "backend"])[column]
        for panel, part in data.groupby("panel", sort=False)
        for column, unit in (("value", " (µs)"), ("over_floor", " (× floor)"))
    }
    rows = pd.DataFrame(columns).reindex(data.set_index(["model", "backend"]).index.unique()).reset_index()
    rows["model"] = [title("model", name) for name in rows["model"]]
    words = [f"{_gpu(frames)}. {WHAT}", disagreements.BACKENDS]
    return Table("INT4 experts by backend", rows, 2, words, {"clock": "device", "hardware": _gpu(frames)})


@table("device.kernels", "kernels", about="every row of the bench of kernels: medians, spread, floors")
def kernels_table(frames: Frames) -> Table:
    found = frames["kernels"].dropna(subset="unit")
    rows = pd.DataFrame(
        {
            "measured": found["name"],
            "median": found["median"],
            "unit": found["unit"],
            "spread (%)": found["spread"] * 100,
            "repeats": found["repeats"].astype(int).astype(str),
            "× floor": found["over_floor"],
            "note": found["note"],
        }
    )
    words = [
        f"{_gpu(frames)}; DeepSeek-V2-Lite, inflated stand-in (`python -m bench kernels`). Spread: of the repeats."
    ]
    return Table(
        "Kernels, steps and loading on a device", rows, 1, words, {"clock": "device", "hardware": _gpu(frames)}
    )
