"""One self-contained HTML page of a scale: its figures, its tables and what was checked."""

from __future__ import annotations

import argparse
import base64
import json
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from harness.jobs import run_job
from harness.scales import Scale, load_scale
from specter.files import write_whole

TEMPLATE = Path(__file__).with_name("page.html.j2")


@dataclass(frozen=True)
class MarkdownTable:
    """A table file as `harness.tables` writes it: a title, rows between bars, notes."""

    name: str
    title: str
    header: list[str]
    rows: list[list[str]]
    keys: int  # leading columns of text
    notes: list[str]

    @classmethod
    def read(cls, path: Path) -> MarkdownTable:
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
        bars = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        keys = sum(not cell.endswith(":") for cell in bars[1])
        notes = [line for line in lines[1:] if not line.startswith("|")]
        return cls(path.stem, lines[0].lstrip("# "), bars[0], bars[2:], keys, notes)


def render(scale: Scale, figures: list[Path], tables: list[Path], checks: list[Path]) -> str:
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return template.from_string(TEMPLATE.read_text()).render(
        scale=scale,
        figures=[{"name": p.stem, "data": base64.b64encode(p.read_bytes()).decode()} for p in figures],
        tables=[MarkdownTable.read(path) for path in tables],
        checks=[{"model": path.stem, **json.loads(path.read_text())} for path in checks],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", required=True)
    parser.add_argument("--out", type=Path, required=True)
    for name in ("--figures", "--tables", "--checks"):
        parser.add_argument(name, type=Path, nargs="*", default=[])
    arguments = parser.parse_args()
    write_whole(
        arguments.out, render(load_scale(arguments.scale), arguments.figures, arguments.tables, arguments.checks)
    )
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    run_job(main)
