"""Ends with an error if a claim fails: python -m harness.jobs.verdict checked=results/laptop/check.json"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.claims import FAIL
from harness.jobs.check import counts
from specter.arguments import run_command
from specter.errors import SpecterError


@dataclass(frozen=True)
class Options:
    """Prints how many claims pass. Exit status 2 if one fails."""

    checked: Path  # of the job check


def main(options: Options) -> None:
    rows = json.loads(options.checked.read_text())["claims"]
    page = options.checked.with_suffix(".md")
    print(f"{counts(rows)}: {page}", file=sys.stderr)
    failed = [f"{row['id']} ({row['measured']} instead of {row['expected']})" for row in rows if row["status"] == FAIL]
    if failed:
        raise SpecterError(f"{len(failed)} claims fail: {'; '.join(failed)}", f"see {page} and claims.yaml")


if __name__ == "__main__":
    run_command(main, Options)
