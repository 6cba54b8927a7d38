"""16 bits against INT4 on a device, fused and not, for every model: kernels, a step, and whole systems."""

from __future__ import annotations

import numpy as np
import pandas as pd

from harness.plotting.charts import Grid, note, plain_log
from harness.plotting.frames import Frames, demand_lossless, names, rows_of
from harness.plotting.tables import Table
from harness.plotting.titles import title
from harness.studies import disagreements
from harness.studies.device_systems import OURS
from harness.studies.registry import figure, table

GREY, LIGHT, MIDDLE, BLUE = "#9a9a9a", "#a6d8f0", "#56B4E9", "#0072B2"
# Panels, their bars (label, colour), and the name of the bench's row or of the system below.
PANELS: dict[str, dict[str, tuple[str, str]]] = {
    "all on the GPU: ms per step": {
        "16 bit": (GREY, "plain decoding, all resident, BF16"),
        "INT4, plain torch": (LIGHT, "draft step, graph, 1 row, INT4 unfused"),
        "INT4, by expert": (MIDDLE, "draft step, graph, 1 row, INT4 by expert"),
        "INT4, fused": (BLUE, "draft step, graph, 1 row, INT4"),
    },
    "experts of a layer, 1 row: µs": {
        "16 bit": (GREY, "experts of a layer: BF16 grouped, 2 launches"),
        "INT4, plain torch": (LIGHT, "experts of a layer: INT4 reference (torch: dequantise, multiply)"),
        "INT4, by expert": (MIDDLE, "experts of a layer: INT4 fused, one expert at a time"),
        "INT4, fused": (BLUE, "experts of a layer: INT4 fused, 2 launches"),
    },
    "offloaded: TPOT, ms per token": {
        "16 bit, LRU": (GREY, "lru"),
        "INT4 draft, plain torch": (LIGHT, "unfused"),
        "INT4 draft, by expert": (MIDDLE, "by_expert"),
        "INT4 draft, fused": (BLUE, "fused"),
    },
}
# Rows of the table: title, and the bench's row.
LATENCIES = {
    "plain step, 16 bit, all resident (ms)": "plain decoding, all resident, BF16",
    "draft step, INT4 fused (ms)": "draft step, graph, 1 row, INT4",
    "draft step, INT4 in plain torch (ms)": "draft step, graph, 1 row, INT4 unfused",
    "BF16 experts, 1 row (us)": "experts of a layer: BF16 grouped, 2 launches",
    "INT4 fused, 1 row (us)": "experts of a layer: INT4 fused, 2 launches",
    "INT4 by expert, 1 row (us)": "experts of a layer: INT4 fused, one expert at a time",
    "INT4 reference, 1 row (us)": "experts of a layer: INT4 reference (torch: dequantise, multiply)",
    "INT4 fused, 16 rows (us)": "prefill of 16 rows, a layer: INT4 fused, 2 launches",
    "INT4 by expert, 16 rows (us)": "prefill of 16 rows, a layer: INT4 fused, one expert at a time",
    "INT4 reference, 16 rows (us)": "prefill of 16 rows, a layer: INT4 reference (torch: dequantise, multiply)",
}
OFFLOADED = {
    "lru": ("offloaded, 16 bit, LRU: TPOT (ms)", "the same, tokens per s"),
    "unfused": ("offloaded, INT4 draft in plain torch: TPOT (ms)", "plain torch, tokens per s"),
    "by_expert": ("offloaded, INT4 draft by expert: TPOT (ms)", "by expert, tokens per s"),
    "fused": ("offloaded, INT4 draft fused: TPOT (ms)", "fused, tokens per s"),
}
UNFUSED = (
    "experts chosen one by one and dequantised in a CUDA graph. By expert: the fused kernels, launched once per chosen "
    "expert; no bar: not measured."
)


def medians(frames: Frames, model: str) -> pd.Series:
    """What the bench measured of a model, by the name of its row or of its summary's value."""
    found: pd.Series = frames[f"kernels_{model}"].set_index("name")["median"]
    return found


def _of_system(frame: pd.DataFrame, model: str, name: str) -> pd.DataFrame:
    """The runs of `lru`, or of ours `fused`, `unfused` or `by_expert`."""
    execution = name if name in ("unfused", "by_expert") else "default"
    return rows_of(frame, charged_as=model, system="lru" if name == "lru" else OURS, execution=execution)


def families_data(frames: Frames) -> pd.DataFrame:
    """[panel, bar, model, value]: medians of the bench, and mean TPOT over texts of whole systems."""
    frame = demand_lossless(frames["families"], "families")
    rows = []
    for panel, bars in PANELS.items():
        for bar, (_, name) in bars.items():
            for model in names(frame, "charged_as"):
                of_bench = medians(frames, model)
                whole = name in OFFLOADED
                value = _of_system(frame, model, name)["tpot_ms"].mean() if whole else of_bench.get(name, np.nan)
                rows.append({"panel": panel, "bar": bar, "model": model, "value": float(value)})
    return pd.DataFrame(rows)


def _slots(frame: pd.DataFrame, model: str) -> str:
    one = _of_system(frame, model, "fused").iloc[0]
    return f"slots: {one['num_slots']}, {one['experts_per_layer']:g} a MoE layer; K {one['k']}"


def families_footer(frames: Frames) -> list[str]:
    frame = frames["families"]
    sources = [
        f"{title('model', model)}: {one['gpu']}; {_slots(frame, model)}; commit {one['commit'][:7]}."
        for model in names(frame, "charged_as")
        for one in [rows_of(frame, charged_as=model).iloc[0]]
    ]
    return [
        "Device clock; medians of 5; inflated stand-ins; greedy, all tokens equal resident plain decoding's. Torch: "
        f"{UNFUSED} Offloaded: published high budget and K, equal slots.",
        disagreements.UNFUSED,
        " ".join(sources),
    ]


@figure(
    "device.families", "families", "kernels_*", data=families_data, footer=families_footer,
    key="Medians of 5; offloaded: 16 bit with LRU, or with an INT4 draft; mean over texts, published budget and K.",
    about="16 bits against INT4, fused and not, for three models",
)  # fmt: skip
def draw_families(data: pd.DataFrame) -> Grid:
    grid = Grid(data, columns="panel", height=2.2, title_size=6.8, y="time (log)", legend=True)
    shown = data["model"].unique().tolist()
    labels = list(next(iter(PANELS.values())))  # of all panels: their bars have the same colours
    for panel, part in grid:
        bars = PANELS[part["panel"].iloc[0]]
        for index, (bar, (colour, _)) in enumerate(bars.items()):
            values = rows_of(part, bar=bar).set_index("model")["value"][shown]
            x = np.arange(len(shown)) + (index - 1.5) * 0.21
            panel.bar(x, values, 0.2, color=colour, label=labels[index])
            for at, value in zip(x, values, strict=True):
                note(panel, f"{value:.3g}" if value < 1000 else f"{value:.0f}", (at, value), size=5.5, rotation=90)
        panel.set_yscale("log")
        plain_log(panel.yaxis)
        panel.margins(y=0.2)  # room for the values
        panel.set_xticks(range(len(shown)), [title("model", m).replace("-", "-\n", 1) for m in shown], fontsize=6)
    return grid


@table("device.families", "families", "kernels_*")
def families_table(frames: Frames) -> Table:
    frame = demand_lossless(frames["families"], "families")
    columns, sources = {}, []
    for model in names(frame, "charged_as"):
        of_bench, fused = medians(frames, model), _of_system(frame, model, "fused")
        one = fused.iloc[0]
        numbers = {heading: of_bench.get(name, np.nan) for heading, name in LATENCIES.items()}
        for name, (tpot, rate) in OFFLOADED.items():
            time_ms = _of_system(frame, model, name)["tpot_ms"].mean()
            numbers |= {tpot: time_ms, rate: 1000 / time_ms}
        numbers["× floor_trace, fused"] = fused["over_floor_trace"].mean()
        numbers["store (GB/s)"] = of_bench["store_load_gb_per_s"]
        numbers["peak device (GB)"] = of_bench["peak_device_gb"]
        numbers["acceptance (%)"] = fused["acceptance"].mean() * 100
        columns[title("model", model)] = {heading: float(value) for heading, value in numbers.items()}
        sources.append(
            f"{title('model', model)}: {one['checkpoint']}; {one['gpu']}; {_slots(frame, model)}; {one['commit']}."
        )
    words = [
        "Device clock; medians of 5; published high budget and K, equal slots, greedy; all tokens equal those of "
        "resident plain decoding. Experts: those of one layer. × floor_trace: mean of the texts' ratios. Plain torch: "
        f"{UNFUSED} {disagreements.UNFUSED}",
        *sources,
    ]
    stated = {"clock": "device", "checkpoint": "narrow stand-ins, inflated"}
    return Table("16 bits against INT4, by model", pd.DataFrame(columns).reset_index(names=""), 1, words, stated)
