"""One self-contained HTML page of a scale: what was found, claims, figures, tables, environment, and runs in detail."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from PIL import Image

from harness import drill
from harness.plotting.tables import shown
from harness.plotting.titles import title
from harness.scales import load_scale
from harness.studies.registry import DEVICE
from specter.arguments import run_command
from specter.files import write_whole

TEMPLATE = Path(__file__).with_name("report.html.j2")
RECORDS = "device reference "  # before the machine's name, where claims state where they come from
NUM_COLOURS = 64  # of a picture on the page; the files in figures/ have them all
WIDE_PIXELS = 1000  # of a picture of two columns


@dataclass(frozen=True)
class Options:
    """Writes the page of a scale."""

    scale: str
    out: Path
    claims: Path  # check.json of `harness.jobs.check`
    figures: tuple[Path, ...] = ()  # PNG files
    captions: tuple[Path, ...] = ()  # of the figures, in their order: JSON files of `harness.jobs.draw`
    tables: tuple[Path, ...] = ()  # JSON files of `harness.plotting.tables`
    checks: tuple[Path, ...] = ()  # of the job live_check
    runs: tuple[Path, ...] = ()  # directories of runs that can be read in detail
    manifests: tuple[Path, ...] = ()  # of these directories, in their order


def picture(path: Path) -> dict[str, Any]:
    """A PNG file with fewer colours, as the page embeds it: a third of its size."""
    small, drawn = io.BytesIO(), Image.open(path).convert("RGB")
    drawn.quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    data = f"data:image/png;base64,{base64.b64encode(small.getvalue()).decode()}"
    return {"data": data, "is_narrow": drawn.width < WIDE_PIXELS}


def figures(options: Options) -> Iterator[dict[str, Any]]:
    """Each figure with its caption, and under `others` the same figure of other models."""
    found: dict[str, dict[str, Any]] = {}
    for path, caption in zip(options.figures, options.captions, strict=True):
        name, _, model = path.stem.partition("-")
        one = {"path": str(path.with_suffix(".pdf")), **picture(path), **json.loads(caption.read_text())}
        of = {"name": name, "is_measured": path.parent.name == "device", "model": title("model", model), "others": []}
        if name in found:
            found[name]["others"].append(one | of)
        else:
            found[name] = one | of
    yield from found.values()


def claims(path: Path) -> dict[str, Any]:
    """The verdicts by where they come from, with numbers as tables show them."""
    checked = json.loads(path.read_text())
    for row in checked["claims"]:
        row |= {key: "–" if row[key] is None else shown(float(row[key])) for key in ("published", "measured")}
        machine = row["from"].removeprefix(RECORDS)
        row["anchors"] = [(one, anchor(one, machine)) for one in row["shown"].split(", ") if one]
    counts = Counter(row["status"] for row in checked["claims"])
    sections = [
        {"from": name, "origin": origin, "rows": [row for row in checked["claims"] if row["from"] == name]}
        for name, origin in checked["origins"].items()
    ]
    return {"counts": counts, "sections": sections}


def anchor(study: str, machine: str) -> str:
    """The id of a figure or table on the page, from "figure tpot" or "table device.clock" of a machine."""
    kind, _, name = study.partition(" ")
    return f"{kind}-{name.replace(DEVICE, f'{machine}_')}"


def render(options: Options) -> str:
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    drawn = list(figures(options))
    runs = drill.runs_of(options.runs, options.manifests)
    return template.from_string(TEMPLATE.read_text()).render(
        scale=load_scale(options.scale),
        claims=claims(options.claims),
        figures=drawn,
        tables=[{"name": path.stem, "is_measured": "device" in path.parts, **json.loads(path.read_text())}
                for path in options.tables],
        checks=[{"model": title("model", path.stem), **json.loads(path.read_text())} for path in options.checks],
        environment=list(drill.environments(runs["runs"])),
        num_runs=len(runs["runs"]),
        runs=drill.packed(runs),
    )  # fmt: skip


def main(options: Options) -> None:
    write_whole(options.out, render(options))
    print(f"wrote {options.out}")


if __name__ == "__main__":
    run_command(main, Options)
