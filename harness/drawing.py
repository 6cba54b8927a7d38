"""How figures look: size, the line of provenance at the bottom, grouped bars, and files that do not change."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

matplotlib.use("Agg")
plt.style.use(Path(__file__).with_name("plotting") / "specter.mplstyle")

COLOURS = {
    "specter": "#0072B2",
    "specter_deadline": "#003f69",
    "specter_no_prefetch": "#56B4E9",
    "specmoeoff": "#CC79A7",
    "specmoeoff_tuned": "#8c4a73",
    "mixtral_offloading": "#D55E00",
    "mixtral_speculative_loading": "#f0a070",
    "lru": "#E69F00",
    "lru_next_gate": "#F0E442",
    "on_demand": "#9a9a9a",
    "resident": "#009E73",
}
PARTS = {
    "launches": "#999999",
    "tokens": "#0072B2",
    "draft": "#CC79A7",
    "misses": "#D55E00",
    "hidden": "#009E73",
}  # of a speed-up
MODES = {"greedy": "#56B4E9", "seeded": "#0072B2", "teacher-forced": "#D55E00"}
PAPER = "#222222"  # published values
WIDE, NARROW = 7.2, 4.0  # inches: two columns, one column
FOOTER_POINTS = 6.2


def panels(
    rows: int, columns: int, width: float, height: float, sharex: bool = False, sharey: bool | Literal["col"] = False
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of rows x columns panels, inches."""
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, height), layout="constrained", squeeze=False, sharex=sharex, sharey=sharey
    )
    return figure, axes.tolist()


def footer(figure: Figure, text: str) -> None:
    """Writes the line that says where the numbers come from, and makes room for it."""
    width, height = figure.get_size_inches()
    characters = int(width * 72 / (FOOTER_POINTS * 0.52))
    lines = [line for part in text.splitlines() for line in textwrap.wrap(part, characters)]
    room = (len(lines) * FOOTER_POINTS * 1.3 + 6) / 72
    figure.set_size_inches(width, height + room)
    share = room / (height + room)
    figure.get_layout_engine().set(rect=(0, share, 1, 1 - share))  # type: ignore[union-attr, call-arg]
    figure.text(
        0.01, 0.012, "\n".join(lines), fontsize=FOOTER_POINTS, color="#555555", va="bottom", ha="left", linespacing=1.25
    )


def save(figure: Figure, paths: Sequence[Path]) -> None:
    """Writes every path in the format of its suffix, without dates, so that equal figures are equal files."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"CreationDate": None} if path.suffix == ".pdf" else {"Software": None}
        figure.savefig(path, metadata=metadata)
    plt.close(figure)


@dataclass(frozen=True)
class Bars:
    """Averages [groups, series], and the least and greatest value over inputs where there are several."""

    means: pd.DataFrame
    least: pd.DataFrame | None = None
    greatest: pd.DataFrame | None = None

    def renamed(self, groups: list[str]) -> Bars:
        found = [frame if frame is None else frame.set_axis(groups) for frame in (self.least, self.greatest)]
        return Bars(self.means.set_axis(groups), *found)

    def whiskers(self, name: str) -> np.ndarray | None:
        """Lengths below and above the average [2, groups]; none where all inputs agree."""
        if self.least is None or self.greatest is None:
            return None
        mean = self.means[name].to_numpy()
        lengths = np.stack([mean - self.least[name].to_numpy(), self.greatest[name].to_numpy() - mean])
        return np.where(lengths.max(0) > 1e-9, lengths.clip(0), np.nan)


def grouped_bars(
    axes: Axes,
    bars: Bars,
    colours: dict[str, str],
    labels: dict[str, str],
    value_format: str = "{:.0f}",
    label_all: bool = False,
    rotation: int = 0,
) -> dict[str, np.ndarray]:
    """Draws `bars`. Returns each series' bar centres.

    The last group (the average) is set apart, and its bars, or all bars, carry their values.
    """
    groups, series = list(bars.means.index), list(bars.means.columns)
    width = 0.8 / len(series)
    base = np.arange(len(groups), dtype=float)
    if len(groups) > 1 and not label_all:
        base[-1] += 0.35
        axes.axvline((base[-2] + base[-1]) / 2, color="#cccccc", linewidth=0.7)
    centres: dict[str, np.ndarray] = {}
    for index, name in enumerate(series):
        x = centres[name] = base + (index - (len(series) - 1) / 2) * width
        axes.bar(
            x,
            bars.means[name],
            width * 0.92,
            yerr=bars.whiskers(name),
            color=colours[name],
            label=labels[name],
            error_kw={"elinewidth": 0.7, "ecolor": "#333333"},
        )
        for position, value in zip(x, bars.means[name], strict=True):
            if (label_all or position == x[-1]) and np.isfinite(value):
                axes.annotate(
                    value_format.format(value),
                    (position, value),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=5.8,
                    rotation=rotation,
                    color="#222222",
                )
    axes.set_xticks(base, groups, fontsize=6.6)
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.1)  # room for the values
    return centres
