"""Text on standard output, as it is made, that neither a full disk nor a terminal's encoding loses."""

from __future__ import annotations

import errno
import io
import sys
import tempfile
from pathlib import Path
from typing import TextIO

from rich.console import Console


def show_any_character(stream: TextIO | None) -> None:
    """A terminal that cannot show a character shows its code."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


class Output:
    """Writes pieces of a text. When the stream fails, the whole text goes to a file, and `finish` names it."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream: TextIO | None = stream or sys.stdout  # None: closed by who called the program
        show_any_character(self._stream)
        self._pieces: list[str] = []
        self._error = OSError(errno.EBADF, "it is closed") if self._stream is None else None

    def write(self, piece: str) -> None:
        if not piece:
            return
        self._pieces.append(piece)
        if self._stream is not None and self._error is None:
            try:
                self._stream.write(piece)
                self._stream.flush()
            except OSError as error:  # a full disk, a reader that left
                self._error = error

    def finish(self, console: Console) -> None:
        """Ends the text; where the stream has failed, says so on `console` and saves the text or prints it there."""
        if self._pieces and not self._pieces[-1].endswith("\n"):
            self.write("\n")
        if self._error is None:
            return
        sys.stdout = None  # else the interpreter flushes it at exit, and fails
        text, reason = "".join(self._pieces), self._error.strerror
        try:
            with tempfile.NamedTemporaryFile("w", suffix=".txt", prefix="specter-", delete=False) as file:
                file.write(text)
        except OSError:
            console.print(f"standard output failed ({reason}); the text was:")
            console.print(text, markup=False, highlight=False)
        else:
            console.print(f"standard output failed ({reason}); the whole text is in {Path(file.name)}")
