"""The probe of the draft: routing fidelity by layer, expert union by K, lengths of accepted runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import MODES, NARROW, PAPER, WIDE, Grid, log2_axis
from harness.plotting.frames import Frames, blocks, rows_of, split, table_rows
from harness.plotting.tables import Table
from harness.plotting.titles import title
from harness.studies import published
from harness.studies.registry import figure, table
from specter.probes.routing import expected_run, largest_useful_depth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAN = float("nan")
CHECKPOINT = "paper, real checkpoint"
STANDINS_ONLY = "A stand-in's fidelity does not predict the real checkpoint's; the paper's numbers are for orientation."
UNION_KS = (1, 2, 4, 8, 16, 32)


def with_paper(data: pd.DataFrame, paper: Callable[[str], pd.DataFrame]) -> pd.DataFrame:
    """The rows of a figure, those that `paper` gives for each model below them, and the titles of panels."""
    given = [paper(model).assign(model=model, mode="paper") for model in data["model"].unique()]
    data = pd.concat([data, *(block for block in given if len(block))], ignore_index=True)
    return data.assign(panel=[title("model", model) for model in data["model"]])


def model_grid(data: pd.DataFrame, **options: Any) -> Grid:
    """A row of panels, one per model."""
    return Grid(data, columns="model", width=NARROW if data["model"].nunique() == 1 else WIDE, **options)


def probe_footer(what: str, quantity: str = "") -> Callable[[Frames], list[str]]:
    """The footer of a figure of the probe: what is shown, and the provenance of the rows of one quantity."""

    def footer(frames: Frames) -> list[str]:
        probe = frames["probe"]
        rows = rows_of(probe, quantity=quantity) if quantity else probe
        return [f"{what}. {notes.probe_line(rows)}."]

    return footer


def fidelity_data(frames: Frames) -> pd.DataFrame:
    """[model, panel, mode, layer (none: the paper's mean), value]: experts chosen alike, in per cent."""
    data = blocks(
        rows_of(frames["probe"], quantity="fidelity"),
        ["charged_as", "mode"],
        lambda mine: (mine.groupby("layer")["value"].mean() * 100).reset_index(),
    )
    return with_paper(data, lambda model: pd.DataFrame({"value": [_paper_match(model)]}).dropna())


def _paper_match(model: str) -> float:
    """The paper's expert match of a model, in per cent, or NaN."""
    return published.FIDELITY.get(model, {}).get("gptq", NAN) * 100


@figure(
    "fidelity", "probe", minutes=5, data=fidelity_data, draws_published=True,
    key="Same position and prefix. The axis does not start at 0.",
    footer=probe_footer(
        "Share of the target's top-k experts that the draft chooses too, same position and prefix; the axis does not "
        "start at 0", "fidelity",
    ),
    about="experts that draft and target choose alike, per layer",
)  # fmt: skip
def draw_fidelity(data: pd.DataFrame) -> Grid:
    grid = model_grid(data, height=2.2, sharey=True, x="MoE layer", y="experts chosen alike (%)", legend=True)
    for panel, part in grid:
        for mode, mine in part.groupby("mode", sort=False):
            if mode == "paper":
                panel.axhline(mine["value"].iloc[0], color=PAPER, lw=1, ls="--", label="paper, real checkpoint, mean")
            else:
                panel.plot(mine["layer"], mine["value"], color=MODES[str(mode)], marker="o", ms=2.5, label=mode)
    return grid


def union_data(frames: Frames) -> pd.DataFrame:
    """[model, panel, mode, k, value, growth]: distinct experts per layer; growth: from K = 1 to 16.

    Where the paper gives the growth only, its value at K = 16 is that times those of one token, which are top-k.
    """

    def by_k(mine: pd.DataFrame) -> pd.DataFrame:
        means = mine.groupby("k")["value"].mean()
        return means.reset_index().assign(growth=means.get(16, NAN) / means[1])

    data = blocks(rows_of(frames["probe"], quantity="union"), ["charged_as", "mode"], by_k)

    def paper(model: str) -> pd.DataFrame:
        growth = published.UNION_GROWTH.get(model, NAN)
        one = rows_of(data, model=model, k=1)["value"].mean()
        given = published.UNION.get(model, {1: one, 16: one * growth})
        return pd.DataFrame({"k": list(given), "value": list(given.values()), "growth": growth})

    return with_paper(data, paper)


@figure(
    "union", "probe", minutes=5, data=union_data, draws_published=True,
    key="×: growth from K = 1 to 16. Stars: the paper's; of Qwen and Phi its growth times their top-k.",
    footer=probe_footer(
        "Experts that the target needs for K consecutive tokens, mean over windows and layers; ×: from K = 1 to 16; "
        "paper: real checkpoint", "union",
    ),
    about="distinct experts per layer against K, beside the paper's",
)  # fmt: skip
def draw_union(data: pd.DataFrame) -> Grid:
    grid = model_grid(
        data, height=2.3, sharex=True, x="K: consecutive tokens", y="distinct experts per layer", legend=True
    )
    for panel, part in grid:
        growths: list[str] = []
        for mode, mine in part.groupby("mode", sort=False):
            growths.append(f"{mode} × {mine['growth'].iloc[0]:.2f}")
            if mode == "paper":
                panel.plot(mine["k"], mine["value"], "*", color=PAPER, ms=9, ls="none", label=mode)
            else:
                panel.plot(mine["k"], mine["value"], color=MODES[str(mode)], label=mode)
        log2_axis(panel, UNION_KS)
        panel.set_ylim(bottom=0)
        _list_below_title(panel, [", ".join(growths[at : at + 2]) for at in range(0, len(growths), 2)])
    return grid


def _list_below_title(panel: Axes, lines: list[str]) -> None:
    """Writes a line per series between a panel and its title."""
    panel.set_title(panel.get_title(loc="left"), pad=4 + 7.2 * len(lines))
    panel.annotate("\n".join(lines), (0, 1), (0, 2), xycoords="axes fraction", textcoords="offset points",
                   fontsize=5.8, va="bottom", linespacing=1.2)  # fmt: skip


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

    A model and mode without a rejection has no rows. Of the paper there is the geometric law at its mean acceptance.
    """

    def share(mine: pd.DataFrame) -> pd.DataFrame:
        lengths = run_lengths(mine)
        alpha = pooled_acceptance(mine) if len(lengths) else 1.0
        if alpha >= 1:
            return pd.DataFrame()
        n = np.arange(lengths.index.max() + 1)
        longer = lengths[::-1].cumsum().sort_index().reindex(n, method="bfill") / lengths.sum()
        block = pd.DataFrame({"n": n, "share": longer.to_numpy(), "geometric": alpha**n})
        return block.assign(alpha=alpha, expected=expected_run(alpha), deepest=largest_useful_depth(alpha))

    def paper(model: str) -> pd.DataFrame:
        n = np.arange(published.LARGEST_DEPTH * 2 + 1)
        given = {"expected": published.EXPECTED_RUN, "deepest": published.LARGEST_DEPTH}
        return pd.DataFrame({"n": n, "geometric": published.ACCEPTANCE_MEAN**n}).assign(
            alpha=published.ACCEPTANCE_MEAN, **given
        )

    return with_paper(blocks(frames["probe"], ["charged_as", "mode"], share), paper)


@figure(
    "runs", "probe", minutes=5, data=runs_data, draws_published=True,
    key="Dotted: runs if every draft were accepted with probability α, independently.",
    footer=probe_footer(
        "Dotted: runs if every draft were accepted with probability α, independently. A text's last run is left out"
    ),
    about="accepted runs against the geometric law, with E[A] and K_max",
)  # fmt: skip
def draw_runs(data: pd.DataFrame) -> Grid:
    labels = {"x": "n: drafts accepted in a row", "y": "share of runs of at least n"}
    grid = model_grid(data, height=2.3, sharey=True, legend=True, **labels)
    for panel, part in grid:
        bounds = []
        for mode, mine in part.groupby("mode", sort=False):
            one, colour = mine.iloc[0], MODES.get(str(mode), PAPER)
            if mode != "paper":
                panel.step(mine["n"], mine["share"], where="post", color=colour, label=mode)
            law = "paper's mean acceptance, real checkpoints" if mode == "paper" else ""
            panel.plot(mine["n"], mine["geometric"], color=colour, lw=1.0, ls=":", label=law)
            bounds.append(
                f"{mode}: α {one['alpha'] * 100:.1f} %, E[A] {one['expected']:.1f}, K_max {one['deepest']:.0f}"
            )
        log2_axis(panel, [0, 1, 4, 16, 64], from_zero=True)
        panel.set_ylim(0, 1.02)
        _list_below_title(panel, bounds)
    return grid


def _fidelity(mine: pd.DataFrame) -> dict[str, Any]:
    """One model and kind of text."""
    layers = rows_of(mine, quantity="fidelity").groupby("layer")["value"].mean() * 100
    means = mine.groupby("quantity")["value"].mean()
    return {
        "expert match, mean (%)": layers.mean(),
        "worst layer (%)": layers.min(),
        "best layer (%)": layers.max(),
        "acceptance (%)": means["acceptance"] * 100,
        "distinct 4-grams": means["distinct_4grams"],
    }


def _probe_table(heading: str, rows: pd.DataFrame, what: str, line: str) -> Table:
    return Table(heading, rows, 2, [f"{what} {line}."], {"protocol": line})


@table("fidelity", "probe")
def fidelity_table(frames: Frames) -> Table:
    probe = frames["probe"]
    parts = []
    for named, of_model in split(probe, "charged_as"):
        model = named["model"]
        paper = {
            "model": title("model", model),
            "text": CHECKPOINT,
            "expert match, mean (%)": _paper_match(model),
            "acceptance (%)": published.ACCEPTANCE.get(model, NAN) * 100,
        }
        parts += [table_rows(of_model, ["charged_as", "mode"], _fidelity), pd.DataFrame([paper])]
    what = "Expert match: share of the target's top-k experts that the draft chooses too, same position and prefix."
    rows, line = pd.concat(parts, ignore_index=True), notes.probe_line(probe)
    return _probe_table("Routing fidelity of the draft", rows, f"{what} {STANDINS_ONLY}", line)


@table("union", "probe")
def union_table(frames: Frames) -> Table:
    probe = rows_of(frames["probe"], quantity="union")
    parts = []
    for named, of_model in split(probe, "charged_as"):
        model = named["model"]
        by_k = of_model.groupby(["k", "mode"])["value"].mean().unstack()
        block = pd.concat([by_k, (by_k / by_k.loc[1]).add_suffix(" ×")], axis=1)
        block[CHECKPOINT] = pd.Series(published.UNION.get(model, {}), dtype=float)
        block[f"{CHECKPOINT} ×"] = pd.Series({1: 1.0, 16: published.UNION_GROWTH.get(model, NAN)})
        block = block.loc[block.index.intersection(list(UNION_KS))].reset_index(names="K")
        block.insert(0, "model", title("model", model))
        parts.append(block.assign(K=block["K"].astype(str)))
    what = (
        "Distinct experts per MoE layer that the target needs for K consecutive tokens, mean over windows and layers; "
        "×: over those of one token."
    )
    return _probe_table("Expert union", pd.concat(parts, ignore_index=True), what, notes.probe_line(probe))


def _runs(mine: pd.DataFrame) -> dict[str, Any]:
    """Accepted runs of one model and kind of text."""
    lengths, alpha = run_lengths(mine), pooled_acceptance(mine)
    cumulated = lengths.cumsum() / lengths.sum()
    row: dict[str, Any] = {"acceptance α (%)": alpha * 100}
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
    return row


@table("runs", "probe")
def runs_table(frames: Frames) -> Table:
    paper = {
        "model": "mean of its models",
        "text": CHECKPOINT,
        "acceptance α (%)": published.ACCEPTANCE_MEAN * 100,
        "E[A] = α/(1−α)": published.EXPECTED_RUN,
        "K_max": str(published.LARGEST_DEPTH),
    }
    rows = pd.concat([table_rows(frames["probe"], ["charged_as", "mode"], _runs), pd.DataFrame([paper])])
    filled = rows.fillna(dict.fromkeys(("K_max", "median run", "9 of 10 runs up to", "runs"), "–"))
    what = (
        "α: accepted over examined drafts. A run: drafts accepted in a row until one is rejected; a text's last run, "
        "which no rejection ended, is left out, so that the mean run falls short of E[A] on short texts. K_max: the "
        f"next power of two from E[A] on. {STANDINS_ONLY}"
    )
    return _probe_table("Accepted runs and the depth they imply", filled, what, notes.probe_line(frames["probe"]))
