"""The comparison of `main` at the published K and at each system's best K, SpecMoEOff with or without its plans."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.plotting import notes
from harness.plotting.frames import Frames, macro, rows_of, split
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import title
from harness.studies.registry import table

POLICIES = ("published", "same_bytes")
OURS = ("specter", "specter_deadline")  # their residents are those of the budget under either policy
TUNED = {"specmoeoff_tuned": "with", "specmoeoff_no_plans": "without"}  # its plans
FIXED = ("specmoeoff", "mixtral_offloading", "lru")  # a K of its own, or none
CELL = ("policy", "budget", "sampling")


def candidates(frames: Frames) -> pd.DataFrame:
    """All replays that a system's best is chosen from, under either policy, with the family that chooses."""
    sweep, published = frames["k_sweep"], frames["best_k"]
    ours = [sweep[sweep["system"].isin(OURS)].assign(policy=policy) for policy in POLICIES]
    tuned = pd.concat([sweep, published])
    tuned = tuned[tuned["system"].isin(TUNED) & tuned["fits_budget"]]
    rows = pd.concat([*ours, tuned], ignore_index=True)
    family = rows["system"].where(~rows["system"].isin(TUNED), "specmoeoff_tuned")
    return rows.assign(family=family, plans=rows["system"].map(TUNED).fillna("–"))


def best_data(frames: Frames) -> pd.DataFrame:
    """[policy, budget, sampling, system, k, tpot_ms, best_k, plans, best_ms]: at the K of `main`, and at the best.

    Means over the texts of `k_sweep`. The best (K, plans) of a cell has the least mean over these texts.
    """
    swept = candidates(frames)
    texts = swept[["dataset", "input"]].drop_duplicates()
    main = frames["main"].merge(texts, on=["dataset", "input"])
    main = main[main["system"].isin([*OURS, "specmoeoff_tuned", *FIXED]) & main["fits_budget"]]
    rows = []
    for named, mine in split(main, *CELL, "system"):
        at, tpot = int(mine["k"].iloc[0]), macro(mine, "tpot_ms")
        row: dict[str, Any] = {**named, "k": at, "tpot_ms": tpot, "best_k": at, "plans": "–", "best_ms": tpot}
        choices = rows_of(swept, family=named["system"], **{key: named[key] for key in CELL})
        if len(choices):
            by_choice = choices.groupby(["k", "plans", "dataset"])["tpot_ms"].mean().groupby(["k", "plans"]).mean()
            best: Any = by_choice.idxmin()
            (row["best_k"], row["plans"]), row["best_ms"] = best, float(by_choice.min())
        rows.append(row)
    return pd.DataFrame(rows)


def finding(data: pd.DataFrame) -> str:
    """SpecMoEOff at its best against Specter at its best, over the cells of these rows."""
    best = data.set_index([*CELL, "system"])["best_ms"].unstack("system")
    ratios = best["specmoeoff_tuned"] / best["specter"]
    parts = [
        f"{title('policy', policy)} {sampling} {ratios[policy].xs(sampling, level='sampling').mean():.2f}"
        for policy in POLICIES
        for sampling in ratios.index.unique("sampling")
    ]
    return f"TPOT of SpecMoEOff at its best over Specter's at its best, mean of the tiers: {', '.join(parts)}."


@table(
    "best_k", "main", "k_sweep", "best_k", model_by_model=True, minutes=9,
    about="the comparison of main at the published K and at each system's best K, SpecMoEOff with or without its plans",
)  # fmt: skip
def best_k_table(frames: Frames) -> Table:
    data = best_data(frames)
    ours = rows_of(data, system="specter").set_index(list(CELL))
    cells = [tuple(row) for row in data[list(CELL)].to_numpy().tolist()]
    rows = pd.DataFrame(
        {
            "policy": [title("policy", name) for name in data["policy"]],
            "budget": data["budget"],
            "sampling": data["sampling"],
            "system": [title("system", name) for name in data["system"]],
            "K of main": [str(k or "–") for k in data["k"]],
            "TPOT (ms)": data["tpot_ms"],
            "× Specter": [ms / ours["tpot_ms"][cell] for ms, cell in zip(data["tpot_ms"], cells, strict=True)],
            "best K": [str(k or "–") for k in data["best_k"]],
            "its plans": data["plans"],
            "TPOT at best (ms)": data["best_ms"],
            "× Specter at best": [ms / ours["best_ms"][cell] for ms, cell in zip(data["best_ms"], cells, strict=True)],
        }
    )
    tried = frames["k_sweep"].loc[frames["k_sweep"]["system"].isin(TUNED), "k"].unique()
    words = (
        "Macro average over the data sets of k_sweep; ×: the row's TPOT over Specter's (planner as published) in the "
        f"same cell. The best has the least TPOT of the cell's own replays; SpecMoEOff, tuned, chooses among K = "
        f"{', '.join(map(str, sorted(tried)))}, each with and without its plans. {finding(data)}"
    )
    frame = frames["k_sweep"]
    made = run_table("Every system at its best K", rows, 4, words, frame)
    return Table(made.title, made.frame, made.keys, [*made.notes, *notes.residents(frames["best_k"])], made.stated)
