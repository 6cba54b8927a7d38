"""Tables of the probes: what a draft's routing is worth, and the depth that pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from harness import published
from harness.frames import (
    METHODS,
    MODELS,
    Frames,
    Table,
    caveats,
    fidelity_line,
    in_order,
    probe_line,
    provenance,
    stated,
    titled,
)
from specter.probes.routing import expected_run, largest_useful_depth

MODES = ("greedy", "seeded", "teacher-forced")
PAPER = "paper, real checkpoint"
STANDINS_ONLY = (
    "A stand-in's fidelity says nothing about the real checkpoint; the paper's numbers are there for orientation."
)


def models(frame: pd.DataFrame) -> list[str]:
    """Models by the published one that they are, or stand for."""
    return in_order(frame["charged_as"].unique().tolist(), MODELS)


def modes(of_model: pd.DataFrame) -> list[str]:
    """The kinds of text that a model was probed on."""
    return [mode for mode in MODES if (of_model["mode"] == mode).any()]


def fidelity(frames: Frames) -> Table:
    probe = frames["probe"]
    rows: list[dict[str, Any]] = []
    for model in models(probe):
        of_model = probe[probe["charged_as"] == model]
        for mode in modes(of_model):
            mine = of_model[of_model["mode"] == mode]
            layers = mine[mine["quantity"] == "fidelity"].groupby("layer")["value"].mean() * 100
            means = mine.groupby("quantity")["value"].mean()
            rows.append(
                {
                    "model": titled(MODELS, model),
                    "text": mode,
                    "expert match, mean (%)": layers.mean(),
                    "worst layer (%)": layers.min(),
                    "best layer (%)": layers.max(),
                    "acceptance (%)": means["acceptance"] * 100,
                    "distinct 4-grams": means["distinct_4grams"],
                }
            )
        rows.append(
            {
                "model": titled(MODELS, model),
                "text": PAPER,
                "expert match, mean (%)": published.FIDELITY.get(model, {}).get("gptq", float("nan")) * 100,
                "acceptance (%)": published.ACCEPTANCE.get(model, float("nan")) * 100,
            }
        )
    what = "Expert match: share of the target's top-k experts that the draft chooses too, same position and prefix."
    notes = [f"{what} {STANDINS_ONLY} {probe_line(probe)}."]
    return Table("Routing fidelity of the draft", pd.DataFrame(rows), 2, notes, stated(probe))


def methods(frames: Frames) -> Table:
    """The paper's Table 1: methods and precisions."""
    frame = frames["fidelity"]
    rows = []
    for model in models(frame):
        of_model = frame[frame["charged_as"] == model]
        for method in in_order(of_model["method"].unique().tolist(), METHODS):
            mine = of_model[of_model["method"] == method]
            means = {
                name: float(part["value"].mean() * 100)
                for name, part in mine.groupby("quantity")
                if name in ("set_match", "order_match", "same_set", "agreement")
            }
            matches = mine[mine["quantity"] == "set_match"]
            rows.append(
                {
                    "model": titled(MODELS, model),
                    "method": titled(METHODS, method),
                    "expert match (%)": means["set_match"],
                    PAPER + " (%)": published.FIDELITY.get(model, {}).get(method, float("nan")) * 100,
                    "worst layer (%)": matches.groupby("layer")["value"].mean().min() * 100,
                    "worst request (%)": matches.groupby("request")["value"].mean().min() * 100,
                    "whole set alike (%)": means["same_set"],
                    "same rank (%)": means["order_match"],
                    "same next token (%)": means["agreement"],
                }
            )
    what = (
        "Expert match: share of the target's top-k experts that the draft chooses too; whole set alike: all of them, "
        "in any order; same rank: share of ranks with the same expert; same next token: greedy acceptance on the given "
        "text. Only routed experts are quantised. GGUF columns run dequantised values; no mixture of types, no "
        f"importance matrix. {STANDINS_ONLY}"
    )
    title = "Routing fidelity by method and precision"
    return Table(title, pd.DataFrame(rows), 2, [what, f"{fidelity_line(frame)}."], stated(frame))


def union(frames: Frames) -> Table:
    probe = frames["probe"].query("quantity == 'union'")
    blocks = []
    for model in models(probe):
        of_model = probe[probe["charged_as"] == model]
        by_k = of_model.groupby(["k", "mode"])["value"].mean().unstack()
        by_k = by_k[[mode for mode in MODES if mode in by_k]]
        growth = by_k / by_k.loc[1]
        growth.columns = [f"{mode} ×" for mode in growth.columns]
        block = pd.concat([by_k, growth], axis=1)
        block[PAPER] = pd.Series(published.UNION.get(model, {}), dtype=float)
        block[f"{PAPER} ×"] = pd.Series({1: 1.0, 16: published.UNION_GROWTH.get(model, float("nan"))})
        block = block.loc[block.index.intersection([1, 2, 4, 8, 16, 32])].reset_index().rename(columns={"k": "K"})
        block.insert(0, "model", titled(MODELS, model))
        blocks.append(block.assign(K=block["K"].astype(str)))
    what = (
        "Distinct experts per MoE layer that the target needs for K consecutive tokens, mean over windows and layers; "
        f"×: over those of one token. {probe_line(probe)}."
    )
    return Table("Expert union", pd.concat(blocks, ignore_index=True), 2, [what], stated(probe))


def run_lengths(probe: pd.DataFrame) -> pd.Series:
    """How often each length of an accepted run was met, by length, of one model and mode."""
    counts: pd.Series = probe[probe["quantity"] == "run"].groupby("k")["value"].sum()
    return counts


def pooled_acceptance(probe: pd.DataFrame) -> float:
    """Accepted over examined drafts of one model and mode, all texts together."""
    rows = probe[probe["quantity"] == "acceptance"]
    return float((rows["value"] * rows["num"]).sum() / rows["num"].sum())


def runs(frames: Frames) -> Table:
    probe = frames["probe"]
    rows: list[dict[str, Any]] = []
    for model in models(probe):
        of_model = probe[probe["charged_as"] == model]
        for mode in modes(of_model):
            mine = of_model[of_model["mode"] == mode]
            lengths = run_lengths(mine)
            alpha = pooled_acceptance(mine)
            cumulated = lengths.cumsum() / lengths.sum()
            row: dict[str, Any] = {"model": titled(MODELS, model), "text": mode, "acceptance α (%)": alpha * 100}
            if alpha < 1:
                row |= {"E[A] = α/(1−α)": expected_run(alpha), "K_max": str(largest_useful_depth(alpha))}
            if len(lengths):
                row |= {
                    "mean run": float((lengths.index * lengths).sum() / lengths.sum()),
                    "median run": str(cumulated.index[cumulated >= 0.5][0]),
                    "9 of 10 runs up to": str(cumulated.index[cumulated >= 0.9][0]),
                    "longest": str(lengths.index.max()),
                    "runs": str(int(lengths.sum())),
                }
            rows.append(row)
    rows.append(
        {
            "model": "mean of its models",
            "text": PAPER,
            "acceptance α (%)": published.ACCEPTANCE_MEAN * 100,
            "E[A] = α/(1−α)": published.EXPECTED_RUN,
            "K_max": str(published.LARGEST_DEPTH),
        }
    )
    what = (
        "α: accepted over examined drafts. A run: drafts accepted in a row until one is rejected; a text's last run, "
        "which no rejection ended, is left out, so that the mean run falls short of E[A] on short texts. K_max: the "
        f"next power of two from E[A] on. {STANDINS_ONLY} {probe_line(probe)}."
    )
    table = pd.DataFrame(rows).fillna(dict.fromkeys(("K_max", "median run", "9 of 10 runs up to", "runs"), "–"))
    return Table("Accepted runs and the depth they imply", table, 2, [what], stated(probe))


def depth_profile(frames: Frames) -> Table:
    """The best K of each model, budget and sampling, of the sweep that every scale runs."""
    return _best_depths(frames["k_sweep"])


def depth_profile_published(frames: Frames) -> Table:
    """The same by the paper's protocol."""
    return _best_depths(frames["depth_profile"])


def _best_depths(frame: pd.DataFrame) -> Table:
    mine = frame[frame["speculative"] & (frame["system"] == "specter")]
    keys = ["charged_as", "budget", "sampling"]
    means = mine.groupby([*keys, "k", "dataset"])["tpot_ms"].mean().groupby([*keys, "k"]).mean()
    cells = means.reset_index()
    rows = []
    for model, budget, sampling in cells[keys].drop_duplicates().to_numpy().tolist():
        cell = cells[(cells["charged_as"] == model) & (cells["budget"] == budget) & (cells["sampling"] == sampling)]
        by_k: dict[int, float] = dict(zip(cell["k"].tolist(), cell["tpot_ms"].tolist(), strict=True))
        best = min(by_k, key=lambda k: by_k[k])
        given = published.DEPTH.get(model)
        rows.append(
            {
                "model": titled(MODELS, model),
                "budget": budget,
                "sampling": sampling,
                "best K": str(best),
                "TPOT (ms)": by_k[best],
                "within 2 % of it": ", ".join(str(k) for k, time in by_k.items() if time <= 1.02 * by_k[best]),
                "paper's K": "–" if given is None else str(given),
                "TPOT at the paper's K (ms)": by_k.get(given or 0, float("nan")),
            }
        )
    ks = ", ".join(str(k) for k in sorted(mine["k"].unique()))
    notes = [f"Specter, macro average over data sets; tried: K = {ks}.", f"{provenance(frame)}.", *caveats(frame)]
    return Table("Depth profile: the optimum per model and budget", pd.DataFrame(rows), 3, notes, stated(frame))


BUILD: dict[str, Callable[[Frames], Table]] = {
    build.__name__: build for build in (fidelity, methods, union, runs, depth_profile, depth_profile_published)
}
