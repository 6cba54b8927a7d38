"""Provenance of a result: commit, source digest, packages, machine and GPU. torch is imported for a GPU only."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specter.files import files_digest

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("specter/**/*.py", "baselines/**/*.py", "conf/**/*.yaml")
MACHINE = ("gpu", "driver_version", "torch", "triton")  # keys that identify a device and its software
_GPU_FIELDS = (  # names of nvidia-smi
    "driver_version", "memory.total", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.draw",
    "temperature.gpu",
)  # fmt: skip
_PACKAGES = ("torch", "triton", "transformers", "numpy")


@functools.cache  # a job writes hundreds of runs
def commit() -> str:
    """The commit of the working directory, or SPECTER_COMMIT where there is no git; else "unknown"."""
    return _output("git", "rev-parse", "HEAD") or os.environ.get("SPECTER_COMMIT", "unknown")


def source_digest(root: Path = ROOT) -> str:
    """SHA-256 of the code and the settings, committed or not."""
    return files_digest(root, *SOURCES)


def package_version(name: str) -> str:
    """The installed version of a package, or "absent"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def of_host() -> dict[str, str]:
    """Code and machine of a run. No time of day: the same run leaves the same files."""
    return {
        "commit": commit(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "machine": platform.machine(),
        "system": platform.system(),
    }


def of_device(device: torch.device, code_commit: str = "", **inputs: str) -> dict[str, Any]:
    """Code, packages and GPU of a measurement, with the UTC time.

    Args:
        code_commit: the commit, where there is no git; read from git if empty.
        inputs: digests of the measured inputs, added as they are.
    """
    import torch

    record: dict[str, Any] = {
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "gpu": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "num_threads": torch.get_num_threads(),
        "commit": code_commit or commit(),
        "source_sha256": source_digest(),
        **{name: package_version(name) for name in _PACKAGES},
        **inputs,
    }
    values = _output("nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader").split(", ")
    if len(values) == len(_GPU_FIELDS):
        record |= dict(zip(_GPU_FIELDS, values, strict=True))
    return record


def merged(records: Sequence[Mapping[str, str]], keys: Iterable[str]) -> dict[str, str]:
    """Each key's distinct values over all records, sorted and joined with commas; "unknown" where it is missing."""
    return {key: ", ".join(sorted({record.get(key, "unknown") for record in records})) for key in keys}


def _output(*command: str) -> str:
    """What a command prints; empty if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
