"""Residual experts against 16-bit ones at equal device bytes: the codec alone, with speculation, and where all fit."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import Grid, grouped_bars
from harness.plotting.frames import Frames, Row, blocks, macro, macros, names, rows_of, sampling_title, table_rows
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import styles, title
from harness.studies.registry import figure, table

CELL = ["charged_as", "budget", "sampling"]
PLUS = "specter_plus"
# From plain decoding to Specter+, one thing at a time; and the same speculation on 16-bit experts.
STEPS = {
    "lru": "LRU, 16 bits (ms)",
    "lru_residual": "residual (ms)",
    "specter_deadline_residual": "and speculation (ms)",
    PLUS: "and K by round (ms)",
}
ON_16_BITS = "specter_deadline"


def _at_best_depth(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs of every system at the fixed K that is best for it in its cell."""

    def best(mine: pd.DataFrame) -> pd.DataFrame:
        times = {k: macro(rows_of(mine, k=k), "tpot_ms") for k in names(mine, "k")}
        return rows_of(mine, k=min(times, key=lambda k: times[k]))

    return blocks(frame, [*CELL, "system"], best).drop(columns="model").assign(model=lambda made: made["charged_as"])


def _depth(mine: pd.DataFrame) -> str:
    one = mine.iloc[0]
    return "by round" if one["is_auto"] else str(one["k"]) if one["speculative"] else "–"


def residual_data(frames: Frames) -> pd.DataFrame:
    """[sampling, model, budget, panel, system, tpot_ms, floor_trace_ms]: means over data sets, at each system's best
    fixed K."""
    frame = frames["residual"]

    def means(mine: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame([{key: macro(mine, key) for key in ("tpot_ms", "floor_trace_ms")}])

    data = blocks(_at_best_depth(frame), ["sampling", "charged_as", "budget", "system"], means)
    panels = [
        f"{title('model', row.model)},\n{sampling_title(frame, str(row.sampling))}"
        for row in data.itertuples(index=False)
    ]
    return data.assign(panel=panels)


def finding(frames: Frames) -> str:
    """What the figure shows, in numbers."""
    times = residual_data(frames).pivot_table(
        index=["model", "budget", "sampling"], columns="system", values="tpot_ms"
    )  # fmt: skip
    parts = []
    for rival in ("lru", "lru_residual", "specmoeoff_tuned"):
        if rival in times:
            ratio = times[rival] / times[PLUS]
            spread = f"{ratio.min():.2f} to {ratio.max():.2f} times as fast as {title('system', rival)}"
            parts.append(f"{spread} (mean {ratio.mean():.2f})")
    cells = notes.counted(len(times), "cell")
    return f"At equal device bytes, in {cells}, {title('system', PLUS)} is {'; '.join(parts)}."


@figure(
    "residual", "residual", minutes=8, data=residual_data, finding=finding,
    key="Mean over data sets, every system at its best K of those tried; Specter+ chooses K by round.",
    footer=lambda frames: [
        *notes.run_notes(
            frames["residual"],
            "Mean over data sets, every system at its best K of those tried; Specter+ chooses K by round. Lines: "
            "floor_trace of the system's own bytes, decoding included.",
        ),
    ],
    about="residual against 16-bit experts at equal device bytes, with and without speculation, three models",
)  # fmt: skip
def draw_residual(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="sampling", columns="model", height=2.2, sharey="col", title_size=7.5,
                y="TPOT (ms per token)", legend=True)  # fmt: skip
    shown = styles(data["system"])
    for panel, part in grid:
        grouped_bars(
            panel, part, groups="budget", series="system", value="tpot_ms", styles=shown, value_format="{:.1f}",
            floor="floor_trace_ms", rotation=90,
        )  # fmt: skip
    return grid


@table("residual", "residual")
def residual_table(frames: Frames) -> Table:
    frame = _at_best_depth(frames["residual"])

    def numbers(mine: pd.DataFrame) -> Row:
        mean, one = macros(mine), mine.iloc[0]
        plain = rows_of(frame, system="lru", **{key: one[key] for key in CELL})
        return {
            "K": _depth(mine),
            "TPOT (ms)": mean["tpot_ms"],
            "LRU / this": macro(plain, "tpot_ms") / mean["tpot_ms"],
            "× floor_trace": mean["over_floor_trace"],
            "bits per weight": mean["bits_per_weight"],
            "slots per layer": mean["experts_per_layer"],
            "hits (%)": mean["hit_rate"] * 100,
            "GB per token": mean["bytes_per_token"] / 1e9,
            "decode, least (ms per token)": mean["decode_floor_ms"] / (one["max_new_tokens"] - 1),
            "staging (GB)": mean["device_staging_bytes"] / 1e9,
            "device (GB)": mean["device_total_bytes"] / 1e9,
        }

    words = (
        "Every system at the fixed K that is best in its cell of those tried, Specter+ at the K of every round; means "
        "over data sets. Device bytes are equal: codes, staging and tails of blobs count. Decode: by the cost model, "
        f"in launches of any size. {finding(frames)}"
    )
    return run_table("Residual experts", table_rows(frame, [*CELL, "system"], numbers), 4, words, frame)


@table(
    "residual_ablation", "residual", minutes=8,
    about="from LRU to Specter+ one thing at a time: codec, speculation, the K of every round",
)  # fmt: skip
def ablation_table(frames: Frames) -> Table:
    frame, fixed = frames["residual"], _at_best_depth(frames["residual"])

    def numbers(mine: pd.DataFrame) -> Row:
        times = {name: macro(rows_of(mine, system=name), "tpot_ms") for name in (*STEPS, ON_16_BITS)}
        order = list(STEPS)
        row: dict[str, Any] = {}
        for before, name in zip([None, *order], order, strict=False):
            row[STEPS[name]] = times[name]
            if before:
                row[f"× {STEPS[name].removesuffix(' (ms)')}"] = times[before] / times[name]
        return row | {
            "best fixed K": _depth(rows_of(mine, system="specter_deadline_residual")),
            "× in all": times["lru"] / times[PLUS],
            "speculation on 16 bits (ms)": times[ON_16_BITS],
            "× LRU there": times["lru"] / times[ON_16_BITS],
        }

    words = (
        "Mean TPOT over data sets. Each step adds to the one before; × is the time before over the time after. "
        "Speculation: deadline order and retention at the best fixed K of those tried, so the last step compares the "
        "K of every round with the best that could be known beforehand."
    )
    return run_table("From LRU to Specter+", table_rows(fixed, CELL, numbers), 3, words, frame)


@table(
    "payload_bits", "payload_bits", minutes=8, about="sensitivity of residual systems to the bits per weight"
)  # fmt: skip
def bits_table(frames: Frames) -> Table:
    frame = frames["payload_bits"]

    def numbers(mine: pd.DataFrame) -> Row:
        measured = rows_of(mine, charged_bits=0.0)
        row: Row = {"measured bits": measured["bits_per_weight"].iloc[0], "TPOT (ms)": macro(measured, "tpot_ms")}
        for bits in sorted(set(frame["charged_bits"]) - {0.0}):
            row[f"at {bits:g} bits (ms)"] = macro(rows_of(mine, charged_bits=bits), "tpot_ms")
        one = mine.iloc[0]
        plain = rows_of(frame, system="lru", **{key: one[key] for key in CELL})
        return row | {"LRU, 16 bits (ms)": macro(plain, "tpot_ms")}

    words = (
        "Mean TPOT over data sets. Bits per weight decide link time and slots; all blobs of a charged rate have one "
        "size. No real checkpoint was at hand: trained weights may need more bits than the stand-ins' (docs/codec.md)."
    )
    rows = table_rows(frame[frame["codec"] == "residual"], [*CELL, "system"], numbers)
    return run_table("Bits per weight", rows, 4, words, frame)


@table(
    "everything_fits", "everything_fits", minutes=8,
    about="cards of 24 GB and 80 GB that hold all experts as INT4 codes and residual",
)  # fmt: skip
def fits_table(frames: Frames) -> Table:
    frame = frames["everything_fits"]
    at_budget = frame.assign(budget="card")  # `resident` ignores it

    def numbers(mine: pd.DataFrame) -> Row:
        mean, one = macros(mine), mine.iloc[0]
        resident = rows_of(at_budget, system="resident", charged_as=one["charged_as"], sampling=one["sampling"])
        return {
            "K": _depth(mine),
            "device (GB)": mean["device_total_bytes"] / 1e9,
            "slots per layer": mean["experts_per_layer"],
            "GB per token": mean["bytes_per_token"] / 1e9,
            "TPOT (ms)": mean["tpot_ms"],
            "resident / this": macro(resident, "tpot_ms") / mean["tpot_ms"],
            "× floor_trace": mean["over_floor_trace"],
        }

    words = (
        "Device memory of 24 GB for DeepSeek-V2-Lite and Qwen1.5-MoE, 80 GB for Phi-3.5-MoE, everything counted. "
        "Resident holds 16-bit experts and exceeds that memory; it has no draft. Means over data sets."
    )
    rows = table_rows(at_budget, ["charged_as", "sampling", "system"], numbers)
    return run_table("Everything fits", rows, 3, words, frame)
