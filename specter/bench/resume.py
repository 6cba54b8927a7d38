"""What an earlier call of a bench has left in the same file: sections that this call need not repeat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specter.bench.cells import Cell
from specter.bench.measure import Sample
from specter.bench.report import Report, Row
from specter.errors import SpecterError

# Results of two calls are one record only if these are the same.
ALIKE = ("gpu", "driver_version", "torch", "commit", "source_sha256", "model", "checkpoint_sha256", "int4", "pin")
_FIELDS = ("system", "tier", "sampling", "k", "variant")


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
        report.facts |= facts
        report.summary |= content["summary"]
        report.skipped |= {name: why for name, why in content["skipped"].items() if name not in sections}
        report.rows += [
            Row(row["name"], row["unit"], Sample(tuple(row["values"])), row["floor"], row["goal"], note=row["note"])
            for row in content["table"]
        ]
        return cls(kept, {cell_of(cell): cell for cell in facts.get("cells", [])})


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if {"provenance", "summary", "table", "facts", "skipped"} - set(content):
            raise ValueError("parts are missing")
    except (OSError, ValueError, TypeError) as error:
        raise SpecterError(f"{path} is not a report of this bench: {error}", "give another out=...") from None
    return content


def plain_texts(cells: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Digests of the texts of plain decoding with everything resident, by sampling, as far as it was measured."""
    return {cell["sampling"]: cell["text_digests"] for cell in cells if cell["system"] == "resident"}


def different_texts(cells: Sequence[dict[str, Any]]) -> list[str]:
    """Cells whose texts are not those of plain decoding; a cell without a plain one is not among them."""
    plain = plain_texts(cells)
    return [
        cell_of(cell).name
        for cell in cells
        if (texts := plain.get(cell["sampling"])) and cell["text_digests"] != texts[: len(cell["text_digests"])]
    ]
