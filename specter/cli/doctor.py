"""`specter doctor`: what of this machine matters, what it can run, and what to change. Changes nothing."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch
from huggingface_hub import constants
from rich.table import Table

from specter import host_memory
from specter.cli.choice import CONF, drafts_home
from specter.config import ModelConfig
from specter.models.full_size import FULL_SIZE
from specter.provenance import package_version
from specter.typed import load_typed

State = Literal["ok", "note", "missing"]
STYLES: dict[State, str] = {"ok": "green", "note": "yellow", "missing": "red"}
LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # PCIe, by generation
PRACTICAL = 0.87  # of the lanes' rate: headers of packets of 256 bytes, flow control
COPY_BYTES, NUM_COPIES = 64 * 2**20, 8
MIN_DISK_BYTES = 50 * 10**9
INT4_BITS, RESIDUAL_BITS = 4.125, 7.3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing examined. remedy: what to change, if anything."""

    what: str
    found: str
    state: State = "ok"
    remedy: str = ""


def examine() -> list[Finding]:
    """Everything that `specter` depends on, on this machine."""
    return [*_gpu(), *_host(), *_disk(), *_software(), *_models()]


def table(findings: list[Finding]) -> Table:
    """The findings, what to change in the last column."""
    shown = Table(title="This machine", title_justify="left", show_lines=False)
    for name in ("", "found", "what to change"):
        shown.add_column(name, overflow="fold")
    for one in findings:
        shown.add_row(one.what, f"[{STYLES[one.state]}]{one.found}[/]", one.remedy)
    return shown


def _gpu() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        build = "" if torch.version.cuda else "; this torch is built without CUDA"
        yield Finding(
            "GPU", f"none{build}", "note", "none is needed for the virtual clock; for clock=device install a CUDA torch"
        )
        return
    free, total = torch.cuda.mem_get_info()
    yield Finding("GPU", f"{torch.cuda.get_device_name()}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        yield Finding("compute capability", f"{major}.{minor}", "missing", "BF16 kernels need 8.0 (Ampere) or newer")
    values = _nvidia_smi("driver_version", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current")
    if values is None:
        yield Finding("driver", "nvidia-smi does not answer", "note", "install the driver's tools to see the link")
        return
    driver, generation, most, width = values
    yield Finding("driver", f"{driver}, CUDA {torch.version.cuda}")
    yield _link(int(generation), int(most), int(width))


def _link(generation: int, most: int, width: int) -> Finding:
    """The rate of page-locked copies to the device, against what the lanes can practically carry."""
    rate = copy_rate()
    peak = LANE_BYTES_PER_S[most] * width * PRACTICAL
    share = rate / peak
    found = f"PCIe {most}.0 x{width} (now {generation}.0): {rate / 1e9:.1f} GB/s, {share:.0%} of its practical peak"
    if width < 16:
        return Finding("link", found, "note", "the GPU has fewer than 16 lanes: try another slot, or a riser less")
    if share < 0.8:
        remedy = "other processes on the link, power saving (ASPM), or a process on the other CPU's memory"
        return Finding("link", found, "note", remedy)
    return Finding("link", found)


def copy_rate() -> float:
    """Bytes per second of page-locked copies to the device, the fastest of several."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    best = 0.0
    for _ in range(NUM_COPIES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, COPY_BYTES / (time.perf_counter() - start))
    return best


def _nvidia_smi(*fields: str) -> list[str] | None:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    values = output.strip().split(", ")
    return values if len(values) == len(fields) and all(value[:1].isdigit() for value in values) else None


def _host() -> Iterator[Finding]:
    machine, available = psutil.virtual_memory(), host_memory.available_bytes()
    found = f"{available / 1e9:.1f} of {machine.total / 1e9:.1f} GB available"
    if available < 0.9 * machine.available:
        found += f"; a container leaves {available / 1e9:.1f} of the machine's {machine.available / 1e9:.1f}"
    yield Finding("host memory", found)
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("page-lock limit", "none")
    else:
        yield Finding(
            "page-lock limit", f"{soft / 1e9:.2f} GB", "note",
            "the driver of most systems ignores it; if page-locking fails: ulimit -l unlimited",
        )  # fmt: skip
    yield Finding("CPU", f"{psutil.cpu_count()} cores, {platform.machine()}")


def _disk() -> Iterator[Finding]:
    for what, path in (("hub cache", Path(constants.HF_HUB_CACHE)), ("drafts", drafts_home())):
        existing = next(parent for parent in [path, *path.parents] if parent.exists())
        free = shutil.disk_usage(existing).free
        state: State = "ok" if free >= MIN_DISK_BYTES else "note"
        variable = "HF_HOME" if what == "hub cache" else "SPECTER_HOME"
        remedy = "" if state == "ok" else f"a checkpoint takes 30 to 84 GB: set {variable} to a larger disk"
        yield Finding(f"disk, {what}", f"{free / 1e9:.0f} GB free in {path}", state, remedy)


def _software() -> Iterator[Finding]:
    yield Finding("torch", f"{torch.__version__}, Python {platform.python_version()}")
    triton, compiler = package_version("triton"), next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    needed = torch.cuda.is_available()
    if triton == "absent":
        yield Finding("triton", triton, "missing" if needed else "note", "pip install triton; a CUDA torch brings it")
    else:
        yield Finding("triton", triton)
    if compiler is None:
        yield Finding(
            "C compiler", "none", "missing" if needed else "note",
            "Triton compiles its launchers with one: install gcc, or set CC",
        )  # fmt: skip
    else:
        yield Finding("C compiler", compiler)
    if needed and not _has_python_headers():
        yield Finding("Python headers", "none", "missing", "Triton needs Python.h: install python3-dev")


def _has_python_headers() -> bool:
    import sysconfig

    return (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()


def _models() -> Iterator[Finding]:
    """Which published checkpoints run here, by memory."""
    device = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    host = host_memory.available_bytes()
    for path in sorted((CONF / "model").glob("*_hub.yaml")):
        model = load_typed(ModelConfig, path)
        spec = FULL_SIZE[model.charged_as]
        plain = 2 * spec.experts_params
        residual = round(RESIDUAL_BITS / 8 * spec.experts_params)
        draft = round(INT4_BITS / 8 * spec.experts_params)
        shared = 2 * spec.non_expert_params
        needs = (
            f"host {plain / 1e9:.0f} GB, or {residual / 1e9:.0f} with residual experts; device {shared / 1e9:.0f} GB"
        )
        needs += f", {(shared + draft) / 1e9:.0f} with the draft"
        forms = [name for name, size in (("16-bit", plain), ("residual", residual)) if size < host]
        modes = [name for name, size in (("speculating", shared + draft), ("plain", shared)) if size < 0.9 * device]
        if device and forms and modes:
            yield Finding(model.title, f"runs: {modes[0]}, {' or '.join(forms)} experts", "ok", "")
        else:
            yield Finding(
                model.title, f"does not run on a GPU here: {needs}", "note", "the stand-in of it runs anywhere"
            )
