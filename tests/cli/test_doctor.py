"""The examination of a machine, on machines that this one is not."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from specter.cli import doctor
from specter.cli.doctor import Finding, examine, table


def found(what: str) -> Finding:
    [one] = [one for one in examine() if one.what == what]
    return one


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with a GPU on PCIe 4.0 x16; its parts can be changed."""
    machine: dict[str, Any] = {"smi": ["550.1", "4", "4", "16"], "rate": 24e9, "capability": (8, 0), "free": 40e9}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (int(machine["free"]), 42 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: machine["capability"])
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda *_: machine["smi"])
    monkeypatch.setattr(doctor, "copy_rate", lambda: machine["rate"])
    return machine


def test_without_a_gpu_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert found("GPU").state == "note"
    assert all(one.state != "missing" for one in examine())


def test_a_good_link_is_good(gpu: dict[str, Any]) -> None:
    assert found("link") == Finding("link", "PCIe 4.0 x16 (now 4.0): 24.0 GB/s, 88% of its practical peak")


@pytest.mark.parametrize(
    ("change", "what"),
    [({"rate": 11e9}, "power saving"), ({"smi": ["550.1", "4", "4", "8"]}, "fewer than 16 lanes")],
)
def test_a_slow_link_says_what_to_change(gpu: dict[str, Any], change: dict[str, Any], what: str) -> None:
    gpu |= change
    assert found("link").state == "note" and what in found("link").remedy


def test_an_old_gpu_and_a_silent_driver_are_named(gpu: dict[str, Any]) -> None:
    gpu |= {"capability": (7, 5), "smi": None}
    assert found("compute capability").state == "missing"
    assert "does not answer" in found("driver").found


def test_a_missing_compiler_matters_on_a_gpu_only(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert found("C compiler").state == "missing" and "install gcc" in found("C compiler").remedy
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert found("C compiler").state == "note"


def test_models_run_or_say_what_they_need(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specter.host_memory.available_bytes", lambda: 20 * 10**9)
    assert found("DeepSeek-V2-Lite").found == "runs: speculating, residual experts"
    assert "host 81 GB, or 37 with residual experts" in found("Phi-3.5-MoE").found
    gpu["free"] = 8e9
    monkeypatch.setattr("specter.host_memory.available_bytes", lambda: 64 * 10**9)
    assert found("DeepSeek-V2-Lite").found == "runs: plain, 16-bit or residual experts"


def test_a_small_disk_is_noted_with_what_moves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**9}))
    assert "HF_HOME" in found("disk, hub cache").remedy and "SPECTER_HOME" in found("disk, drafts").remedy


def test_the_table_fits_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(table(examine()))
    assert isinstance(console.file, io.StringIO)
    assert max(map(len, console.file.getvalue().splitlines())) <= 100
