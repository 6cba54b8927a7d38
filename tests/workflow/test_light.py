"""Jobs that compute nothing by torch start without it: an import of it takes longer than many of them."""

from __future__ import annotations

import subprocess
import sys

LIGHT = (
    "report", "jobs.preflight", "jobs.tidy", "jobs.record", "jobs.replay", "jobs.charge", "jobs.decompose", "jobs.draw",
)  # fmt: skip
CODE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(f"harness.{name}")
    if "torch" in sys.modules:
        sys.exit(f"harness.{name} imports torch")
"""


def test_light_jobs_do_not_import_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CODE, *LIGHT], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
