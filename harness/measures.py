"""How a claim's number is computed, by name. To add a measure, register a function here.

A measure gets the numbers at hand, the figures and tables that show the claim, and the claim's settings. It returns
NaN where there are no rows of these settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import pandas as pd

from harness.catalogue import FIGURES, TABLES
from harness.plotting.frames import Frames, rows_of
from harness.studies.registry import FigureStudy, TableStudy
from specter.errors import SpecterError
from specter.registry import Registry

Where = dict[str, Any]
MEASURES: Registry[Callable[..., float]] = Registry("claim.measure")


def study(shown: str) -> FigureStudy | TableStudy:
    """The study behind `figure NAME` or `table NAME`. Raises SpecterError with the known names."""
    kind, _, name = shown.partition(" ")
    if kind not in ("figure", "table"):
        raise SpecterError(f"{shown!r} is neither a figure nor a table", "write figure NAME or table NAME")
    return FIGURES[name] if kind == "figure" else TABLES[name]


class Numbers:
    """Tables by source, and the numbers that studies make of them, each made once."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames
        self._made: dict[str, pd.DataFrame] = {}

    def shown(self, name: str) -> pd.DataFrame:
        """What a figure draws, or the rows of a table."""
        if name not in self._made:
            one = study(name)
            frames = {key: frame for key, frame in self.frames.items() if any(fnmatch(key, s) for s in one.sources)}
            self._made[name] = one.data(frames) if isinstance(one, FigureStudy) else one.build(frames).frame
        return self._made[name]


def _one(values: pd.Series) -> float:
    if values.nunique() > 1:
        raise SpecterError(f"{len(values)} rows instead of one", "add what tells them apart to the claim's `where`")
    return float(values.iloc[0])


TAKE: dict[str, Callable[[pd.Series], float]] = {
    "one": _one,
    "mean": lambda values: float(values.mean()),
    "median": lambda values: float(values.median()),
    "least": lambda values: float(values.min()),
    "greatest": lambda values: float(values.max()),
    "sum": lambda values: float(values.sum()),
    "count": lambda values: float(len(values)),
}


def _rows(frame: pd.DataFrame, where: Where, columns: list[str]) -> pd.DataFrame:
    """The rows with these settings. Raises SpecterError for a column that is not there."""
    for name in [*where, *columns]:
        if name not in frame:
            raise SpecterError(f"there is no column {name!r}", f"use one of: {', '.join(map(str, frame))}")
    for name, value in where.items():
        frame = frame[frame[name].isin(value if isinstance(value, list) else [value])]
    return frame


def _take(frame: pd.DataFrame, where: Where, column: str, take: str, within: list[float] | None) -> float:
    values = pd.to_numeric(_rows(frame, where, [column])[column], errors="coerce").dropna()
    if values.empty:
        return math.nan
    if within is not None:
        values = values.between(within[0], within[1]).astype(float)
    return TAKE[take](values)


def _quotient(frame: pd.DataFrame, where: Where, over: Where | None, *rest: Any) -> float:
    """The number of the rows `where`; with `over`, divided by that of the rows with these settings instead."""
    value = _take(frame, where, *rest)
    return value if over is None else value / _take(frame, where | over, *rest)


@MEASURES.register("shown")
def shown(
    numbers: Numbers, shown: list[str], column: str, where: Where, take: str = "one", over: Where | None = None,
    within: list[float] | None = None, factor: float = 1.0,
) -> float:  # fmt: skip
    """A number of the claim's first figure or table, times `factor`. `within`: of the values' being between these two,
    1 or 0."""
    return factor * _quotient(numbers.shown(shown[0]), where, over, column, take, within)


@MEASURES.register("source")
def source(
    numbers: Numbers, shown: list[str], table: str, column: str, where: Where, take: str = "one",
    over: Where | None = None, within: list[float] | None = None, factor: float = 1.0,
) -> float:  # fmt: skip
    """A number of a tidy table or a record itself, as `shown` of a figure."""
    return factor * _quotient(numbers.frames[table], where, over, column, take, within)


@MEASURES.register("not_lossless")
def not_lossless(numbers: Numbers, shown: list[str], tables: list[str]) -> float:
    """The number of runs that were not shown to have the tokens of plain decoding; NaN without runs.

    Runs with all experts on the device are plain decoding themselves; what does not fit its budget was not run.
    """
    frames = [rows_of(numbers.frames[name], uses_budget=True, fits_budget=True) for name in tables]
    agrees = pd.concat([frame["agrees_with_plain"].astype("boolean") for frame in frames])
    return float((~agrees.fillna(False)).sum()) if len(agrees) else math.nan


@MEASURES.register("cells_slower")
def cells_slower(numbers: Numbers, shown: list[str], column: str, than: str, where: Where) -> float:
    """In how many rows of the first table one column is greater than another; NaN without rows that have both."""
    rows = _rows(numbers.shown(shown[0]), where, [column, than]).dropna(subset=[column, than])
    return float((rows[column] > rows[than]).sum()) if len(rows) else math.nan
