"""The table that a bench prints and the JSON file that it writes: provenance, summary, table, facts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measure import Sample
from specter.files import write_json


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement beside its floor and the value to reach, all in `unit`."""

    name: str
    unit: str
    sample: Sample
    floor: float | None = None
    goal: float | None = None
    is_rate: bool = False  # more is better
    note: str = ""

    @property
    def over_floor(self) -> float | None:
        return None if self.floor is None else self.sample.median / self.floor

    @property
    def is_reached(self) -> bool | None:
        if self.goal is None:
            return None
        return self.sample.median >= self.goal if self.is_rate else self.sample.median <= self.goal

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.sample.median,
            "spread": self.sample.spread,
            "repeats": len(self.sample.values),
            "values": list(self.sample.values),
            "floor": self.floor,
            "over_floor": self.over_floor,
            "goal": self.goal,
            "is_rate": self.is_rate,
            "is_reached": self.is_reached,
            "note": self.note,
        }


@dataclass(slots=True)
class Report:
    """Grows by sections and is written after each, so an interrupted bench keeps its finished sections."""

    path: Path
    provenance: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # measured facts without a floor or repeats
    summary: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # sections that did not run, with the reason

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        return row

    def write(self) -> None:
        content = {
            "provenance": self.provenance,
            "summary": self.summary,
            "table": [row.as_json() for row in self.rows],
            "facts": self.facts,
            "skipped": self.skipped,
        }
        write_json(self.path, content)

    def show(self, console: Console) -> None:
        table = Table("measurement", "median", "spread", "n", "floor", "x floor", "goal", "", "note")
        for row in self.rows:
            table.add_row(
                row.name,
                f"{row.sample.median:.4g} {row.unit}",
                f"{row.sample.spread:.1%}",
                str(len(row.sample.values)),
                "" if row.floor is None else f"{row.floor:.4g}",
                "" if row.over_floor is None else f"{row.over_floor:.2f}",
                "" if row.goal is None else f"{'≥' if row.is_rate else '≤'} {row.goal:.4g}",
                {None: "", True: "reached", False: "MISSED"}[row.is_reached],
                row.note,
            )
        console.print(table)
        for title, content in (("facts", self.facts), ("summary", self.summary), ("skipped", self.skipped)):
            for key, value in content.items():
                console.print(f"{title}: {key} = {value}", highlight=False)
