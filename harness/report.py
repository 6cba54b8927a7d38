"""One self-contained HTML page of a scale: its figures, its tables and what was checked."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from harness.scales import Scale, load_scale
from specter.arguments import run_command
from specter.files import write_whole

TEMPLATE = Path(__file__).with_name("report.html.j2")


@dataclass(frozen=True)
class Options:
    """Writes the page of a scale."""

    scale: str
    out: Path
    figures: tuple[Path, ...] = ()  # PNG files
    tables: tuple[Path, ...] = ()  # JSON files of `harness.plotting.tables`
    checks: tuple[Path, ...] = ()  # of the job live_check


def render(scale: Scale, figures: Sequence[Path], tables: Sequence[Path], checks: Sequence[Path]) -> str:
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return template.from_string(TEMPLATE.read_text()).render(
        scale=scale,
        figures=[{"name": p.stem, "data": base64.b64encode(p.read_bytes()).decode()} for p in figures],
        tables=[{"name": path.stem, **json.loads(path.read_text())} for path in tables],
        checks=[{"model": path.stem, **json.loads(path.read_text())} for path in checks],
    )


def main(options: Options) -> None:
    page = render(load_scale(options.scale), options.figures, options.tables, options.checks)
    write_whole(options.out, page)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    run_command(main, Options)
