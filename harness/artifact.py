"""Writes the table of results in ARTIFACT.md from the studies: python -m harness.artifact"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness import catalogue
from harness.studies.registry import FIGURES, TABLES, FigureStudy, TableStudy
from specter.arguments import run_command
from specter.files import write_whole

BEGIN, END = "<!-- results: written by python -m harness.artifact -->", "<!-- end of results -->"
SCALE, MACHINE = "laptop", Path("data/reference/h200")


@dataclass(frozen=True)
class Options:
    """Writes the table of results in ARTIFACT.md."""

    file: Path = Path("ARTIFACT.md")


def results() -> list[str]:
    """The rows: what each figure and table shows, and its time; a figure and a table of one name share a row."""
    figures = [name for name in catalogue.figures(SCALE) if "-" not in name]
    tables = catalogue.tables(SCALE)
    rows = [_row(SCALE, name, name, figures, tables) for name in dict.fromkeys([*figures, *tables])]
    figures, tables = catalogue.device_figures(MACHINE), catalogue.device_tables(MACHINE)
    names = dict.fromkeys([*figures, *tables])
    rows += [_row("device", f"{MACHINE.name}_{name}", name, figures, tables) for name in names]
    return ["| file | shows | time |", "|---|---|---|", *rows]


def _row(scale: str, file: str, name: str, figures: list[str], tables: list[str]) -> str:
    key = name if scale == SCALE else f"device.{name}"
    paths = [f"`figures/{scale}/{file}.png`"] * (name in figures)
    paths += [f"`paper_tables/{scale}/{file}.tex`"] * (name in tables)
    study: FigureStudy | TableStudy = FIGURES[key] if name in figures else TABLES[key]
    time = f"{study.minutes} min" if study.minutes else "seconds"
    return f"| {', '.join(paths)} | {study.about} | {time} |"


def render(text: str) -> str:
    """`text` with the rows between its marks."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return "\n".join([f"{before}{BEGIN}", *results(), f"{END}{after}"])


def main(options: Options) -> None:
    write_whole(options.file, render(options.file.read_text()))


if __name__ == "__main__":
    run_command(main, Options)
