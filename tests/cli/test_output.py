"""A generated text survives the stream that it is written to."""

from __future__ import annotations

import errno
import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from specter.cli.output import Output


class Failing(io.StringIO):
    """A stream that takes a few characters."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def write(self, text: str) -> int:
        self._room -= len(text)
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


@pytest.fixture(autouse=True)
def _keep_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", sys.stdout)


def test_pieces_are_written_as_they_come_and_the_text_ends_with_a_line() -> None:
    stream = io.StringIO()
    output = Output(stream)
    output.write("one ")
    assert stream.getvalue() == "one "
    output.write("two")
    output.finish(Console(file=io.StringIO()))
    assert stream.getvalue() == "one two\n"


def test_a_full_disk_leaves_the_whole_text_in_a_file_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    messages = io.StringIO()
    output = Output(Failing(5))
    for piece in ("one ", "two ", "三\n"):
        output.write(piece)
    output.finish(Console(file=messages, width=500))
    found = re.search(r"No space left on device.* is in (\S+)", messages.getvalue())
    assert found and Path(found[1]).read_text(encoding="utf-8") == "one two 三\n"


def test_where_nothing_can_be_written_the_text_goes_to_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/at-all")
    messages = io.StringIO()
    output = Output(Failing(0))
    output.write("[the] text")
    output.finish(Console(file=messages))
    assert "[the] text" in messages.getvalue()


def test_a_terminal_that_cannot_show_a_character_shows_its_code() -> None:
    raw = io.BytesIO()
    output = Output(io.TextIOWrapper(raw, encoding="ascii"))
    output.write("a 한 🙂")
    assert raw.getvalue() == b"a \\ud55c \\U0001f642"


def test_a_closed_output_leaves_the_whole_text_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "stdout", None)
    output, messages = Output(), io.StringIO()
    output.write("the text")
    output.finish(Console(file=messages, width=500))
    found = re.search(r"it is closed.* is in (\S+)", messages.getvalue())
    assert found and Path(found[1]).read_text(encoding="utf-8").rstrip("\n") == "the text"
