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
SHARED = (
    "Snakefile", "claims.yaml", "rules", "captions", "profiles", "environment.yml", "specter", "harness", "baselines",
    "data",
)  # fmt: skip

# Creates the files of `--out`, `out=`, `manifest=` and `rounds=`: a directory where the name has no suffix.
PRETENDED_PYTHON = """#!/bin/sh
make() { case "$1" in *.*) : > "$1" ;; *) mkdir -p "$1" ;; esac; }
is_output=no
for argument; do
  case "$argument" in
    out=*|rounds=*) for path in $(echo "${argument#*=}" | tr , ' '); do make "$path"; done ;;
    --out) is_output=yes ;;
    --*) is_output=no ;;
    *) [ $is_output = no ] || make "$argument" ;;
  esac
done
"""


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

    def own_code(self) -> None:
        """Replaces the links to the packages by copies, which a test can change."""
        for name in ("specter", "harness", "baselines"):
            (self.root / name).unlink()
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, self.root / name, symlinks=True, ignore=ignore)  # conf/ is linked to

    def pretend_to_run(self, target: str) -> None:
        """Runs `target` with jobs that only create their outputs, so that Snakemake takes note of them."""
        bin_directory = self.root / "pretended"
        bin_directory.mkdir(exist_ok=True)
        python = bin_directory / "python"
        python.write_text(PRETENDED_PYTHON)
        python.chmod(0o755)
        snakefile = (ROOT / "Snakefile").read_text()
        real = "Path(sys.executable).parent"
        assert real in snakefile
        (self.root / "Snakefile").unlink()
        (self.root / "Snakefile").write_text(snakefile.replace(real, f"Path({str(bin_directory)!r})"))
        self.snakemake("--", target)


def environment() -> dict[str, str]:
    """The environment of a shell without a GPU, and without what tests of kernels set for themselves."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    for name in SHARED:
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    return Checkout(tmp_path)
