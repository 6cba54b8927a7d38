"""Depths chosen offline (`k=profiled`): a file of the best K by system, machine, budget, sampling and data set.

`python -m harness.jobs.depths` writes it. Plain Python: a key in, a number out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from specter.errors import SpecterError
from specter.files import read_object, write_json

PROFILED = "profiled"


@dataclass(frozen=True)
class ProfileKey:
    """What a depth was chosen for."""

    system: str
    hardware: str
    experts_per_layer: float  # the budget, as Specter has it
    sampling: str  # its name
    temperature: float
    dataset: str


def write_profile(path: Path, depths: dict[ProfileKey, int], notes: dict[str, str]) -> None:
    """Writes the K of every key; `notes`: how they were found."""
    write_json(path, {"notes": notes, "depths": [asdict(key) | {"k": k} for key, k in depths.items()]})


def profiled_depth(path: str, key: ProfileKey, model: str) -> int:
    """The K that the profile at `path` has for `key`.

    Raises:
        SpecterError: no profile, a damaged one, or none for this key, with what the profile has instead.
    """
    remedy = f"make it: python -m harness.jobs.depths model={model} out=depths.parquet profile={path or 'FILE'}"
    if not path:
        raise SpecterError(
            f"k={PROFILED}, and model.profile names no file", f"{remedy}, and set model.profile; or give a number"
        )
    if not Path(path).is_file():
        raise SpecterError(f"k={PROFILED}, and the profile model.profile={path} does not exist", remedy)
    try:
        rows = {ProfileKey(**{k: v for k, v in row.items() if k != "k"}): int(row["k"])
                for row in read_object(Path(path), remedy)["depths"]}  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SpecterError(f"{path} is not a profile of depths: {error!r}", f"delete it and {remedy}") from None
    if key not in rows:
        raise SpecterError(f"{path} has no depth for {_nearest_difference(key, rows)}", f"{remedy}; or give a number")
    return rows[key]


def _nearest_difference(key: ProfileKey, known: Iterable[ProfileKey]) -> str:
    """The settings of `key` that no entry has, and what entries have instead."""
    entries = list(known)
    for field in fields(ProfileKey):
        mine: Any = getattr(key, field.name)
        if all(getattr(entry, field.name) != mine for entry in entries):
            values = sorted({str(getattr(entry, field.name)) for entry in entries})
            return f"{field.name}={mine} (it has {', '.join(values) or 'none'})"
        entries = [entry for entry in entries if getattr(entry, field.name) == mine]
    return str(key)
