"""Figures of the probes: fidelity by layer, position and margin, expert union, accepted runs."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from harness import published
from harness.drawing import MODES, NARROW, PAPER, WIDE, footer, panels
from harness.frames import METHODS, MODELS, Frames, fidelity_line, in_order, probe_line, titled
from harness.probe_tables import models, pooled_acceptance, run_lengths
from specter.probes.routing import expected_run, largest_useful_depth

METHOD_COLOURS = {
    "gptq": "#0072B2",
    "awq": "#E69F00",
    "rtn": "#9a9a9a",
    "q8_0": "#009E73",
    "q4_k": "#56B4E9",
    "q2_k": "#D55E00",
}
POSITIONS_TOGETHER = 8  # a point of the curve over positions


def fidelity(frames: Frames) -> Figure:
    frame = frames["probe"].query("quantity == 'fidelity'")
    named = models(frame)
    figure, axes = panels(1, len(named), NARROW if len(named) == 1 else WIDE, 2.2, sharey=True)
    for panel, model in zip(axes[0], named, strict=True):
        of_model = frame[frame["charged_as"] == model]
        for mode, colour in MODES.items():
            layers = of_model[of_model["mode"] == mode].groupby("layer")["value"].mean() * 100
            if len(layers):
                panel.plot(layers.index, layers, color=colour, marker="o", ms=2.5, label=mode)
        share = published.FIDELITY.get(model, {}).get("gptq")
        if share is not None:
            panel.axhline(share * 100, color=PAPER, lw=1, ls="--", label="paper, real checkpoint, mean")
        panel.set_xlabel("MoE layer")
        panel.set_title(titled(MODELS, model))
    axes[0][0].set_ylabel("experts chosen alike (%)")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    what = "Share of the target's top-k experts that the draft chooses too, same position and prefix"
    footer(figure, f"{what}; axis does not start at 0. {probe_line(frame)}.")
    return figure


def methods(frames: Frames) -> Figure:
    frame = frames["fidelity"]
    named = models(frame)
    figure, axes = panels(len(named), 3, WIDE, 1.9 * len(named) + 0.3, sharey=True)
    for (by_layer, by_position, by_margin), model in zip(axes, named, strict=True):
        of_model = frame[frame["charged_as"] == model]
        for method in in_order(of_model["method"].unique().tolist(), METHODS):
            mine, colour = of_model[of_model["method"] == method], METHOD_COLOURS[method]
            layers = mine[mine["quantity"] == "set_match"].groupby("layer")["value"].mean() * 100
            by_layer.plot(layers.index, layers, color=colour, label=titled(METHODS, method))
            steps = mine[mine["quantity"] == "position"]
            together = steps.groupby(steps["position"] // POSITIONS_TOGETHER * POSITIONS_TOGETHER)
            weighted = together[["value", "num"]].apply(lambda part: np.average(part["value"], weights=part["num"]))
            by_position.plot(weighted.index + POSITIONS_TOGETHER / 2, weighted * 100, color=colour)
            bins = mine[mine["quantity"] == "margin"]
            by_margin.plot(bins["margin"], bins["value"] * 100, color=colour, marker="o", ms=2.5)
        by_layer.set_ylabel(f"{titled(MODELS, model)}\nexperts chosen alike (%)")
        by_margin.set_xscale("log")
    for panel, label in zip(
        axes[-1], ("MoE layer", "generated position", "router margin of the target (logits)"), strict=True
    ):
        panel.set_xlabel(label)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    what = (
        "Share of the target's top-k experts that the draft chooses too. Margin: the k-th router logit less the next, "
        "ten equally filled bins; axis does not start at 0"
    )
    footer(figure, f"{what}. {fidelity_line(frame)}.")
    return figure


def union(frames: Frames) -> Figure:
    frame = frames["probe"].query("quantity == 'union'")
    named = models(frame)
    figure, axes = panels(1, len(named), NARROW if len(named) == 1 else WIDE, 2.3)
    for panel, model in zip(axes[0], named, strict=True):
        of_model = frame[frame["charged_as"] == model]
        for mode, colour in MODES.items():
            by_k = of_model[of_model["mode"] == mode].groupby("k")["value"].mean()
            if len(by_k):
                panel.plot(by_k.index, by_k, color=colour, label=f"{mode} (× {by_k.get(16, np.nan) / by_k[1]:.2f})")
        given = published.UNION.get(model, {})
        panel.plot(list(given), list(given.values()), "*", color=PAPER, ms=9, ls="none",
                   label=f"paper (× {published.UNION_GROWTH.get(model, np.nan):.2f})")  # fmt: skip
        panel.set_xscale("log", base=2)
        panel.set_xticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
        panel.set_ylim(bottom=0)
        panel.set_xlabel("K: consecutive tokens")
        panel.set_title(titled(MODELS, model))
        panel.legend(loc="upper left")
    axes[0][0].set_ylabel("distinct experts per layer")
    what = "Experts that the target needs for K consecutive tokens, mean over windows and layers; ×: from K = 1 to 16"
    footer(figure, f"{what}; paper: real checkpoint. {probe_line(frame)}.")
    return figure


def runs(frames: Frames) -> Figure:
    frame = frames["probe"]
    named = models(frame)
    figure, axes = panels(1, len(named), NARROW if len(named) == 1 else WIDE, 2.3, sharey=True)
    for panel, model in zip(axes[0], named, strict=True):
        for mode, colour in MODES.items():
            mine = frame[(frame["charged_as"] == model) & (frame["mode"] == mode)]
            lengths = run_lengths(mine)
            alpha = pooled_acceptance(mine) if len(lengths) else 1.0
            if alpha >= 1:
                continue
            n = np.arange(lengths.index.max() + 1)
            longer = lengths[::-1].cumsum().reindex(n, method="bfill") / lengths.sum()
            expected, deepest = expected_run(alpha), largest_useful_depth(alpha)
            label = f"{mode}: α = {alpha * 100:.1f} %, E[A] = {expected:.1f}, K_max = {deepest}"
            panel.step(n, longer, where="post", color=colour, label=label)
            panel.plot(n, alpha**n, color=colour, lw=0.8, ls=":")
        panel.set_xscale("symlog", base=2, linthresh=1)
        panel.set_xticks([0, 1, 2, 4, 8, 16, 32, 64], ["0", "1", "2", "4", "8", "16", "32", "64"])
        panel.set_ylim(0, 1.02)
        panel.set_xlabel("n: drafts accepted in a row")
        panel.set_title(titled(MODELS, model))
        panel.legend(loc="lower left", fontsize=5.5)
    axes[0][0].set_ylabel("share of runs of at least n")
    what = "Dotted: runs if every draft were accepted with probability α, independently. A text's last run is left out"
    footer(figure, f"{what}. {probe_line(frame)}.")
    return figure


DRAW = (fidelity, methods, union, runs)
