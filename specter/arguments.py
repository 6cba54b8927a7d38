"""Command lines of `key=value`, as in Hydra, parsed into a dataclass."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from specter.errors import SpecterError

Options = TypeVar("Options")
_READERS: dict[type, tuple[Callable[[str], Any], str, str]] = {  # reader, placeholder, what the reader accepts
    Path: (Path, "PATH", "a path"),
    int: (int, "WHOLE_NUMBER", "a whole number"),
    float: (float, "NUMBER", "a number"),
    str: (str, "TEXT", "a text"),
    bool: (lambda text: {"true": True, "false": False}[text.lower()], "true|false", "true or false"),
}


def parse_arguments(options: type[Options], arguments: Sequence[str]) -> Options:
    """Builds `options`, a dataclass of paths, texts, numbers, booleans and tuples of them, from `key=value` arguments.

    A tuple is written with commas: `tidy=a.parquet,b.parquet`; an empty value is an empty tuple. Fields without a
    default must be given.

    Raises SpecterError: naming the argument that is unknown, missing or malformed, and the remedy.
    """
    known = {option.name: option for option in dataclasses.fields(options)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(options)
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if key not in known or not equals:
            raise SpecterError(f"argument {argument!r} is not understood", f"use key=value; keys: {', '.join(known)}")
        values[key] = _read(key, text, hints[key])
    for key, option in known.items():
        has_default = option.default is not dataclasses.MISSING or option.default_factory is not dataclasses.MISSING
        if key not in values and not has_default:
            raise SpecterError(f"{key} is not given", f"add {key}={_placeholder(hints[key])}")
    return options(**values)


def help_text(options: type[Any]) -> str:
    """The keys of `options` with their types, defaults and the comments behind them, a line each."""
    hints = typing.get_type_hints(options)
    source = "".join(inspect.getsource(base) for base in reversed(options.__mro__[:-1]))
    comments = dict(re.findall(r"^ +(\w+): [^#\n]*# *(.*)$", source, re.MULTILINE))
    lines = [(options.__doc__ or "").strip(), ""]
    for option in dataclasses.fields(options):
        default = "required" if option.default is dataclasses.MISSING else f"default {option.default!s}"
        if option.default_factory is not dataclasses.MISSING:
            default = "default empty"
        line = f"  {option.name}={_placeholder(hints[option.name])}  ({default})"
        lines.append(f"{line}  {comments[option.name]}" if option.name in comments else line)
    return "\n".join(lines)


def run_command(
    main: Callable[[Options], None], options: type[Options], arguments: Sequence[str] | None = None
) -> None:
    """Runs `main` with the command line; `--help` prints the keys, bad input ends on one screen with exit status 2."""
    given = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(given):
        print(help_text(options))
        return
    try:
        main(parse_arguments(options, given))
    except SpecterError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _element(hint: Any) -> tuple[type, bool]:
    """The scalar type of a field, and whether the field is a tuple of it. `X | None` reads as X."""
    if isinstance(hint, types.UnionType):
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def _read(key: str, text: str, hint: Any) -> Any:
    kind, is_tuple = _element(hint)
    reader, placeholder, what = _READERS[kind]
    try:
        return tuple(reader(part) for part in text.split(",") if part) if is_tuple else reader(text)
    except (ValueError, KeyError):
        raise SpecterError(f"{key}={text} is not {what}", f"use {key}={placeholder}") from None


def _placeholder(hint: Any) -> str:
    kind, is_tuple = _element(hint)
    name = _READERS[kind][1]
    return f"{name},{name},..." if is_tuple else name
