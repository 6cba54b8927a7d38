"""Writes the table of docs/results.md from the studies: python -m harness.artifact"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import catalogue
from harness.studies.registry import DEVICE, FIGURES, TABLES, FigureStudy, TableStudy
from specter.arguments import run_command
from specter.files import write_whole

BEGIN, END = "<!-- results: written by python -m harness.artifact -->", "<!-- end of results -->"
SCALE, MACHINE = "laptop", Path("data/reference/h200")


@dataclass(frozen=True)
class Options:
    """Writes the table of all figures and tables."""

    file: Path = Path("docs/results.md")


def results() -> list[str]:
    """The rows: what each figure and table shows, and its time; a figure and a table of one name share a row."""
    figures = [name for name in catalogue.figures(SCALE) if "-" not in name]
    rows = [*_rows(SCALE, "", "", figures, catalogue.tables(SCALE))]
    measured = [catalogue.of_device(studies, MACHINE) for studies in (FIGURES, TABLES)]
    rows += _rows("device", f"{MACHINE.name}_", DEVICE, *measured)
    return ["| file | shows | time |", "|---|---|---|", *rows]


def _rows(directory: str, prefix: str, kind: str, figures: list[str], tables: list[str]) -> Iterator[str]:
    for name in dict.fromkeys([*figures, *tables]):
        paths = [f"`figures/{directory}/{prefix}{name}.png`"] * (name in figures)
        paths += [f"`paper_tables/{directory}/{prefix}{name}.tex`"] * (name in tables)
        study: FigureStudy | TableStudy = (FIGURES if name in figures else TABLES)[kind + name]
        yield f"| {', '.join(paths)} | {study.about} | {f'{study.minutes} min' if study.minutes else 'seconds'} |"


def render(text: str) -> str:
    """`text` with the rows between its marks."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return "\n".join([f"{before}{BEGIN}", *results(), f"{END}{after}"])


def main(options: Options) -> None:
    write_whole(options.file, render(options.file.read_text()))


if __name__ == "__main__":
    run_command(main, Options)
