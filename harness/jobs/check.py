"""Checks claims.yaml on what a scale has produced: python -m harness.jobs.check scale=laptop out=... tidy=..."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness import claims
from harness.jobs import write_table
from harness.plotting.frames import Frames, read
from harness.plotting.tables import Table, to_markdown
from harness.scales import load_scale
from harness.studies.claims import claim_rows
from specter.arguments import run_command
from specter.files import write_whole

ORDER = (claims.FAIL, claims.PASS, claims.NOT_COMPARABLE, claims.NOT_RUN)


@dataclass(frozen=True)
class Options:
    """Checks claims.yaml on what a scale has produced, and on the records of devices."""

    scale: str
    out: tuple[Path, ...]  # the same verdicts in every format: .parquet, .json, .md for reading
    tidy: tuple[Path, ...] = ()  # the tidy tables of the scale
    records: tuple[Path, ...] = ()  # files of data/reference/


def provenance(machine: str, frames: Frames) -> str:
    """The GPUs and commits of a machine's records."""
    stated = {
        name: sorted({str(value) for frame in frames.values() if name in frame for value in frame[name].dropna()})
        for name in ("gpu", "driver_version", "torch", "commit")
    }
    parts = [f"{name.replace('_', ' ')} {' / '.join(values)}" for name, values in stated.items() if values]
    kind = "inflated stand-ins" if stated["gpu"] else "virtual clock; narrow stand-ins"
    return f"data/reference/{machine}: {'; '.join([*parts, kind])}"


def counts(rows: Sequence[dict[str, Any]]) -> str:
    found = Counter(row["status"] for row in rows)
    return ", ".join(f"{found[status]} {status}" for status in ORDER)


def report(scale: str, rows: Sequence[dict[str, Any]], origins: dict[str, str]) -> str:
    """The page: a section for the scale, and one for each machine's records with its provenance."""
    lines = [f"# Claims at scale {scale}", ""]
    for section, origin in origins.items():
        mine = [row for row in rows if row["from"] == section]
        if mine:
            table = Table(section, claim_rows(pd.DataFrame(mine)), 2, [counts(mine) + ".", origin + "."], {})
            lines += [to_markdown(table).replace("### ", "## ", 1)]
    notes = [f"- {row['id']}: {row['note']}" for row in rows if row["note"]]
    return "\n".join([*lines, "## Notes", "", *notes, ""])


def to_json(scale: str, rows: Sequence[dict[str, Any]], origins: dict[str, str]) -> str:
    finite = [{key: None if value != value else value for key, value in row.items()} for row in rows]
    content = {"scale": scale, "origins": origins, "claims": finite}
    return json.dumps(content, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


FORMATS = {".json": to_json, ".md": report}


def main(options: Options) -> None:
    size, stated = load_scale(options.scale), claims.load_claims()
    machines = sorted({path.parent.name for path in options.records})
    records = {name: read([path for path in options.records if path.parent.name == name]) for name in machines}
    rows = claims.check(stated, size.name, size.checkpoint_kind, read(options.tidy), records)
    origins = {f"scale {size.name}": f"Produced at this scale: {size.about}"}
    origins |= {f"device reference {name}": provenance(name, frames) for name, frames in records.items()}
    for path in options.out:
        if path.suffix == ".parquet":
            write_table(path, pd.DataFrame(rows).assign(checkpoint_kind=size.checkpoint_kind))
        else:
            write_whole(path, FORMATS[path.suffix](size.name, rows, origins))
    print(counts(rows))


if __name__ == "__main__":
    run_command(main, Options)
