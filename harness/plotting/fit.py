"""What stands in each other's way on a figure: texts that overlap or leave the canvas, legends over data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

VALUE = "value"  # the gid of numbers that stand beside what they are of
SLACK = 0.6  # pixels in which boxes may overlap: a box is wider than its ink
LEAST_POINTS, STEP = 4.6, 0.3  # of numbers that are shrunk until they fit


def shown_texts(figure: Figure) -> list[tuple[Text, Bbox]]:
    """Every text that is drawn, with its box in pixels. The figure is laid out first."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    hidden = {id(label) for axes in figure.axes for label in _out_of_view(axes)}
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and id(text) not in hidden]
    return [(text, text.get_window_extent()) for text in texts if text.get_visible() and text.get_text().strip()]


def _out_of_view(axes: Axes) -> Iterator[Text]:
    """Labels of ticks that an axis has but does not draw."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        margin = (high - low) * 1e-6
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not axes.get_visible() or not low - margin <= tick.get_loc() <= high + margin:
                yield from (tick.label1, tick.label2)


def _overlap(one: Bbox, other: Bbox) -> bool:
    across = min(one.x1, other.x1) - max(one.x0, other.x0)
    along = min(one.y1, other.y1) - max(one.y0, other.y0)
    return bool(across > SLACK and along > SLACK)


def faults(figure: Figure) -> list[str]:
    """Every pair of texts that overlap, every text beyond the canvas, and every legend over a panel."""
    texts, canvas = shown_texts(figure), figure.bbox
    found = [
        f"{one.get_text()!r} overlaps {other.get_text()!r}"
        for (one, box), (other, its_box) in combinations(texts, 2)
        if _overlap(box, its_box)
    ]
    for text, box in texts:
        if box.x0 < -SLACK or box.y0 < -SLACK or box.x1 > canvas.x1 + SLACK or box.y1 > canvas.y1 + SLACK:
            found.append(f"{text.get_text()!r} leaves the canvas")
    legends = [*figure.legends, *(one for axes in figure.axes if (one := axes.get_legend()))]
    covers = [any(_overlap(legend.get_window_extent(), axes.bbox) for axes in figure.axes) for legend in legends]
    return [*found, *["a legend covers a panel"] * sum(covers)]


def shrink_values(figure: Figure) -> None:
    """Makes the numbers of a figure smaller, all alike, until none overlaps another text or the least size is met."""
    values = [text for text, _ in shown_texts(figure) if text.get_gid() == VALUE]
    sizes = [float(text.get_fontsize()) for text in values]
    while values and min(sizes) - STEP >= LEAST_POINTS:
        texts = shown_texts(figure)
        if not any(_overlap(b, d) for (a, b), (c, d) in combinations(texts, 2) if VALUE in (a.get_gid(), c.get_gid())):
            return
        sizes = [size - STEP for size in sizes]
        for text, size in zip(values, sizes, strict=True):
            text.set_fontsize(size)
