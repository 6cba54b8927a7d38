"""Command lines of the form key=value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from specter.arguments import help_text, parse_arguments, run_command
from specter.errors import SpecterError
from tests.helpers import exit_status


@dataclass(frozen=True)
class Options:
    """Makes a directory."""

    out: Path  # directory to make
    method: str = "gptq"
    group: int = 128


def test_values_have_their_types() -> None:
    assert parse_arguments(Options, ["out=a/b=c", "group=64"]) == Options(Path("a/b=c"), "gptq", 64)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["out=x", "grop=64"], "'grop=64' is not understood"),
        (["out=x", "group"], "'group' is not understood"),
        (["out=x", "group=many"], "group=many is not a whole number"),
        (["group=64"], "out is not given"),
    ],
)
def test_a_bad_argument_is_named(arguments: list[str], fault: str) -> None:
    with pytest.raises(SpecterError, match=fault):
        parse_arguments(Options, arguments)


@dataclass(frozen=True)
class Wide(Options):
    names: tuple[str, ...] = ("a",)  # of runs
    rates: tuple[float, ...] = ()
    is_new: bool = False
    limit: int | None = None


def test_tuples_booleans_and_optional_values_are_read() -> None:
    options = parse_arguments(Wide, ["out=x", "names=b,c", "rates=0.5,1", "is_new=True", "limit=3"])
    assert options == Wide(Path("x"), names=("b", "c"), rates=(0.5, 1.0), is_new=True, limit=3)
    assert parse_arguments(Wide, ["out=x", "names="]).names == ()
    with pytest.raises(SpecterError, match="is_new=maybe is not true or false"):
        parse_arguments(Wide, ["out=x", "is_new=maybe"])


def test_help_lists_keys_defaults_and_comments() -> None:
    lines = help_text(Wide).splitlines()
    assert "  out=PATH  (required)  directory to make" in lines
    assert "  group=WHOLE_NUMBER  (default 128)" in lines
    assert any(line.startswith("  names=TEXT,TEXT,...") and line.endswith("of runs") for line in lines)
    assert help_text(Options).startswith("Makes a directory.")


def test_a_command_ends_with_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Options] = []

    def main(options: Options) -> None:
        seen.append(options)
        if options.group == 0:
            raise SpecterError("no group", "give group=1")
        if options.group == 1:
            raise KeyboardInterrupt

    def status(*arguments: str) -> int:
        return exit_status(lambda given: run_command(main, Options, given), arguments)

    assert status("out=x") == 0 and seen == [Options(Path("x"))]
    assert status("--help") == 0 and "out=PATH" in capsys.readouterr().out and len(seen) == 1
    assert status("out=x", "group=0") == 2
    assert "no group" in (errors := capsys.readouterr().err) and "give group=1" in errors
    assert status("out=x", "group=1") == 130
    assert status("method=rtn") == 2 and "add out=PATH" in capsys.readouterr().err
