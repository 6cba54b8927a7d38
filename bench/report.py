"""Repeated measurements beside floors (the fewest bytes to move), the table that a bench prints, and its JSON file.

Repeats are kept one by one and reported as median and spread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specter.files import write_json
from specter.models.spec import ModelSpec
from specter.sample import Sample

HBM_BYTES_PER_S = 4.3e12  # copy ceiling of an H200, read plus written bytes; measured again beside every table
BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Device-memory bytes of one pass of `spec` in BF16 at a KV length, every weight read once."""

    spec: ModelSpec
    kv_len: int

    @property
    def shared(self) -> int:
        """Everything but routed experts: all matrices except the embedding, and the latents of every layer."""
        spec = self.spec
        weights = spec.non_expert_params - spec.vocab * spec.hidden
        latents = spec.num_layers * self.kv_len * spec.kv_width
        return BF16_BYTES * (weights + latents)

    def draft(self, int4_expert_bytes: float) -> float:
        """One draft step: top-k INT4 experts in every MoE layer."""
        return self.shared + self.spec.num_moe_layers * self.spec.top_k * int4_expert_bytes

    def target(self, num_experts: float) -> float:
        """A target pass that reads `num_experts` distinct BF16 experts, over all MoE layers."""
        return self.shared + num_experts * BF16_BYTES * self.spec.expert_params


def ms_at(num_bytes: float, bytes_per_s: float = HBM_BYTES_PER_S) -> float:
    return num_bytes / bytes_per_s * 1e3


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
        sample = self.sample
        return {
            "name": self.name, "unit": self.unit, "median": sample.median, "spread": sample.spread,
            "repeats": len(sample.values), "values": list(sample.values), "floor": self.floor,
            "over_floor": self.over_floor, "goal": self.goal, "is_rate": self.is_rate, "is_reached": self.is_reached,
            "note": self.note,
        }  # fmt: skip


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
        table = [row.as_json() for row in self.rows]
        sections = {"summary": self.summary, "table": table, "facts": self.facts, "skipped": self.skipped}
        write_json(self.path, {"provenance": self.provenance, **sections})

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


def run_section(name: str, measure: Callable[[], object], report: Report, console: Console) -> None:
    """Runs one section and writes the report. A failure is recorded and does not end the bench."""
    begin = time.perf_counter()
    try:
        measure()
    except Exception as error:
        report.skipped[name] = f"FAILED: {type(error).__name__}: {error}"
        console.print_exception()
    report.facts[f"seconds: {name}"] = round(time.perf_counter() - begin, 1)
    report.write()
