"""Registries: entries register under a name where they are defined; legal names come from here."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Generic, TypeVar

from specter.errors import SpecterError

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Named entries of one kind, in the order of registration.

    Args:
        kind: what an entry is, as the configuration key that selects it, for example "system.planner".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """A decorator that adds a class or function under `name`. Raises ValueError if the name is taken."""
        if name in self._entries:
            raise ValueError(f"{self.kind}={name} is registered twice")

        def add(entry: Entry) -> Entry:
            self._entries[name] = entry
            return entry

        return add

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Entry:
        """The entry called `name`. Raises SpecterError listing the registered names."""
        if name not in self._entries:
            raise SpecterError(f"{self.kind}={name!r} is unknown", f"use one of: {', '.join(self._entries)}")
        return self._entries[name]


@functools.cache
def import_modules(package: str) -> None:
    """Imports every module directly in `package`, so that what they register is known.

    Raises SpecterError: there is no such package.
    """
    try:
        path = importlib.import_module(package).__path__
    except (ModuleNotFoundError, AttributeError):
        raise SpecterError(f"{package} is not a package", "name importable packages in extensions") from None
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")
