"""Headers and index of a directory of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from specter.errors import SpecterError
from specter.models.names import Shape, canonical

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as described in its file's header."""

    path: Path
    name: str  # in the file
    shape: Shape
    dtype: str


def indexed_files(directory: Path) -> list[Path]:
    """The files that the directory's index names, sorted; empty without an index.
    Raises SpecterError: a damaged index, or a missing file."""
    names = sorted(set(_weight_map(directory / INDEX_FILE).values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise SpecterError(
            f"shard {missing[0]}, named in {directory / INDEX_FILE}, is missing ({len(missing)} of {len(names)} shards "
            "are)",
            f"download the whole checkpoint; still missing: {', '.join(missing)}",
        )
    return [directory / name for name in names]


def read_headers(paths: Iterable[Path], family: str) -> dict[str, StoredTensor]:
    """The tensors in the files, by Specter's name. Raises SpecterError: a damaged file, or a tensor in two files."""
    entries: dict[str, StoredTensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for stored in file.keys():  # noqa: SIM118 (not a mapping)
                    name = canonical(family, stored)
                    if name in entries:
                        raise SpecterError(
                            f"tensor {name} is in both {entries[name].path.name} and {path.name}",
                            "remove the file that does not belong to the checkpoint",
                        )
                    header = file.get_slice(stored)
                    entries[name] = StoredTensor(path, stored, tuple(header.get_shape()), header.get_dtype())
        except (SafetensorError, OSError) as error:
            raise SpecterError(
                f"{path} cannot be read as safetensors ({error})",
                "it is truncated or damaged: download the file again, or quantize again",
            ) from None
    return entries


def check_index(directory: Path, entries: Mapping[str, StoredTensor]) -> None:
    """Raises SpecterError unless every tensor of the index, if any, is in the file that it names."""
    places = {entry.name: entry.path.name for entry in entries.values()}
    weight_map = _weight_map(directory / INDEX_FILE)
    astray = [(name, file) for name, file in weight_map.items() if places.get(name) != file]
    if astray:
        name, file = astray[0]
        where = f"it is in {places[name]}" if name in places else "no shard has it"
        raise SpecterError(
            f"{directory / INDEX_FILE} places {name} in {file}, but {where} ({len(astray)} such tensors)",
            "the index belongs to other shards: download index and shards of one revision",
        )


def _weight_map(index: Path) -> dict[str, str]:
    if not index.is_file():
        return {}
    try:
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        if not all(isinstance(file, str) for file in weight_map.values()) or not weight_map:
            raise TypeError
    except (ValueError, KeyError, AttributeError, TypeError):
        raise SpecterError(f"{index} is not a safetensors index", "download the file again") from None
    return weight_map
