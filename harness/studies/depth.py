"""The best depth K: of Specter per model and budget, of every speculative system, and by SpecMoEOff's cost model."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.plotting.frames import Frames, rows_of, table_rows
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import title
from harness.studies import disagreements, published
from harness.studies.registry import table

NEAR = 1.02  # times the optimum


@table("depth_profile", "k_sweep", minutes=5, about="depth profile: the best K of Specter per model and budget")
def depth_profile(frames: Frames) -> Table:
    return _best_depths(frames["k_sweep"])


@table("depth_profile_published", "depth_profile", about="the depth profile by the paper's protocol (scale paper)")
def depth_profile_published(frames: Frames) -> Table:
    return _best_depths(frames["depth_profile"])


def _by_k(runs: pd.DataFrame) -> pd.Series:
    """Macro averages of TPOT by K."""
    means: pd.Series = runs.groupby(["k", "dataset"])["tpot_ms"].mean().groupby("k").mean()
    return means


def _best_depths(frame: pd.DataFrame) -> Table:
    ours = rows_of(frame, system="specter")
    rows = []
    for (model, budget, sampling), cell in ours.groupby(["charged_as", "budget", "sampling"]):
        by_k, given = _by_k(cell), published.DEPTH.get(str(model))
        rows.append(
            {
                "model": title("model", model),
                "budget": budget,
                "sampling": sampling,
                "best K": str(by_k.idxmin()),
                "TPOT (ms)": by_k.min(),
                "within 2 % of it": ", ".join(str(k) for k in by_k.index[by_k <= NEAR * by_k.min()]),
                "paper's K": "–" if given is None else str(given),
                "TPOT at the paper's K (ms)": by_k.get(given or 0, float("nan")),
            }
        )
    tried = ", ".join(str(k) for k in sorted(ours["k"].unique()))
    what = f"Specter, macro average over data sets; tried: K = {tried}. {disagreements.DEPTH}"
    return run_table("Depth profile: the optimum per model and budget", pd.DataFrame(rows), 3, what, frame)


@table(
    "best_depth", "k_sweep", "probe", model_by_model=True, minutes=9,
    about="every system at its best K; SpecMoEOff's own choice of K",
)  # fmt: skip
def best_depth(frames: Frames) -> Table:
    frame = frames["k_sweep"]

    def numbers(mine: pd.DataFrame) -> dict[str, Any]:
        by_k, one = _by_k(mine), mine.iloc[0]
        row = {
            "K tried": ", ".join(str(k) for k in by_k.index),
            "best K": str(by_k.idxmin()),
            "TPOT (ms)": by_k.min(),
            "TPOT at the paper's K (ms)": by_k.get(published.DEPTH[one["charged_as"]], float("nan")),
        }
        if one["system"] != "specmoeoff_tuned":
            return row
        chosen = _cost_model_k(mine, rows_of(frames["probe"], mode=one["sampling"]), by_k.index.tolist())
        return row | {"K of its cost model": float(chosen), "TPOT there (ms)": by_k[chosen]}

    rows = table_rows(frame[frame["speculative"] & frame["fits_budget"]], ["budget", "sampling", "system"], numbers)
    words = (
        "Macro average over data sets. The cost model is SpecMoEOff's (H2D, GPU MoE, attention, draft), given the "
        "acceptance of its own recordings and the mean expert union of this text."
    )
    return run_table("Best depth of every system", rows, 5, words, frame)


def _cost_model_k(runs: pd.DataFrame, probe: pd.DataFrame, ks: list[int]) -> int:
    """The K that SpecMoEOff's cost model chooses among `ks` for the machine and model of `runs`."""
    from baselines.specmoeoff import choose_k
    from harness.plan import compose
    from specter.resolve import build_costs

    one = runs.iloc[0]
    config = compose([f"model={one['model']}", "system=specmoeoff_tuned", f"hardware={one['hardware']}"])
    by_length = rows_of(probe, quantity="union").groupby("k")["value"].mean()
    union = {int(str(length)): float(value) for length, value in by_length.items()}
    known = [k for k in ks if k + 1 in union]
    return choose_k(
        known, union, runs["acceptance"].mean(), int(one["num_slots"]), build_costs(config), config.hardware
    )
