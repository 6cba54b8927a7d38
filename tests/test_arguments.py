"""Command lines of the form key=value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from specter.arguments import parse_arguments
from specter.errors import SpecterError


@dataclass(frozen=True)
class Options:
    out: Path
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
