"""Figures and tables register here where they are defined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from harness.plotting import charts, notes
from harness.plotting.frames import Frames
from harness.plotting.tables import Table, by_model
from specter.registry import Registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[pd.DataFrame], charts.Grid]
Build = Callable[[Frames], Table]
DEVICE = "device."  # the prefix of what is drawn from data/reference/<machine>


@dataclass(frozen=True)
class FigureStudy:
    """A figure. What it draws is data first: `draw` gets nothing else.

    Attributes:
        sources: the tidy tables that it is made from; on a device, file names in data/reference/<machine>, or globs.
        about: what it shows, for docs/results.md; in the report its heading.
        data: the numbers that are drawn, from the tidy tables.
        footer: from the tidy tables, all that limits it and where it comes from; the report has it beside the figure.
        key: how to read it. The figure has it below, and in short where its numbers come from: two lines.
        shown: the rows that these words are about; by default all of the first source that has a model or a GPU.
        finding: what it shows, a sentence with numbers from the tidy tables; the report leads with it.
        minutes: from a fresh checkout at scale laptop.
        one_model: it shows one model, so each model has its own.
        leads: it is shown before all others.
        draws_published: it draws values of the paper; the footer says what stand-ins were trained for.
    """

    name: str
    sources: tuple[str, ...]
    about: str
    data: Callable[[Frames], pd.DataFrame]
    footer: Callable[[Frames], list[str]]
    draw: Draw
    key: str = ""
    shown: Callable[[Frames], pd.DataFrame] | None = None
    finding: Callable[[Frames], str] | None = None
    minutes: int = 0
    one_model: bool = False
    leads: bool = False
    draws_published: bool = False

    @property
    def module(self) -> str:
        return self.draw.__module__

    def below(self, frames: Frames) -> str:
        """The words below the figure."""
        sources = (frame for frame in frames.values() if {"charged_as", "gpu"} & set(frame))
        return f"{self.key} {notes.brief(self.shown(frames) if self.shown else next(sources))}".strip()

    def make(self, frames: Frames) -> Figure:
        return self.draw(self.data(frames)).finish(self.below(frames))

    def caption(self, frames: Frames) -> dict[str, Any]:
        """What the report says of the figure: [heading, below, footer (lines), finding]."""
        has_standins = any("standin" in set(frame.get("checkpoint_kind", ())) for frame in frames.values())
        trained = [notes.TRAINED] * (self.draws_published and has_standins)
        return {
            "heading": self.about[:1].upper() + self.about[1:],
            "below": self.below(frames),
            "footer": [*self.footer(frames), *trained],
            "finding": self.finding(frames) if self.finding else "",
        }


@dataclass(frozen=True)
class TableStudy:
    """A table: `build` makes it from the tidy tables. A figure of its name states `about` and `minutes` for both."""

    name: str
    sources: tuple[str, ...]
    build: Build
    module: str
    about: str = ""
    minutes: int = 0


FIGURES: Registry[FigureStudy] = Registry("figure")
TABLES: Registry[TableStudy] = Registry("table")


def figure(name: str, *sources: str, **attributes: Any) -> Callable[[Draw], Draw]:
    """Registers the decorated function as the `draw` of a figure; `attributes` are those of `FigureStudy`."""

    def add(draw: Draw) -> Draw:
        FIGURES.register(name)(FigureStudy(name=name, sources=sources, draw=draw, **attributes))
        return draw

    return add


def table(name: str, *sources: str, model_by_model: bool = False, **attributes: Any) -> Callable[[Build], Build]:
    """Registers the decorated function as the `build` of a table.

    With `model_by_model` it builds the table of one model, and the tables of all models stand below each other.
    """

    def add(build: Build) -> Build:
        of_all = by_model(build) if model_by_model else build
        TABLES.register(name)(
            TableStudy(name=name, sources=sources, build=of_all, module=build.__module__, **attributes)
        )
        return build

    return add
