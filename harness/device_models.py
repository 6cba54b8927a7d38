"""Figures of what was measured beside the rounds: every model in 16 bits and INT4, and the virtual clock's error.

From `data/reference/<machine>/{families_*,clock}.json`; drawn by `harness.device`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from harness.device_records import read_record
from harness.drawing import COLOURS, WIDE, footer, panels
from harness.frames import MODELS, SYSTEMS, in_order, titled
from harness.scales import Values
from specter.errors import SpecterError

# Bars of a panel: label, colour, and the row of the bench's table or the key of its summary.
STEPS = {
    "16 bit": ("#9a9a9a", "plain decoding, all resident, BF16"),
    "INT4, unfused": ("#56B4E9", "draft step, graph, 1 row, INT4 unfused"),
    "INT4, fused": ("#0072B2", "draft step, graph, 1 row, INT4"),
}
LAYERS = {
    "16 bit": ("#9a9a9a", "experts of a layer: BF16 grouped, 2 launches"),
    "INT4, unfused": ("#56B4E9", "experts of a layer: INT4 reference (torch: dequantise, multiply)"),
    "INT4, fused": ("#0072B2", "experts of a layer: INT4 fused, 2 launches"),
}
OFFLOADED = {
    "16 bit, LRU": ("#9a9a9a", "tpot_ms.lru"),
    "INT4 draft, unfused": ("#56B4E9", "tpot_ms.specter_deadline.unfused"),
    "INT4 draft, fused": ("#0072B2", "tpot_ms.specter_deadline"),
}


def read_families(directory: Path) -> dict[str, Values]:
    """Records by model, in the order of `MODELS`.

    Raises:
        SpecterError: no model was measured, or a model's tokens differ from plain decoding's.
    """
    found = {path.stem.removeprefix("families_"): path for path in directory.glob("families_*.json")}
    if not found:
        raise SpecterError(f"{directory} has no families_*.json", "measure: python -m bench families model=...")
    records = {model: read_record(found[model]) for model in in_order(list(found), MODELS)}
    for model, content in records.items():
        demand_equal(found[model], content["summary"], "bit_equal.texts")
    return records


def demand_equal(path: Path, summary: dict[str, Any], key: str) -> None:
    """Raises SpecterError if the record of `path` does not say that tokens were plain decoding's."""
    if summary.get(key) is not True:
        raise SpecterError(
            f"{path}: {key} is not true, its tokens were not shown to equal plain decoding's",
            f"find out why, and measure again: python -m bench {path.stem.partition('_')[0]}",
        )


def median_of(content: Values, name: str) -> float:
    """The median of a row of the bench's table; NaN without it."""
    return next((float(row["median"]) for row in content["table"] if row["name"] == name), float("nan"))


def families(directory: Path) -> Figure:
    """A token's step with everything resident, one layer's experts, and a token where experts are offloaded."""
    records = read_families(directory)
    figure, axes = panels(1, 3, WIDE, 2.2)
    shown = (
        ("all on the GPU: ms per step", STEPS, median_of),
        ("experts of a layer, 1 row: µs", LAYERS, median_of),
        ("offloaded: TPOT, ms per token", OFFLOADED, lambda content, key: content["summary"].get(key, np.nan)),
    )
    for panel, (title, bars, read) in zip(axes[0], shown, strict=True):
        for index, (label, (colour, name)) in enumerate(bars.items()):
            heights = [read(content, name) for content in records.values()]
            x = np.arange(len(records)) + (index - 1) * 0.27
            panel.bar(x, heights, 0.25, color=colour, label=label)
            for position, height in zip(x, heights, strict=True):
                if np.isfinite(height):
                    text = f"{height:.3g}" if height < 1000 else f"{height:.0f}"
                    panel.annotate(
                        text, (position, height), (0, 2), textcoords="offset points", ha="center", fontsize=5.5
                    )
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.margins(y=0.3)  # room for the legend
        panel.set_title(title, fontsize=7.2)
        names = [titled(MODELS, model).replace("-", "-\n", 1) for model in records]
        panel.set_xticks(range(len(records)), names, fontsize=6)
        panel.legend(fontsize=5.5, loc="upper left")
    axes[0][0].set_ylabel("time (log)")
    sources = [_source(model, content) for model, content in records.items()]
    footer(
        figure,
        "Device clock; medians of 5; inflated stand-ins; greedy, all tokens equal resident plain decoding's. "
        "Unfused: experts chosen one by one and dequantised in plain torch, in a CUDA graph. Offloaded: published high "
        f"budget and K, equal slots.\n{' '.join(sources)}",
    )
    return figure


def _source(model: str, content: Values) -> str:
    where = content["provenance"]
    return f"{titled(MODELS, model)}: {where['gpu']}; slots: {content['facts']['slots']}; commit {where['commit'][:7]}."


def read_clock(directory: Path) -> tuple[Values, pd.DataFrame]:
    """Provenance, and a row per run with what it took and what it is charged."""
    content = read_record(directory / "clock.json")
    frame = pd.DataFrame(content["facts"]["cells"])
    return content["provenance"], frame.assign(ratio=frame["charged_tpot_ms"] / frame["measured_tpot_ms"])


def clock_line(where: Values, frame: pd.DataFrame) -> str:
    """Provenance of the comparison of clocks."""
    models = " and ".join(titled(MODELS, model) for model in in_order(frame["model"].unique().tolist(), MODELS))
    prompts = len(frame[["dataset", "input"]].drop_duplicates())
    return (
        f"{len(frame)} runs of {prompts} prompt{'s' * (prompts > 1)}, {where['max_new_tokens']} tokens each, measured "
        f"once on {where['gpu']} (commit {where['commit']}; inflated stand-ins of {models}), and their recordings "
        f"replayed by the virtual clock of conf/hardware/{where['hardware']}.yaml, whose rates come from other runs on "
        "such a machine"
    )


def clock(directory: Path) -> Figure:
    """Charged against measured TPOT, run by run; and the ratio, system by system."""
    where, frame = read_clock(directory)
    figure, axes = panels(1, 2, WIDE, 2.6)
    scatter, strip = axes[0]
    systems = in_order(frame["system"].unique().tolist(), SYSTEMS)
    models = in_order(frame["model"].unique().tolist(), MODELS)
    for row, system in enumerate(systems):
        mine = frame[frame["system"] == system]
        colour = COLOURS.get(system, "#555555")
        for model, marker in zip(models, "o^s", strict=False):
            part = mine[mine["model"] == model]
            scatter.scatter(part["measured_tpot_ms"], part["charged_tpot_ms"], s=11, color=colour, lw=0, marker=marker)
            strip.scatter(part["ratio"], [row] * len(part), s=11, color=colour, lw=0, marker=marker)
        strip.plot([mine["ratio"].median()] * 2, [row - 0.3, row + 0.3], color="#222222", lw=1)
    least, most = frame["measured_tpot_ms"].min() * 0.8, frame["measured_tpot_ms"].max() * 1.25
    line = np.array([least, most])
    scatter.plot(line, line, color="#222222", lw=0.8)
    scatter.fill_between(line, line * 0.9, line * 1.1, color="#dddddd", lw=0, zorder=0)
    scatter.set(xscale="log", yscale="log")
    for axis in (scatter.xaxis, scatter.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    for model, marker in zip(models, "o^s", strict=False):
        scatter.scatter([], [], s=11, color="#555555", lw=0, marker=marker, label=titled(MODELS, model))
    scatter.legend(loc="upper left")
    scatter.set_xlabel("measured TPOT (ms per token)")
    scatter.set_ylabel("charged by the virtual clock (ms)")
    strip.axvline(1, color="#222222", lw=0.8)
    strip.axvspan(0.9, 1.1, color="#dddddd", lw=0, zorder=0)
    strip.set_yticks(range(len(systems)), [titled(SYSTEMS, name) for name in systems], fontsize=6.2)
    strip.invert_yaxis()
    strip.set_xlabel("charged over measured")
    overall = frame["ratio"]
    footer(
        figure,
        f"{clock_line(where, frame)}. A point is a run (budgets high and low, greedy and seeded); bars: medians; grey: "
        f"within 10 %. All runs: median {overall.median():.2f}, {overall.min():.2f} to {overall.max():.2f}.",
    )
    return figure


DRAW = (families, clock)
