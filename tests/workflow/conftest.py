"""A scratch checkout: the repository's files, with a conf/ and results of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ("Snakefile", "rules", "captions", "profiles", "environment.yml", "specter", "harness", "baselines", "data")


@dataclass(frozen=True)
class Checkout:
    root: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", "--cores", "1", *arguments]

    def snakemake(self, *arguments: str, expect: int = 0) -> str:
        """Runs Snakemake to its end; returns what it printed."""
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.root,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == expect, done.stdout[-4000:]
        return done.stdout

    def pending(self, target: str) -> dict[str, int]:
        """Jobs per rule that a call for `target` would run now."""
        text = self.snakemake("-n", "--quiet", "host", "--", target)
        if "Nothing to be done" in text:
            return {}
        table = text[text.index("Job stats:") :]
        return {rule: int(number) for rule, number in re.findall(r"^(\w+) +(\d+)$", table, re.M) if rule != "total"}

    def pretend_finished(self, target: str) -> None:
        """Creates every output of `target` empty, and has Snakemake take note of it."""
        summary = self.snakemake("--summary", "--", target)
        rows = [line.split("\t") for line in summary.splitlines() if line.count("\t") >= 5]
        for output in (self.root / row[0] for row in rows if row[0] != "output_file"):
            output.parent.mkdir(parents=True, exist_ok=True)
            if output.suffix:
                output.touch()
            else:
                output.mkdir(exist_ok=True)
        self.snakemake("--touch", "--", target)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    for name in SHARED:
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    return Checkout(tmp_path)
