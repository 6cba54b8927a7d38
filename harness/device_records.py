"""Records of benches in data/reference/<machine>."""

from __future__ import annotations

import json
from pathlib import Path

from harness.scales import Values
from specter.errors import SpecterError


def read_record(path: Path) -> Values:
    """What a bench left of a device: provenance, summary, facts with its cells, table.

    Raises:
        SpecterError: there is no such record, or it is not whole.
    """
    try:
        content: Values = json.loads(path.read_text())
        _ = content["provenance"], content["summary"], content["facts"]["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        bench = path.stem.partition("_")[0]
        raise SpecterError(
            f"{path} is not a record of {bench}: {error}", f"make it on a GPU: python -m bench {bench}"
        ) from None
    return content


def device_tables(machine: Path) -> list[str]:
    """The tables that the records of a machine can fill."""
    has_rivals = read_record(machine / "rounds.json")["facts"].get("rivals") is not None
    return ["choices", *["rivals"] * has_rivals, *_by_choice(machine)]


def device_figures(machine: Path) -> list[str]:
    """The figures that the records of a machine can fill."""
    return ["rounds", "ablation", "trace", *_by_choice(machine)]


def _by_choice(machine: Path) -> list[str]:
    """What has records of its own, which need not be there."""
    has_families, has_clock = any(machine.glob("families_*.json")), (machine / "clock.json").is_file()
    return [*["families"] * has_families, *["clock"] * has_clock]
