"""How figures look: grids of panels, bars, lines, the footer, and files without dates. matplotlib is loaded on use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from harness.plotting.fit import VALUE, shrink_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

MODES = {"greedy": "#56B4E9", "paper_like": "#009E73", "seeded": "#0072B2", "teacher-forced": "#D55E00"}
PAPER = "#222222"  # published values, and lines of reference
WIDE, NARROW = 7.2, 4.0  # inches: two columns, one column
FOOTER_POINTS = 6.2
APART = 2.0  # width of the group that stands apart, in those of another
WHISKER: dict[str, Any] = {"elinewidth": 0.7, "ecolor": "#777777", "capsize": 1.2}


class Grid:
    """A figure with a panel for every pair of values of two columns of `data`, in the order of their appearance.

    Iteration yields each panel with its rows of `data`; the column `panel`, if there is one, is the panel's title.

    Args:
        data: what the figure draws.
        rows, columns: names of columns of `data`; empty for a single row or column of panels.
        width, height: inches of the figure, and of one row of panels.
        x, y: titles of the axes, at the outer panels.
        legend: one legend for all panels stands above them, in as many columns as fit.
    """

    def __init__(
        self,
        data: pd.DataFrame,
        *,
        rows: str = "",
        columns: str = "",
        width: float = WIDE,
        height: float,
        sharex: bool | Literal["row", "col"] = False,
        sharey: bool | Literal["row", "col"] = False,
        title_size: float = 8.5,
        x: str = "",
        y: str = "",
        legend: bool = False,
    ) -> None:
        self.data, self.rows, self.columns, self.title_size, self.legend = data, rows, columns, title_size, legend
        self.row_values = data[rows].unique().tolist() if rows else [None]
        self.column_values = data[columns].unique().tolist() if columns else [None]
        num_rows, num_columns = len(self.row_values), len(self.column_values)
        self.figure = _new_figure((width, height * num_rows))
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

    def finish(self, below: str) -> Figure:
        """The figure, with its legend above and these words below; it grows by their height."""
        lines = wrapped(below, FOOTER_POINTS, self.figure.get_size_inches()[0] * 0.97)
        text = "\n".join(lines)
        self.figure.text(0.01, 0.012, text, fontsize=FOOTER_POINTS, color="#555555", va="bottom", linespacing=1.25)
        room = (len(lines) * FOOTER_POINTS * 1.3 + 6) / 72
        _grow(self.figure, room + self._add_legend(), share_below=room)
        shrink_values(self.figure)
        return self.figure

    def _add_legend(self) -> float:
        """Adds the legend in the fewest rows that fit the width. Returns its height in inches."""
        if not self.legend:
            return 0.0
        handles: dict[str, Any] = {}
        for panel in (panel for row in self.axes for panel in row):
            for handle, name in zip(*panel.get_legend_handles_labels(), strict=True):
                handles.setdefault(name, handle)
        for rows in range(1, len(handles) + 1):
            columns = -(-len(handles) // rows)
            legend = self.figure.legend(
                list(handles.values()), list(handles), loc="outside upper center", ncols=columns
            )
            self.figure.draw_without_rendering()
            box = legend.get_window_extent()
            if box.width <= self.figure.bbox.width or columns == 1:
                break
            legend.remove()
        return box.height / self.figure.dpi


def _grow(figure: Figure, inches: float, *, share_below: float) -> None:
    """Makes a figure higher, with room for `share_below` inches under its panels."""
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + inches)
    share = share_below / (height + inches)
    figure.get_layout_engine().set(rect=(0, share, 1, 1 - share))  # type: ignore[union-attr, call-arg]


def wrapped(text: str, points: float, inches: float) -> list[str]:
    """`text` in lines that are at most this wide."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font, lines = FontProperties(family="DejaVu Sans", size=points), [""]
    for sign in "=×":
        text = text.replace(f" {sign} ", f"\N{NO-BREAK SPACE}{sign}\N{NO-BREAK SPACE}")
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip(" ")
        if lines[-1] and text_to_path.get_text_width_height_descent(longer, font, ismath=False)[0] > inches * 72:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


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
    floor: str = "",
    rotation: int = 0,
) -> dict[tuple[str, str], float]:
    """Draws a bar per row of `data`. Returns the bar centres by (group, series).

    Args:
        groups, series, value: columns of `data`; groups stand in the order of appearance. Columns `least` and
            `greatest`, where there, become whiskers.
        styles: label and colour of every series, in order; a series without rows leaves its place empty.
        apart: the group that is set apart, in wider bars that alone carry their values; empty: all bars carry them.
        above: the column of heights at which values stand; empty: at the top of their bars.
        floor: the column of floors, each marked across its bar; empty: none.
    """
    names = data[groups].unique().tolist()
    widths = {name: APART if name == apart and len(names) > 1 else 1.0 for name in names}
    ends = np.cumsum(list(widths.values()))
    base = {name: end - width / 2 for (name, width), end in zip(widths.items(), ends.tolist(), strict=True)}
    if apart and len(names) > 1:
        axes.axvline(ends[-2], color="#cccccc", linewidth=0.7)
    bar = np.array([width * 0.84 / len(styles) for width in widths.values()])
    centres: dict[tuple[str, str], float] = {}
    for index, (name, (label, colour)) in enumerate(styles.items()):
        mine = data[data[series] == name].set_index(groups).reindex(names)
        x = np.array(list(base.values())) + (index - (len(styles) - 1) / 2) * bar
        centres |= {(group, name): centre for group, centre in zip(names, x.tolist(), strict=True)}
        axes.bar(x, mine[value], bar * 0.92, yerr=whiskers(mine, value), color=colour, label=label, error_kw=WHISKER)
        for group, centre, height, place in zip(names, x, mine[value], mine[above or value], strict=True):
            if group == apart or not apart or len(names) == 1:
                note(axes, value_format.format(height), (centre, place), rotation=rotation)
        for centre, half, height in zip(x, bar / 2, mine[floor], strict=True) if floor else ():
            if np.isfinite(height):
                mark(axes, centre, height, half=half, label="floor_trace")
    axes.set_xticks(list(base.values()), names, fontsize=6.6)
    axes.set_xlim(0, ends[-1])
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
    """Writes `text` beside a finite point, edged in white: above it, or to its right.

    `Grid.finish` makes it smaller where it does not fit.
    """
    from matplotlib.patheffects import withStroke

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
        gid=VALUE,
        path_effects=[withStroke(linewidth=1.4, foreground="white")],
    )


def mark(axes: Axes, at: float, value: float, *, half: float, label: str = "", upright: bool = False) -> None:
    """A short black line edged in white across a bar (or, upright, across a row) at `value`, above whiskers."""
    from matplotlib.patheffects import withStroke

    lines = axes.vlines if upright else axes.hlines
    edge = [withStroke(linewidth=2.6, foreground="white")]
    lines(value, at - half, at + half, color=PAPER, lw=1.3, label=label, path_effects=edge, zorder=4)


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
