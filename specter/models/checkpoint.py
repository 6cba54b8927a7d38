"""A strict reader of hub checkpoints (config.json and safetensors), and a small writer.

Every expected tensor must occur exactly once, with its shape, and no other tensor. The structure is checked from the
files' headers before tensors are read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specter.errors import SpecterError
from specter.files import write_json
from specter.models.hub_config import config_of, read_spec
from specter.models.int8_format import FORMAT, SCALE_SUFFIX, decode_tensor, encode
from specter.models.names import PARTS, Shape, canonical, expected_shapes, on_hub
from specter.models.spec import ModelSpec

_MAX_MAPPED_BYTES = 2 * 2**20
_FLOATS = ("F32", "F16", "BF16")
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1}
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


class Checkpoint:
    """A checked directory; tensors are read one at a time, as fp32."""

    def __init__(self, directory: Path, spec: ModelSpec, entries: dict[str, StoredTensor]) -> None:
        """Use `Checkpoint.open`."""
        self.directory = directory
        self.spec = spec
        self._entries = entries
        self._files: dict[Path, Any] = {}  # open ones
        self._mapped_bytes = 0  # read from them

    @classmethod
    def open(cls, directory: Path | str) -> Checkpoint:
        """Opens a hub directory and checks its structure.
        Raises SpecterError: naming the file or tensor that is missing, truncated, unexpected or of the wrong shape."""
        directory = Path(directory)
        spec = read_spec(directory)
        files = indexed_files(directory) or [directory / SINGLE_FILE]
        if not files[0].is_file():
            raise SpecterError(
                f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}",
                "give a checkpoint directory in hub format with safetensors weights",
            )
        entries = read_headers(files, spec.family)
        check_index(directory, entries)
        _check(spec, directory.name, entries)
        return cls(directory, spec, entries)

    def tensor(self, name: str) -> Tensor:
        """One tensor as fp32, decoded if it is int8-coded. Raises SpecterError: it holds NaN or infinite values."""
        return self._value(name).float()

    def experts(self, layer: int) -> tuple[Tensor, Tensor]:
        """Routed experts of MoE layer `layer` (dense layers not counted): gate_up [E, 2F, D], down [E, D, F], fp32."""
        spec = self.spec
        gate_up = torch.empty(spec.num_experts, 2 * spec.expert_inter, spec.hidden)
        down = torch.empty(spec.num_experts, spec.hidden, spec.expert_inter)
        self.read_experts(layer, gate_up, down)
        return gate_up, down

    def read_experts(self, layer: int, gate_up: Tensor, down: Tensor) -> None:
        """Reads `experts` into tensors of any float type, with the extra memory of one expert."""
        prefix = f"model.layers.{layer + self.spec.num_dense_layers}.mlp.experts"
        inter = self.spec.expert_inter
        is_fused = f"{prefix}.gate_up_proj" in self._entries
        for expert in range(self.spec.num_experts):
            if is_fused:
                gate_up[expert] = self._value(f"{prefix}.gate_up_proj", expert)
                down[expert] = self._value(f"{prefix}.down_proj", expert)
                continue
            gate, up, narrow = (f"{prefix}.{expert}.{part}.weight" for part in PARTS)
            gate_up[expert, :inter] = self._value(gate)
            gate_up[expert, inter:] = self._value(up)
            down[expert] = self._value(narrow)

    def digest(self) -> str:
        """SHA-256 over the names and contents of config.json and the weight files."""
        paths = {entry.path for entry in self._entries.values()} | {self.directory / "config.json"}
        total = hashlib.sha256()
        for path in sorted(paths):
            stat = path.stat()
            total.update(f"{path.name} {_file_digest(path, stat.st_size, stat.st_mtime_ns)}\n".encode())
        return total.hexdigest()

    @property
    def stored_bytes(self) -> dict[str, int]:
        """Bytes in the files by type: F32, F16, BF16, I8."""
        total: dict[str, int] = {}
        for entry in self._entries.values():
            size = math.prod(entry.shape) * _ITEM_BYTES[entry.dtype]
            total[entry.dtype] = total.get(entry.dtype, 0) + size
        return total

    @property
    def expert_dtypes(self) -> set[str]:
        """Stored types of the routed experts' matrices: F32, F16, BF16, I8."""
        items = self._entries.items()
        return {entry.dtype for key, entry in items if ".mlp.experts." in key and not key.endswith(SCALE_SUFFIX)}

    @property
    def num_files(self) -> int:
        return len({entry.path for entry in self._entries.values()})

    def _value(self, name: str, index: int | None = None) -> Tensor:
        """A tensor, or only its `index`-th row, decoded and checked, in the stored type."""
        value = self._read(name, index)
        if self._entries[name].dtype == "I8":
            value = decode_tensor(value, self._read(name + SCALE_SUFFIX, index))
        if not bool(value.isfinite().all()):
            raise SpecterError(
                f"tensor {self._entries[name].name} in {self._entries[name].path} holds NaN or infinite values",
                "download the checkpoint again, or write it again from finite weights",
            )
        return value

    def _read(self, name: str, index: int | None = None) -> Tensor:
        entry = self._entries[name]
        if self._mapped_bytes > _MAX_MAPPED_BYTES:  # mapped pages stay in memory while the file is open
            self._files.clear()
            self._mapped_bytes = 0
        file = self._files.get(entry.path)
        if file is None:
            file = self._files[entry.path] = safe_open(entry.path, framework="pt")
        value: Tensor = file.get_tensor(entry.name) if index is None else file.get_slice(entry.name)[index]
        self._mapped_bytes += value.nbytes
        return value


def write_checkpoint(directory: Path, spec: ModelSpec, tensors: dict[str, Tensor], int8: bool = False) -> None:
    """Writes config.json and model.safetensors of `tensors`, given by Specter's names, under the publisher's names;
    `int8`: in the stand-ins' format."""
    write_json(directory / "config.json", config_of(spec))
    metadata = {"format": FORMAT if int8 else "pt"}
    stored = encode(tensors) if int8 else {name: tensor.contiguous() for name, tensor in tensors.items()}
    stored = {on_hub(spec.family, name): tensor for name, tensor in stored.items()}
    save_file(stored, directory / SINGLE_FILE, metadata=metadata)


def _check(spec: ModelSpec, name: str, entries: dict[str, StoredTensor]) -> None:
    def shown(key: str) -> str:
        return entries[key].name if key in entries else on_hub(spec.family, key)

    fused = any(key.endswith(".mlp.experts.gate_up_proj") for key in entries)
    expected = expected_shapes(spec, fused)
    remedy = "the weights must match config.json: download the whole checkpoint again"
    missing = [key for key in expected if key not in entries]
    if missing:
        raise SpecterError(f"{name}: tensor {shown(missing[0])} is missing ({len(missing)} in all)", remedy)
    scales: set[str] = set()
    for key, shape in expected.items():
        entry = entries[key]
        if entry.shape != shape:
            raise SpecterError(f"{name}: tensor {shown(key)} has shape {entry.shape}, expected {shape}", remedy)
        if entry.dtype == "I8":
            scale = entries.get(key + SCALE_SUFFIX)
            if scale is None or scale.shape != shape[:-1] or scale.dtype not in _FLOATS:
                found = "missing" if scale is None else f"{scale.dtype} {scale.shape}"
                raise SpecterError(
                    f"{name}: int8 tensor {key} needs a scale {key + SCALE_SUFFIX} {shape[:-1]}; it is {found}", remedy
                )
            scales.add(key + SCALE_SUFFIX)
        elif entry.dtype not in _FLOATS:
            raise SpecterError(
                f"{name}: tensor {shown(key)} is {entry.dtype}", f"use weights in {', '.join(_FLOATS)} or {FORMAT}"
            )
    unexpected = sorted(entries.keys() - expected.keys() - scales)
    if unexpected:
        raise SpecterError(f"{name}: tensor {shown(unexpected[0])} is unexpected ({len(unexpected)} in all)", remedy)


@cache
def _file_digest(path: Path, size_bytes: int, mtime_ns: int) -> str:
    """SHA-256 of a file, cached by size and time of change."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
