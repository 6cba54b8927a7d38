"""Jobs that compute nothing by torch start without it: an import of it takes longer than many of them."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "harness.replay", "harness.decompose", "harness.charge", "harness.tidy", "harness.tables", "harness.figures",
        "harness.device", "harness.device_tables", "harness.page", "harness.preflight", "harness.record",
    ],
)  # fmt: skip
def test_a_light_job_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
