"""TPOT against the depth of speculation K, with both floors."""

from __future__ import annotations

import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import Grid, log2_axis
from harness.plotting.frames import MIN_INPUTS, Frames, blocks, rows_of, with_panels
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import colour, title
from harness.studies import disagreements, published
from harness.studies.registry import figure, table

FLOORS = {"floor_trace": ("floor_trace (Specter's routing)", "--"), "floor_ideal": ("floor_ideal", ":")}
OTHERS = ("specter_deadline", "specmoeoff_tuned")  # not every model runs them


def k_sweep_data(frames: Frames) -> pd.DataFrame:
    """[sampling, budget, panel, series, k, tpot_ms, least, greatest]: means over data sets, the extent of Specter's.

    The series are systems, `FLOORS`, and `published` (the paper's K, without a time); LRU has no k.
    """
    frame = frames["k_sweep"]
    given = published.DEPTH[frame["charged_as"].iloc[0]]

    def curves(part: pd.DataFrame) -> pd.DataFrame:
        ours = rows_of(part, system="specter").groupby(["k", "dataset"]).mean(numeric_only=True).groupby("k")
        found: list[pd.DataFrame] = [
            ours["tpot_ms"].agg(tpot_ms="mean", least="min", greatest="max").assign(series="specter")
        ]
        if part["dataset"].nunique() < MIN_INPUTS:
            found[0][["least", "greatest"]] = float("nan")
        found += [ours[f"{name}_ms"].mean().to_frame("tpot_ms").assign(series=name) for name in FLOORS]
        for name in OTHERS:
            found.append(rows_of(part, system=name).groupby("k")[["tpot_ms"]].mean().assign(series=name))
        lru = rows_of(part, system="lru")["tpot_ms"].mean()
        flat = pd.DataFrame([{"tpot_ms": lru, "series": "lru"}, {"k": given, "series": "published"}])
        return pd.concat([*(one.reset_index() for one in found), flat])

    return with_panels(blocks(frame, ["budget", "sampling"], curves), frame)


@figure(
    "k_sweep", "k_sweep", one_model=True, minutes=5, data=k_sweep_data, draws_published=True,
    key="Mean over data sets, at equal device bytes.",
    footer=lambda frames: notes.run_notes(
        frames["k_sweep"],
        f"Lines: mean over data sets; band: their extent, of {MIN_INPUTS} or more. {disagreements.DEPTH}",
    ),
    about="TPOT against K with both floors",
)  # fmt: skip
def draw_k_sweep(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="sampling", columns="budget", height=1.9, sharex=True, sharey=True,
                x="K: draft tokens per round", y="TPOT (ms per token)", legend=True)  # fmt: skip
    for panel, part in grid:
        by = {str(name): rows for name, rows in part.groupby("series", sort=False)}
        ours, blue = by["specter"], colour("specter")
        panel.fill_between(ours["k"], ours["least"], ours["greatest"], color=blue, alpha=0.15, lw=0)
        panel.plot(ours["k"], ours["tpot_ms"], "o-", color=blue, label=title("system", "specter"))
        for name, (label, dash) in FLOORS.items():
            panel.plot(by[name]["k"], by[name]["tpot_ms"], dash, color="black", lw=1, label=label)
        for name in (name for name in OTHERS if name in by):
            panel.plot(by[name]["k"], by[name]["tpot_ms"], "o-", ms=3, color=colour(name), label=title("system", name))
        panel.axhline(by["lru"]["tpot_ms"].iloc[0], color=colour("lru"), label="LRU, equal bytes")
        panel.axvline(by["published"]["k"].iloc[0], color="#bbbbbb", lw=0.8, label="K of the paper")
        log2_axis(panel, ours["k"].astype(int).tolist())
    grid.axes[0][0].set_ylim(bottom=0)
    return grid


@table("k_sweep", "k_sweep", model_by_model=True)
def k_sweep_table(frames: Frames) -> Table:
    frame = frames["k_sweep"]
    mine = frame[frame["speculative"] & frame["fits_budget"]]
    keys = ["system", "budget", "sampling", "k"]
    means = mine.groupby([*keys, "dataset"]).mean(numeric_only=True).groupby(keys).mean().reset_index()
    lru = rows_of(frame, system="lru").groupby(["budget", "sampling"])["tpot_ms"].mean()
    rows = pd.DataFrame(
        {
            "system": [title("system", name) for name in means["system"]],
            "budget": means["budget"],
            "sampling": means["sampling"],
            "K": means["k"].astype(str),
            "TPOT (ms)": means["tpot_ms"],
            "floor_trace (ms)": means["floor_trace_ms"],
            "floor_ideal (ms)": means["floor_ideal_ms"],
            "× LRU": [lru[pair] for pair in zip(means["budget"], means["sampling"], strict=True)] / means["tpot_ms"],
            "acceptance (%)": means["acceptance"] * 100,
            "accepted per round": means["mean_accepted_len"],
            "experts per layer": means["union_mean"],
            "GB per token": means["bytes_per_token"] / 1e9,
        }
    )
    what = "Macro average over data sets; × LRU: LRU's TPOT over the row's."
    return run_table("Depth of speculation", rows, 4, what, frame)
