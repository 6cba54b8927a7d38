"""Figures from tidy tables: `python -m harness.figures tpot --out tpot.pdf tpot.png --tidy main.parquet`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from harness import probe_figures, published, rival_figures
from harness.drawing import COLOURS, MODES, NARROW, PAPER, WIDE, Bars, footer, grouped_bars, panels, save
from harness.frames import (
    DATASETS,
    HARDWARE,
    MODELS,
    SYSTEMS,
    Frames,
    budget_title,
    caveats,
    in_order,
    of_model,
    provenance,
    read,
    sampling_title,
    spread_budgets,
    tiers,
    titled,
    with_macro,
)
from harness.jobs import run_job

SPREAD = "Whiskers: least to greatest input"


def _by_dataset(frame: pd.DataFrame, column: str) -> Bars:
    """Averages over inputs and their extent, [data sets + average, systems]."""
    order = in_order(frame["system"].unique().tolist(), SYSTEMS)
    grouped = frame.groupby(["dataset", "system"])[column]
    means = with_macro(grouped.mean().unstack()[order])
    least, greatest = (found.unstack()[order].reindex(means.index) for found in (grouped.min(), grouped.max()))
    return Bars(means, least, greatest).renamed([titled(DATASETS, name) for name in means.index])


def tpot(frames: Frames) -> Figure:
    frame = spread_budgets(frames["main"])
    samplings, budgets = tiers(frame)
    figure, axes = panels(len(samplings), len(budgets), WIDE, 2.1 * len(samplings) + 0.3, sharey=True)
    for row, sampling in zip(axes, samplings, strict=True):
        for panel, budget in zip(row, budgets, strict=True):
            part = frame[(frame["sampling"] == sampling) & (frame["budget"] == budget)]
            bars = _by_dataset(part, "tpot_ms")
            centres = grouped_bars(panel, bars, COLOURS, SYSTEMS, rotation=90)
            floors = _by_dataset(part, "floor_trace_ms").means
            for system in floors.columns.intersection(["specter", "lru"]):
                half = 0.36 / len(bars.means.columns)
                panel.hlines(
                    floors[system],
                    centres[system] - half,
                    centres[system] + half,
                    color="black",
                    lw=1.1,
                    label="floor_trace" if system == "specter" else "",
                )
            panel.set_title(f"{budget_title(frame, budget)}, {sampling_title(frame, sampling)}")
        row[0].set_ylabel("TPOT (ms per token)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels) if len(labels) < 6 else 4)
    footer(figure, "\n".join([f"{provenance(frame)}. {SPREAD}.", *caveats(frame)]))
    return figure


def models(frames: Frames) -> Figure:
    frame = spread_budgets(frames["main"])
    samplings, _ = tiers(frame)
    named = in_order(frame["charged_as"].unique().tolist(), MODELS)
    figure, axes = panels(len(samplings), len(named), WIDE, 2.2 * len(samplings) + 0.3, sharey="col")
    order = in_order(frame["system"].unique().tolist(), SYSTEMS)
    for row, sampling in zip(axes, samplings, strict=True):
        for panel, model in zip(row, named, strict=True):
            part = frame[(frame["sampling"] == sampling) & (frame["charged_as"] == model)]
            times = part.groupby(["budget", "system", "dataset"])["tpot_ms"].mean().groupby(["budget", "system"]).mean()
            budgets = tiers(part)[1]
            means = times.unstack().reindex(columns=order).loc[budgets]  # no bar where a model does not run a system
            bars = Bars(means).renamed([budget_title(part, one).replace(" (", "\n(") for one in budgets])
            grouped_bars(panel, bars, COLOURS, SYSTEMS, label_all=True, rotation=90)
            k = part.loc[part["speculative"], "k"].max()
            panel.set_title(f"{titled(MODELS, model)}, K = {k},\n{sampling_title(frame, sampling)}", fontsize=7.5)
        row[0].set_ylabel("TPOT (ms per token)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    average = "Macro average over each model's own data sets."
    footer(figure, "\n".join([f"{provenance(frame)}. {average}", *caveats(frame)]))
    return figure


def speedup(frames: Frames) -> Figure:
    frame = spread_budgets(frames["main"])
    samplings, budgets = tiers(frame)
    baselines = [name for name in ("lru", "mixtral_offloading", "on_demand") if name in set(frame["system"])]
    cells = {f"{budget}, {sampling}": (budget, sampling) for budget in budgets for sampling in samplings}
    colours = dict(zip(cells, ["#0072B2", "#7fb8d8", "#D55E00", "#f0b27a"], strict=False))
    figure, axes = panels(len(baselines), 1, WIDE, 1.5 * len(baselines) + 0.3)
    for (panel,), baseline in zip(axes, baselines, strict=True):
        means, least, greatest = {}, {}, {}
        for name, (budget, sampling) in cells.items():
            part = frame[(frame["budget"] == budget) & (frame["sampling"] == sampling)]
            times = part.pivot_table(index=["dataset", "input"], columns="system", values="tpot_ms")
            averages = times.groupby("dataset").mean()
            means[name] = with_macro((averages[baseline] / averages["specter"]).to_frame("x"))["x"]
            ratios = (times[baseline] / times["specter"]).groupby("dataset")
            least[name], greatest[name] = ratios.min(), ratios.max()
        table = pd.DataFrame(means)
        extent = (pd.DataFrame(found).reindex(table.index) for found in (least, greatest))
        bars = Bars(table, *extent).renamed([titled(DATASETS, name) for name in table.index])
        grouped_bars(panel, bars, colours, {name: name for name in cells}, "{:.2f}")
        panel.axhline(1, color="black", lw=0.8)
        panel.set_title(f"Specter against {titled(SYSTEMS, baseline)}")
        panel.set_ylabel("speed-up (×)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    stated = f"{provenance(frame)}. Speed-up: ratio of mean TPOTs. {SPREAD}, of the ratio per input."
    footer(figure, "\n".join([stated, *caveats(frame)]))
    return figure


def acceptance(frames: Frames) -> Figure:
    frame = frames["main"]
    frame = frame[frame["speculative"] & (frame["budget"] == frame["budget"].iloc[0])]
    figure, ((panel,),) = panels(1, 1, NARROW, 2.3)
    datasets = in_order(frame["dataset"].unique().tolist(), DATASETS)
    for offset, sampling in zip((-0.12, 0.12), sorted(frame["sampling"].unique()), strict=False):
        grouped = frame[frame["sampling"] == sampling].groupby("dataset")["acceptance"]
        mean, least, greatest = (found[datasets] * 100 for found in (grouped.mean(), grouped.min(), grouped.max()))
        panel.errorbar(
            np.arange(len(datasets)) + offset,
            mean,
            yerr=[mean - least, greatest - mean],
            fmt="o",
            color=MODES[sampling],
            elinewidth=0.8,
            label=sampling,
        )
    forced = frames["probe"].query("quantity == 'acceptance' and mode == 'teacher-forced'")["value"] * 100
    if len(forced):
        label = f"teacher-forced, held-out text ({forced.mean():.1f})"
        panel.axhline(forced.mean(), color=MODES["teacher-forced"], lw=1, label=label)
    panel.axhline(published.ACCEPTANCE_MEAN * 100, color=PAPER, lw=1, ls="--", label="paper: mean of its models (96.6)")
    given = published.ACCEPTANCE.get(frame["charged_as"].iloc[0])
    if given is not None:
        panel.axhline(given * 100, color=PAPER, lw=1, ls=":", label=f"paper: this model, up to ({given * 100:.0f})")
    panel.set_xticks(range(len(datasets)), [titled(DATASETS, name) for name in datasets])
    panel.set_ylabel("draft tokens accepted (%)")
    panel.set_xlim(-0.5, len(datasets) - 0.5)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    k = ", ".join(str(k) for k in sorted(frame["k"].unique()))
    footer(figure, "\n".join([f"{provenance(frame)}; K = {k}; axis does not start at 0. {SPREAD}.", *caveats(frame)]))
    return figure


def k_sweep(frames: Frames) -> Figure:
    frame = frames["k_sweep"]
    samplings, budgets = tiers(frame)
    figure, axes = panels(len(samplings), len(budgets), WIDE, 1.9 * len(samplings) + 0.3, sharey=True, sharex=True)
    for row, sampling in zip(axes, samplings, strict=True):
        for panel, budget in zip(row, budgets, strict=True):
            part = frame[(frame["sampling"] == sampling) & (frame["budget"] == budget)]
            mine = part[part["system"] == "specter"].groupby(["k", "dataset"]).mean(numeric_only=True)
            by_k = mine.groupby("k").agg(["mean", "min", "max"])
            panel.fill_between(by_k.index, by_k["tpot_ms"]["min"], by_k["tpot_ms"]["max"], color=COLOURS["specter"],
                               alpha=0.15, lw=0)  # fmt: skip
            panel.plot(by_k.index, by_k["tpot_ms"]["mean"], "o-", color=COLOURS["specter"], label="Specter")
            panel.plot(
                by_k.index,
                by_k["floor_trace_ms"]["mean"],
                "--",
                color="black",
                lw=1,
                label="floor_trace (Specter's routing)",
            )
            panel.plot(by_k.index, by_k["floor_ideal_ms"]["mean"], ":", color="black", lw=1, label="floor_ideal")
            for system in ("specter_deadline", "specmoeoff_tuned"):
                other = part[part["system"] == system].groupby("k")["tpot_ms"].mean()
                if len(other):  # not every model runs it
                    panel.plot(other.index, other, "o-", ms=3, color=COLOURS[system], label=SYSTEMS[system])
            rival = part[part["system"] == "lru"]["tpot_ms"].mean()
            panel.axhline(rival, color=COLOURS["lru"], label="LRU, equal bytes")
            given = published.DEPTH[frame["charged_as"].iloc[0]]
            panel.axvline(given, color="#bbbbbb", lw=0.8, label="K of the paper")
            panel.set_xscale("log", base=2)
            panel.set_xticks(by_k.index, [str(k) for k in by_k.index])
            panel.minorticks_off()
            panel.set_title(f"{budget_title(frame, budget)}, {sampling_title(frame, sampling)}")
        row[0].set_ylabel("TPOT (ms per token)")
    axes[0][0].set_ylim(bottom=0)
    for panel in axes[-1]:
        panel.set_xlabel("K: draft tokens per round")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    footer(
        figure,
        "\n".join(
            [f"{provenance(frame)}. Lines: mean over data sets; band: least to greatest data set.", *caveats(frame)]
        ),
    )
    return figure


def budget_sweep(frames: Frames) -> Figure:
    frame = frames["budget_sweep"]
    figure, ((times, hits),) = panels(1, 2, WIDE, 2.3)
    slots = frame[frame["system"] == "specter"].groupby("budget")["experts_per_layer"].first()  # what a budget buys
    ticks = sorted(slots.unique())
    for system in in_order(frame.loc[frame["uses_budget"], "system"].unique().tolist(), SYSTEMS):
        mine = frame[frame["system"] == system]
        mine = mine.groupby(mine["budget"].map(slots)).mean(numeric_only=True)
        times.plot(mine.index, mine["tpot_ms"], "o-", color=COLOURS[system], label=SYSTEMS[system], ms=3)
        if system in ("specter", "lru"):
            label = f"floor_trace of {SYSTEMS[system]}"
            times.plot(mine.index, mine["floor_trace_ms"], "--", color=COLOURS[system], lw=0.9, label=label)
        if system != "on_demand":
            hits.plot(mine.index, mine["hit_rate"] * 100, "o-", color=COLOURS[system], ms=3)
    ceiling = frame.loc[~frame["uses_budget"], "tpot_ms"]
    if len(ceiling):
        times.axhline(ceiling.mean(), color=COLOURS["resident"], lw=1, label=SYSTEMS["resident"])
    times.set_ylabel("TPOT (ms per token)")
    hits.set_ylabel("hit rate (%)")
    for panel in (times, hits):
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, ["2 slots" if tick < 1 else "" if tick == 48 else f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
        panel.set_xlabel("budget (BF16 experts per MoE layer)")
    figure.legend(*times.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    k = ", ".join(str(k) for k in sorted(frame.loc[frame["speculative"], "k"].unique()))
    footer(figure, "\n".join([f"{provenance(frame)}; K = {k}. Mean over data sets.", *caveats(frame)]))
    return figure


def hardware(frames: Frames) -> Figure:
    frame = spread_budgets(frames["hardware"])
    _, budgets = tiers(frame)
    figure, axes = panels(1, len(budgets), WIDE, 2.3, sharey=True)
    order = in_order(frame["system"].unique().tolist(), SYSTEMS)
    for panel, budget in zip(axes[0], budgets, strict=True):
        part = frame[(frame["budget"] == budget) & frame["fits_device"].astype(bool)]
        means = part.groupby(["hardware", "system"])["tpot_ms"].mean().unstack()[order]
        means = means.loc[in_order(means.index.tolist(), HARDWARE)]
        bars = Bars(means).renamed([titled(HARDWARE, name).replace(", ", "\n") for name in means.index])
        grouped_bars(panel, bars, COLOURS, SYSTEMS, label_all=True)
        panel.set_title(budget_title(frame, budget))
    axes[0][0].set_ylabel("TPOT (ms per token)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    k = ", ".join(str(k) for k in sorted(frame.loc[frame["speculative"], "k"].unique()))
    footer(figure, "\n".join([f"{provenance(frame)}; K = {k}. Mean over data sets.", *caveats(frame)]))
    return figure


DRAW: dict[str, Callable[[Frames], Figure]] = {
    draw.__name__: draw
    for draw in (
        models,
        tpot,
        speedup,
        acceptance,
        k_sweep,
        budget_sweep,
        hardware,
        *probe_figures.DRAW,
        *rival_figures.DRAW,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", choices=DRAW)
    parser.add_argument("model", nargs="?", help="for a figure that shows one model")
    parser.add_argument("--out", type=Path, nargs="+", required=True)
    parser.add_argument("--tidy", type=Path, nargs="+", required=True)
    arguments = parser.parse_args()
    frames = read(arguments.tidy)
    save(
        DRAW[arguments.figure](frames if arguments.model is None else of_model(frames, arguments.model)), arguments.out
    )
    print(f"wrote {', '.join(map(str, arguments.out))}")


if __name__ == "__main__":
    run_job(main)
