"""Files that are written whole or not at all, and digests of their contents."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specter.errors import SpecterError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it replaces `path` on success and is removed on failure.

    The name holds the process id, so two processes that write the same file do not disturb each other.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file atomically, creating its directory."""
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON with an indent of 1, atomically."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """Reads a JSON object. Raises SpecterError with `remedy` if the file is missing or holds anything else."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise SpecterError(f"no {path.name} in {path.parent}", remedy) from None
    except ValueError as error:
        raise SpecterError(f"{path} is not JSON: {error}", remedy) from None
    if not isinstance(content, dict):
        raise SpecterError(f"{path} holds a {type(content).__name__}, not an object", remedy)
    return content


def check_free(out: Path) -> None:
    """Raises SpecterError if `out` is a file or a directory that is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SpecterError(f"{out} exists already", "remove it or give another out=DIR")


def check_writable(directory: Path) -> None:
    """Creates `directory`. Raises SpecterError if files cannot be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise SpecterError(
            f"{directory} cannot be written: {error.strerror}", "set results=... to a directory that can"
        ) from None


@contextmanager
def replacing_directory(out: Path) -> Iterator[Path]:
    """A directory to fill; it becomes `out` on success and is removed on failure.

    Raises SpecterError: `out` is not free, or cannot be written.
    """
    check_free(out)
    partial = out.parent / f".{out.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
        partial.mkdir(parents=True)
    except OSError as error:
        raise SpecterError(f"{out} cannot be written ({error.strerror})", "give an out=DIR that is writable") from None
    try:
        yield partial
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def files_digest(root: Path, *patterns: str) -> str:
    """SHA-256 over the names and contents of the files under `root` that match one of the patterns."""
    total = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in root.glob(pattern) if path.is_file()}):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(root)} {digest}\n".encode())
    return total.hexdigest()
