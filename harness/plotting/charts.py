"""How figures look: grids of panels, bars, lines, the footer, and files without dates. matplotlib is loaded on use."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

MODES = {"greedy": "#56B4E9", "seeded": "#0072B2", "teacher-forced": "#D55E00"}
PAPER = "#222222"  # published values, and lines of reference
WIDE, NARROW = 7.2, 4.0  # inches: two columns, one column
FOOTER_POINTS = 6.2


class Grid:
    """A figure with a panel for every pair of values of two columns of `data`, in the order of their appearance.

    Iteration yields each panel with its rows of `data`; the column `panel`, if there is one, is the panel's title.

    Args:
        data: what the figure draws.
        rows, columns: names of columns of `data`; empty for a single row or column of panels.
        width, height: inches of the figure, and of one row of panels.
        margin: inches for the legend.
        x, y: titles of the axes, at the outer panels.
        legend: columns of one legend for all panels, above them; 0: one row; None: no such legend.
    """

    def __init__(
        self,
        data: pd.DataFrame,
        *,
        rows: str = "",
        columns: str = "",
        width: float = WIDE,
        height: float,
        margin: float = 0.0,
        sharex: bool = False,
        sharey: bool | Literal["row", "col"] = False,
        title_size: float = 8.5,
        x: str = "",
        y: str = "",
        legend: int | None = None,
    ) -> None:
        self.data, self.rows, self.columns, self.title_size, self.legend = data, rows, columns, title_size, legend
        self.row_values = data[rows].unique().tolist() if rows else [None]
        self.column_values = data[columns].unique().tolist() if columns else [None]
        num_rows, num_columns = len(self.row_values), len(self.column_values)
        size = (width, height * num_rows + margin)
        self.figure = _new_figure(size)
        axes = self.figure.subplots(num_rows, num_columns, squeeze=False, sharex=sharex, sharey=sharey)
        self.axes: list[list[Axes]] = axes.tolist()
        for panel in self.axes[-1]:
            panel.set_xlabel(x)
        for row in self.axes:
            row[0].set_ylabel(y)

    def __iter__(self) -> Iterator[tuple[Axes, pd.DataFrame]]:
        for row, row_value in zip(self.axes, self.row_values, strict=True):
            for panel, column_value in zip(row, self.column_values, strict=True):
                part = self.data
                for name, value in ((self.rows, row_value), (self.columns, column_value)):
                    part = part[part[name] == value] if name else part
                if "panel" in part and len(part):
                    panel.set_title(part["panel"].iloc[0], fontsize=self.title_size)
                yield panel, part

    def finish(self, lines: Sequence[str]) -> Figure:
        """The figure, with its legend and these lines below."""
        if self.legend is not None:
            handles: dict[str, Any] = {}
            for panel in (panel for row in self.axes for panel in row):
                for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
                    handles.setdefault(name, handle)
            columns = self.legend or len(handles)
            self.figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=columns)
        footer(self.figure, lines)
        return self.figure


def grouped_bars(
    axes: Axes,
    data: pd.DataFrame,
    *,
    groups: str,
    series: str,
    value: str,
    styles: Mapping[str, tuple[str, str]],
    value_format: str = "{:.0f}",
    apart: str = "",
    above: str = "",
    rotation: int = 0,
    value_size: float = 5.8,
) -> dict[tuple[str, str], float]:
    """Draws a bar per row of `data`. Returns the bar centres by (group, series).

    Args:
        groups, series, value: columns of `data`; groups stand in the order of appearance. Columns `least` and
            `greatest`, where there, become whiskers.
        styles: label and colour of every series, in order; a series without rows leaves its place empty.
        apart: the group that is set apart, whose bars alone carry their values; empty: all bars carry them.
        above: the column of heights at which values stand; empty: at the top of their bars.
        value_size: points of the values.
    """
    names = data[groups].unique().tolist()
    width = 0.8 / len(styles)
    base = dict(zip(names, np.arange(len(names), dtype=float), strict=True))
    if apart and len(names) > 1:
        base[apart] += 0.35
        axes.axvline((base[names[-2]] + base[apart]) / 2, color="#cccccc", linewidth=0.7)
    centres: dict[tuple[str, str], float] = {}
    for index, (name, (label, colour)) in enumerate(styles.items()):
        mine = data[data[series] == name].set_index(groups).reindex(names)
        x = [base[group] + (index - (len(styles) - 1) / 2) * width for group in names]
        centres |= {(group, name): centre for group, centre in zip(names, x, strict=True)}
        axes.bar(x, mine[value], width * 0.92, yerr=whiskers(mine, value), color=colour, label=label,
                 error_kw={"elinewidth": 0.7, "ecolor": "#333333"})  # fmt: skip
        for group, centre, height, place in zip(names, x, mine[value], mine[above or value], strict=True):
            if group == apart or not apart:
                note(axes, value_format.format(height), (centre, place), rotation=rotation, size=value_size)
    axes.set_xticks(list(base.values()), names, fontsize=6.6)
    axes.tick_params(axis="x", length=0)
    axes.margins(y=0.1)  # room for the values
    return centres


def whiskers(rows: pd.DataFrame, value: str) -> np.ndarray | None:
    """Lengths below and above `value` [2, rows] to the columns `least` and `greatest`; NaN where all inputs agree."""
    if "least" not in rows:
        return None
    middle = rows[value].to_numpy(float)
    lengths = np.stack([middle - rows["least"].to_numpy(float), rows["greatest"].to_numpy(float) - middle])
    return np.where(lengths.max(0) > 1e-9, lengths.clip(0), np.nan)


def note(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    *,
    offset: tuple[float, float] = (0, 2),
    size: float = 5.8,
    rotation: int = 0,
) -> None:
    """Writes `text` beside a point: above it, or to its right. Nothing is written at a point that is not finite."""
    if not np.isfinite(at).all():
        return
    axes.annotate(
        text,
        at,
        offset,
        textcoords="offset points",
        ha="left" if offset[0] else "center",
        va="center" if offset[0] else "bottom",
        fontsize=size,
        rotation=rotation,
        color="#222222",
    )


def mark(axes: Axes, at: float, value: float, *, half: float, label: str = "", upright: bool = False) -> None:
    """A short black line across a bar (or, upright, across a row) at `value`."""
    lines = axes.vlines if upright else axes.hlines
    lines(value, at - half, at + half, color=PAPER, lw=1.1, label=label)


def log2_axis(axes: Axes, ticks: Sequence[float], labels: Sequence[str] | None = None, from_zero: bool = False) -> None:
    """A horizontal axis of powers of two with these ticks only; `from_zero`: linear up to 1."""
    if from_zero:
        axes.set_xscale("symlog", base=2, linthresh=1)
    else:
        axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), labels or [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def plain_log(axis: Axis, *, subs: Sequence[float] | None = None) -> None:
    """Plain numbers on a logarithmic axis, without minor ones; ticks at `subs` times powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if subs is not None:
        axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def footer(figure: Figure, lines: Sequence[str]) -> None:
    """Writes lines of provenance at the bottom, and makes room for them."""
    width, height = figure.get_size_inches()
    characters = int(width * 72 / (FOOTER_POINTS * 0.52))
    wrapped = [part for line in lines for part in textwrap.wrap(line, characters, break_on_hyphens=False)]
    room = (len(wrapped) * FOOTER_POINTS * 1.3 + 6) / 72
    figure.set_size_inches(width, height + room)
    share = room / (height + room)
    figure.get_layout_engine().set(rect=(0, share, 1, 1 - share))  # type: ignore[union-attr, call-arg]
    text = "\n".join(wrapped)
    figure.text(0.01, 0.012, text, fontsize=FOOTER_POINTS, color="#555555", va="bottom", ha="left", linespacing=1.25)


def save(figure: Figure, paths: Sequence[Path]) -> None:
    """Writes every path in the format of its suffix, without dates, so that equal figures are equal files."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"CreationDate": None} if path.suffix == ".pdf" else {"Software": None}
        figure.savefig(path, metadata=metadata)


def _new_figure(size: tuple[float, float]) -> Figure:
    """An empty figure in this repository's style; it has no window, and pyplot does not keep it."""
    from matplotlib import style
    from matplotlib.figure import Figure

    style.use(Path(__file__).with_name("specter.mplstyle"))
    return Figure(figsize=size, layout="constrained")
