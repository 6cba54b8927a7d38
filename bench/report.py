"""The table that a bench prints, and the JSON that it leaves: provenance, table, summary."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.measure import Sample

SOURCES = ("specter/**/*.py", "baselines/**/*.py", "conf/**/*.yaml")
_SMI_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.draw",
    "temperature.gpu",
)
_ROW_OPTIONS = ("floor", "goal", "is_rate", "note")
_PACKAGES = ("torch", "triton", "transformers", "numpy")


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

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Row:
        """The row that `as_json` was told of."""
        sample = Sample(tuple(content["values"]))
        return cls(sample=sample, **{name: content[name] for name in ("name", "unit", *_ROW_OPTIONS)})

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
    """Grows section by section, and is written after each, so that a bench cut short leaves what it has."""

    path: Path
    provenance: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # measured facts without a floor or repeats
    summary: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)  # what did not run, and why

    def add(self, row: Row) -> Row:
        """Adds a row, in place of an earlier one of its name."""
        names = [one.name for one in self.rows]
        at = names.index(row.name) if row.name in names else len(names)
        self.rows[at : at + 1] = [row]
        return row

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "provenance": self.provenance,
            "summary": self.summary,
            "table": [row.as_json() for row in self.rows],
            "facts": self.facts,
            "skipped": self.skipped,
        }
        self.path.write_text(json.dumps(content, indent=1) + "\n")

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


def provenance(device: torch.device, commit: str, **inputs: str) -> dict[str, Any]:
    """Where and with what a bench ran. `commit` is read from git if empty; `inputs` are digests of what was run."""
    record: dict[str, Any] = {
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "gpu": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "num_threads": torch.get_num_threads(),
        "commit": commit or _run("git", "rev-parse", "HEAD") or "unknown",
        "source_sha256": source_digest(Path(__file__).parents[1]),
        **{name: package_version(name) for name in _PACKAGES},
        **inputs,
    }
    values = _run("nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader").split(", ")
    if len(values) == len(_SMI_FIELDS):
        record |= dict(zip(_SMI_FIELDS, values, strict=True))
    return record


def source_digest(root: Path) -> str:
    """Which code ran with which settings, commit or not."""
    return files_digest(root, *SOURCES)


def files_digest(root: Path, *patterns: str) -> str:
    """SHA-256 over names and contents of the files under `root` that match one of the patterns."""
    total = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in root.glob(pattern)}):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(root)} {digest}\n".encode())
    return total.hexdigest()


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
