"""Sources of the stand-ins' training text: named Debian packages and CPython's library.

Evaluation prompts (GSM8K, HumanEval) are not in them. Packages are unpacked, not installed.
"""

from __future__ import annotations

import gzip
import html
import re
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from specter.errors import SpecterError

MIN_DOCUMENT_CHARS = 400
_DROPPED_HTML = re.compile(r"<(script|style|head|nav|header|footer)\b.*?</\1>", re.S | re.I)
_BLOCK_TAG = re.compile(r"</?(p|div|li|ul|ol|tr|table|h[1-6]|pre|br|dt|dd|section|item|steps|title|note)\b[^>]*>", re.I)
_TAG = re.compile(r"<[^>]+>")


@dataclass(frozen=True)
class Source:
    """A Debian package, a glob of its text files below its root, and their kind."""

    package: str
    pattern: str
    kind: str = "plain"
    max_chars: int = 12_000_000  # no single manual dominates


SOURCES = tuple(Source(**source) for source in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()))


def strip_markup(text: str) -> str:
    """The readable text of an HTML or Mallard page."""
    text = _TAG.sub("", _BLOCK_TAG.sub("\n", _DROPPED_HTML.sub("", text)))
    return re.sub(r"\n\s*\n+", "\n\n", html.unescape(text).replace("\xa0", " ")).strip()


def is_english(text: str) -> bool:
    """Whether common English words are 8 % or more of the words and nearly all characters are ASCII."""
    head = text[:20000]
    words = re.findall(r"[A-Za-z]+", head.lower())
    common = sum(word in {"the", "of", "to", "a", "and", "is", "in", "that", "for", "it"} for word in words)
    num_ascii = sum(character < "\x80" for character in head)
    return len(words) > 40 and common >= 0.08 * len(words) and num_ascii > 0.97 * len(head)


def _grouped(pieces: list[str], separator: str = "\n\n", size: int = 6000) -> Iterator[str]:
    """Joins short pieces to documents of about `size` characters."""
    group: list[str] = []
    length = 0
    for piece in pieces:
        group.append(piece)
        length += len(piece)
        if length >= size:
            yield separator.join(group)
            group, length = [], 0
    if group:
        yield separator.join(group)


def _glosses(text: str) -> Iterator[str]:
    pairs = [line.split(" | ", 1) for line in text.splitlines() if " | " in line]
    return _grouped([f"{words.split()[4].replace('_', ' ')}: {gloss.strip()}." for words, gloss in pairs], "\n")


def _dialogue(text: str) -> Iterator[str]:
    lines = [re.sub(r"<[^>]+>|\^", "", line) for line in re.findall(r'_\s*"([^"]+)"', text)]
    return _grouped([line for line in lines if len(line) > 30])


_READERS: dict[str, Callable[[str], Iterator[str]]] = {
    "plain": lambda text: iter([text]),
    "html": lambda text: filter(is_english, (strip_markup(text),)),
    "entries": lambda text: _grouped([text[start : start + 6000] for start in range(0, len(text), 6000)]),
    "glosses": _glosses,
    "dialogue": _dialogue,
    "fortunes": lambda text: _grouped(re.split(r"\n%\n", text)),
}


def _read(path: Path) -> str:
    raw = gzip.decompress(path.read_bytes()) if path.suffix in (".gz", ".dz") else path.read_bytes()
    return raw.decode("utf-8", errors="ignore").replace("\r\n", "\n")


def read_source(source: Source, root: Path) -> Iterator[str]:
    """Documents of one unpacked package, in path order, up to the source's limit.

    Raises SpecterError: the pattern matches no file.
    """
    paths = sorted(path for path in root.glob(source.pattern) if path.is_file() and path.suffix not in (".dat", ".u8"))
    if not paths:
        raise SpecterError(
            f"{source.package}: no file matches {source.pattern}", "adapt its entry in tools/standin/sources.yaml"
        )
    taken = 0
    for document in (document for path in paths for document in _READERS[source.kind](_read(path))):
        if len(document) >= MIN_DOCUMENT_CHARS:
            taken += len(document)
            if taken > source.max_chars:
                return
            yield document


def read_python_library() -> Iterator[str]:
    """The running CPython's standard library, without tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("**/*.py")):
        parts = path.relative_to(root).parts
        if {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}.isdisjoint(parts):
            yield path.read_text(errors="ignore")


def fetch_package(package: str, folder: Path) -> Path:
    """Downloads a package with apt (nothing is installed); returns the .deb.

    Raises SpecterError: apt or the package is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{package}_*.deb"
    if not any(folder.glob(pattern)):
        try:
            subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SpecterError(
                f"cannot download the Debian package {package}: {error}",
                "run on Debian 12 (or a container of it) after `apt-get update`",
            ) from None
    return max(folder.glob(pattern))
