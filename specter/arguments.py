"""`key=value` command lines, read into a dataclass of paths, words and numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from specter.errors import SpecterError

Options = TypeVar("Options")
_KINDS: dict[str, Callable[[str], Any]] = {"Path": Path, "int": int, "float": float, "str": str}


def parse_arguments(options: type[Options], arguments: Sequence[str]) -> Options:
    """An `options` made from `key=value` arguments; fields without a default must be given.

    Raises:
        SpecterError: naming the argument that is unknown, missing or malformed.
    """
    known = {option.name: option for option in dataclasses.fields(options)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if key not in known or not equals:
            raise SpecterError(f"argument {argument!r} is not understood", f"use key=value; keys: {', '.join(known)}")
        try:
            values[key] = _KINDS[str(known[key].type)](text)
        except ValueError:
            kind = "number" if known[key].type == "float" else "whole number"
            raise SpecterError(f"{key}={text} is not a {kind}", f"use {key}=NUMBER") from None
    for key, option in known.items():
        if key not in values and option.default is dataclasses.MISSING:
            raise SpecterError(f"{key} is not given", f"add {key}={'DIR' if option.type == 'Path' else 'VALUE'}")
    return options(**values)
