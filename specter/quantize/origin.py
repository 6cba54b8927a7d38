"""The checkpoint from which a draft was made."""

from __future__ import annotations

import json
from pathlib import Path

from specter.errors import SpecterError
from specter.models.checkpoint import Checkpoint

REPORT_FILE = "quantization.json"


def check_draft_origin(directory: Path, checkpoint: Checkpoint) -> str:
    """The origin in the draft's report: "this checkpoint", or "unknown" without a report.

    Raises SpecterError: the draft was made from another checkpoint.
    """
    report = directory / REPORT_FILE
    if not report.is_file():
        return "unknown"
    if json.loads(report.read_text())["checkpoint"]["sha256"] != checkpoint.digest():
        raise SpecterError(
            f"the draft in {directory} was made from another checkpoint than {checkpoint.directory}",
            f"make it again: python -m specter.quantize checkpoint={checkpoint.directory} out={directory}",
        )
    return "this checkpoint"
