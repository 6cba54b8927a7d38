"""What an earlier call of a bench has left in the same file: sections that this call need not repeat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.cells import Cell
from bench.report import Report, Row
from specter.errors import SpecterError

# Results of two calls are one record only if these are the same.
ALIKE = (
    "gpu", "driver_version", "torch", "triton", "commit", "source_sha256", "model", "checkpoint_sha256", "int4",
    "int4_sha256", "pin", "hardware", "num_prompts",
)  # fmt: skip
_FIELDS = ("system", "tier", "sampling", "k", "variant", "model")


def cell_of(content: dict[str, Any]) -> Cell:
    """The cell that a record is of."""
    return Cell(**{name: content[name] for name in _FIELDS})


@dataclass(slots=True)
class Earlier:
    """Empty where there is nothing to go on with."""

    sections: list[str] = field(default_factory=list)
    cells: dict[Cell, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, report: Report, sections: Sequence[str]) -> Earlier:
        """Puts into `report` what `report.path` holds of other sections than these.

        Raises:
            SpecterError: the file has finished sections that would be lost, since they are of other code, another
                device or another model; or it is no report.
        """
        if not report.path.exists():
            return cls()
        content = _read(report.path)
        facts = content["facts"]
        names = [key.removeprefix("seconds: ") for key in facts if key.startswith("seconds: ")]
        kept = [name for name in names if name not in ("all", *sections) and name not in content["skipped"]]
        if not kept:
            return cls()
        before, now = content["provenance"], report.provenance
        if differing := [name for name in ALIKE if name in now and before.get(name) != now[name]]:
            name = differing[0]
            raise SpecterError(
                f"{report.path} holds {', '.join(kept)} of {name}={before.get(name)}, and this is {name}={now[name]}",
                "give another out=..., delete the file, or run all sections",
            )
        again = {f"seconds: {name}" for name in sections}  # not finished until they are
        report.facts |= {key: fact for key, fact in facts.items() if key not in again}
        report.summary |= content["summary"]
        report.skipped |= {name: why for name, why in content["skipped"].items() if name not in sections}
        report.rows += [Row.from_json(row) for row in content["table"]]
        return cls(kept, {cell_of(cell): cell for cell in facts.get("cells", [])})


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if {"provenance", "summary", "table", "facts", "skipped"} - set(content):
            raise ValueError("parts are missing")
    except (OSError, ValueError, TypeError) as error:
        raise SpecterError(f"{path} is not a report of this bench: {error}", "give another out=...") from None
    return content


def compare_texts(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many cells have texts in common with plain decoding where everything is resident, and which differ there."""
    plain = {cell["sampling"]: cell["text_digests"] for cell in cells if cell["system"] == "resident"}
    compared = [cell for cell in cells if cell["system"] != "resident" and cell["sampling"] in plain]
    different = [
        cell_of(cell).name
        for cell in compared
        if any(mine != other for mine, other in zip(cell["text_digests"], plain[cell["sampling"]], strict=False))
    ]
    return {"cells": len(compared), "different": different}
