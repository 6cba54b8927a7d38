"""Dataclasses from plain values and from YAML files, strictly typed. Nothing here imports torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from specter.errors import SpecterError

Schema = TypeVar("Schema")
Names = Callable[[], tuple[str, ...]]


def one_of(*names: str) -> dict[str, Names]:
    """The metadata of a field with a closed list of legal values."""
    return {"names": lambda: names}


@functools.cache
def legal_names(schema: type[Any], prefix: str = "") -> dict[str, Names]:
    """Keys of a schema, nested or not, with a list of legal values, and what returns it."""
    found: dict[str, Names] = {}
    for name, hint in get_type_hints(schema).items():
        if isinstance(hint, type) and is_dataclass(hint):
            found |= legal_names(hint, f"{prefix}{name}.")
        elif "names" in (metadata := schema.__dataclass_fields__[name].metadata):
            found[prefix + name] = metadata["names"]
    return found


def build_typed(schema: type[Schema], values: Any, where: str = "") -> Schema:
    """A dataclass from the values of its keys, nested or not.

    Args:
        where: of the values, in messages.
    Raises:
        SpecterError: an unknown key, a missing key or a value of the wrong type, by name.
    """
    try:
        empty = OmegaConf.structured(schema)
        for node in (empty, *map(empty._get_node, empty)):
            if isinstance(node, DictConfig):  # a frozen dataclass makes a read-only node, which refuses all values
                OmegaConf.set_readonly(node, None)
        built = OmegaConf.to_object(OmegaConf.merge(empty, values))
    except OmegaConfBaseException as error:
        what = f"{where}{error.full_key or schema.__name__}: {str(error).splitlines()[0]}"
        place = f"{schema.__name__} in {schema.__module__.replace('.', '/')}.py"
        raise SpecterError(what, f"see conf/ and {place} for the known keys and their types") from None
    assert isinstance(built, schema)
    return built


def load_typed(schema: type[Schema], path: Path) -> Schema:
    """A dataclass from a file such as conf/hardware/a100_40gb_pcie4.yaml, whose stem is its `name`, if it has one.

    Raises:
        SpecterError: no such file, with those beside it; not YAML; as `build_typed`; another name.
    """
    if not path.is_file():
        known = ", ".join(sorted(one.stem for one in path.parent.glob("*.yaml"))) or "none"
        raise SpecterError(f"{path.parent.name} {path.stem!r} is unknown", f"use one of: {known}")
    try:
        values = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError, OSError) as error:
        raise SpecterError(f"{path} cannot be read: {error}", "repair the YAML") from None
    built = build_typed(schema, values, f"{path}: ")
    if (name := getattr(built, "name", path.stem)) != path.stem:
        raise SpecterError(f"{path}: name is {name!r}", f"name it {path.stem!r}, like its file")
    return built


def to_dict(config: Any) -> dict[str, Any]:
    """A config (or a group of it) as plain values, ready for YAML."""
    return {f.name: to_dict(value) if is_dataclass(value := getattr(config, f.name)) else value for f in fields(config)}


def default_values(schema: type[Any]) -> dict[str, Any]:
    """The default values of a schema, groups nested; a group without a default of its own gives its fields'."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(schema).items():
        one = schema.__dataclass_fields__[name]
        if isinstance(hint, type) and is_dataclass(hint):
            found[name] = default_values(hint)
        elif one.default is not MISSING:
            found[name] = one.default
        elif one.default_factory is not MISSING:
            found[name] = one.default_factory()
    return found
