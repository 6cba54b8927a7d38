"""The probe of the draft: routing fidelity by layer, expert union by K, lengths of accepted runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import MODES, NARROW, PAPER, WIDE, Grid, log2_axis
from harness.plotting.frames import Frames, each, models, rows_of
from harness.plotting.tables import Table
from harness.plotting.titles import title
from harness.studies import published
from harness.studies.registry import figure, table
from specter.probes.routing import expected_run, largest_useful_depth

if TYPE_CHECKING:
    from collections.abc import Iterator


NAN = float("nan")
CHECKPOINT = "paper, real checkpoint"
STANDINS_ONLY = "A stand-in's fidelity does not predict the real checkpoint's; the paper's numbers are for orientation."
UNION_KS = (1, 2, 4, 8, 16, 32)


def parts(probe: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(model, kind of text, rows) of everything that was probed."""
    for model, of_model in each(probe, "charged_as"):
        for mode in (mode for mode in MODES if mode in set(of_model["mode"])):
            yield model, mode, rows_of(of_model, mode=mode)


def model_grid(data: pd.DataFrame, *, height: float, sharey: bool = False) -> Grid:
    """A row of panels, one per model."""
    width = NARROW if data["model"].nunique() == 1 else WIDE
    return Grid(data, columns="model", width=width, height=height, sharey=sharey)


def probe_footer(what: str, quantity: str = "") -> Any:
    """The footer of a figure of the probe: what is shown, and the provenance of the rows of one quantity."""

    def footer(frames: Frames) -> list[str]:
        probe = frames["probe"]
        rows = rows_of(probe, quantity=quantity) if quantity else probe
        return [f"{what}. {notes.probe_line(rows)}."]

    return footer


def fidelity_data(frames: Frames) -> pd.DataFrame:
    """[model, panel, mode, layer (none: the paper's mean), value]: experts chosen alike, in per cent."""
    probe = rows_of(frames["probe"], quantity="fidelity")
    blocks = []
    for model, mode, mine in parts(probe):
        layers = mine.groupby("layer")["value"].mean() * 100
        blocks.append(layers.reset_index().assign(model=model, mode=mode))
    for model in models(probe):
        share = published.FIDELITY.get(model, {}).get("gptq")
        if share is not None:
            blocks.append(pd.DataFrame([{"model": model, "mode": "paper", "value": share * 100}]))
    return _titled(pd.concat(blocks, ignore_index=True))


def _titled(data: pd.DataFrame) -> pd.DataFrame:
    return data.assign(panel=[title("model", model) for model in data["model"]])


@figure(
    "fidelity", "probe", minutes=5, data=fidelity_data,
    footer=probe_footer(
        "Share of the target's top-k experts that the draft chooses too, same position and prefix; the axis does not "
        "start at 0", "fidelity",
    ),
    about="experts that draft and target choose alike, per layer",
)  # fmt: skip
def draw_fidelity(data: pd.DataFrame) -> Grid:
    grid = model_grid(data, height=2.2, sharey=True)
    for panel, part in grid:
        for mode, mine in part.groupby("mode", sort=False):
            if mode == "paper":
                panel.axhline(mine["value"].iloc[0], color=PAPER, lw=1, ls="--", label="paper, real checkpoint, mean")
            else:
                panel.plot(mine["layer"], mine["value"], color=MODES[str(mode)], marker="o", ms=2.5, label=mode)
    grid.label(x="MoE layer", y="experts chosen alike (%)")
    grid.legend(2)
    return grid


def union_data(frames: Frames) -> pd.DataFrame:
    """[model, panel, mode, k, value, growth]: distinct experts per layer; growth: from K = 1 to 16."""
    probe = rows_of(frames["probe"], quantity="union")
    blocks = []
    for model, mode, mine in parts(probe):
        by_k = mine.groupby("k")["value"].mean()
        blocks.append(by_k.reset_index().assign(model=model, mode=mode, growth=by_k.get(16, NAN) / by_k[1]))
    for model in models(probe):
        given = published.UNION.get(model, {NAN: NAN})
        block = pd.DataFrame({"k": list(given), "value": list(given.values())})
        blocks.append(block.assign(model=model, mode="paper", growth=published.UNION_GROWTH.get(model, NAN)))
    return _titled(pd.concat(blocks, ignore_index=True))


@figure(
    "union", "probe", minutes=5, data=union_data,
    footer=probe_footer(
        "Experts that the target needs for K consecutive tokens, mean over windows and layers; ×: from K = 1 to 16; "
        "paper: real checkpoint", "union",
    ),
    about="distinct experts per layer against K, beside the paper's",
)  # fmt: skip
def draw_union(data: pd.DataFrame) -> Grid:
    grid = model_grid(data, height=2.3)
    for panel, part in grid:
        growths = []
        for mode, mine in part.groupby("mode", sort=False):
            growths.append(f"× {mine['growth'].iloc[0]:.2f}")
            if mode == "paper":
                panel.plot(mine["k"], mine["value"], "*", color=PAPER, ms=9, ls="none", label=mode)
            else:
                panel.plot(mine["k"], mine["value"], color=MODES[str(mode)], label=mode)
        log2_axis(panel, UNION_KS)
        panel.set_ylim(bottom=0)
        panel.legend(panel.get_legend_handles_labels()[0], growths, loc="upper left")
    grid.label(x="K: consecutive tokens", y="distinct experts per layer")
    grid.legend()
    return grid


def run_lengths(probe: pd.DataFrame) -> pd.Series:
    """How often each length of an accepted run was met, by length, of one model and mode."""
    counts: pd.Series = rows_of(probe, quantity="run").groupby("k")["value"].sum()
    return counts


def pooled_acceptance(probe: pd.DataFrame) -> float:
    """Accepted over examined drafts of one model and mode, all texts together."""
    rows = rows_of(probe, quantity="acceptance")
    return float((rows["value"] * rows["num"]).sum() / rows["num"].sum())


def runs_data(frames: Frames) -> pd.DataFrame:
    """[model, panel, mode, n, share (of runs of at least n), geometric, alpha, expected, deepest].

    A model and mode without a rejection has no rows.
    """
    blocks = []
    for model, mode, mine in parts(frames["probe"]):
        lengths = run_lengths(mine)
        alpha = pooled_acceptance(mine) if len(lengths) else 1.0
        if alpha < 1:
            n = np.arange(lengths.index.max() + 1)
            longer = lengths[::-1].cumsum().sort_index().reindex(n, method="bfill") / lengths.sum()
            block = pd.DataFrame({"n": n, "share": longer.to_numpy(), "geometric": alpha**n})
            bounds = {"alpha": alpha, "expected": expected_run(alpha), "deepest": largest_useful_depth(alpha)}
            blocks.append(block.assign(model=model, mode=mode, **bounds))
    return _titled(pd.concat(blocks, ignore_index=True))


@figure(
    "runs", "probe", minutes=5, data=runs_data,
    footer=probe_footer(
        "Dotted: runs if every draft were accepted with probability α, independently. A text's last run is left out"
    ),
    about="accepted runs against the geometric law, with E[A] and K_max",
)  # fmt: skip
def draw_runs(data: pd.DataFrame) -> Grid:
    grid = model_grid(data, height=2.3, sharey=True)
    for panel, part in grid:
        bounds = []
        for mode, mine in part.groupby("mode", sort=False):
            one, colour = mine.iloc[0], MODES[str(mode)]
            panel.step(mine["n"], mine["share"], where="post", color=colour, label=mode)
            panel.plot(mine["n"], mine["geometric"], color=colour, lw=0.8, ls=":")
            bounds.append(f"{one['alpha'] * 100:.1f} %, {one['expected']:.1f}, {one['deepest']}")
        log2_axis(panel, [0, 1, 2, 4, 8, 16, 32, 64], from_zero=True)
        panel.set_ylim(0, 1.02)
        handles = panel.get_legend_handles_labels()[0]
        panel.legend(handles, bounds, title="α, E[A], K_max", loc="lower left", fontsize=5.5, title_fontsize=5.5)
    grid.label(x="n: drafts accepted in a row", y="share of runs of at least n")
    grid.legend()
    return grid


@table("fidelity", "probe")
def fidelity_table(frames: Frames) -> Table:
    probe = frames["probe"]
    rows: list[dict[str, Any]] = []
    for model, of_model in each(probe, "charged_as"):
        for _, mode, mine in parts(of_model):
            layers = rows_of(mine, quantity="fidelity").groupby("layer")["value"].mean() * 100
            means = mine.groupby("quantity")["value"].mean()
            rows.append(
                {
                    "model": title("model", model),
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
                "model": title("model", model),
                "text": CHECKPOINT,
                "expert match, mean (%)": published.FIDELITY.get(model, {}).get("gptq", NAN) * 100,
                "acceptance (%)": published.ACCEPTANCE.get(model, NAN) * 100,
            }
        )
    what = "Expert match: share of the target's top-k experts that the draft chooses too, same position and prefix."
    line = notes.probe_line(probe)
    words = [f"{what} {STANDINS_ONLY} {line}."]
    return Table("Routing fidelity of the draft", pd.DataFrame(rows), 2, words, {"protocol": line})


@table("union", "probe")
def union_table(frames: Frames) -> Table:
    probe = rows_of(frames["probe"], quantity="union")
    blocks = []
    for model, of_model in each(probe, "charged_as"):
        by_k = of_model.groupby(["k", "mode"])["value"].mean().unstack()
        by_k = by_k[[mode for mode in MODES if mode in by_k]]
        growth = (by_k / by_k.loc[1]).add_suffix(" ×")
        block = pd.concat([by_k, growth], axis=1)
        block[CHECKPOINT] = pd.Series(published.UNION.get(model, {}), dtype=float)
        block[f"{CHECKPOINT} ×"] = pd.Series({1: 1.0, 16: published.UNION_GROWTH.get(model, NAN)})
        block = block.loc[block.index.intersection(list(UNION_KS))].reset_index().rename(columns={"k": "K"})
        block.insert(0, "model", title("model", model))
        blocks.append(block.assign(K=block["K"].astype(str)))
    line = notes.probe_line(probe)
    what = (
        "Distinct experts per MoE layer that the target needs for K consecutive tokens, mean over windows and layers; "
        f"×: over those of one token. {line}."
    )
    return Table("Expert union", pd.concat(blocks, ignore_index=True), 2, [what], {"protocol": line})


@table("runs", "probe")
def runs_table(frames: Frames) -> Table:
    rows: list[dict[str, Any]] = []
    for model, mode, mine in parts(frames["probe"]):
        lengths, alpha = run_lengths(mine), pooled_acceptance(mine)
        cumulated = lengths.cumsum() / lengths.sum()
        row: dict[str, Any] = {"model": title("model", model), "text": mode, "acceptance α (%)": alpha * 100}
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
            "text": CHECKPOINT,
            "acceptance α (%)": published.ACCEPTANCE_MEAN * 100,
            "E[A] = α/(1−α)": published.EXPECTED_RUN,
            "K_max": str(published.LARGEST_DEPTH),
        }
    )
    line = notes.probe_line(frames["probe"])
    what = (
        "α: accepted over examined drafts. A run: drafts accepted in a row until one is rejected; a text's last run, "
        "which no rejection ended, is left out, so that the mean run falls short of E[A] on short texts. K_max: the "
        f"next power of two from E[A] on. {STANDINS_ONLY} {line}."
    )
    filled = pd.DataFrame(rows).fillna(dict.fromkeys(("K_max", "median run", "9 of 10 runs up to", "runs"), "–"))
    return Table("Accepted runs and the depth they imply", filled, 2, [what], {"protocol": line})
