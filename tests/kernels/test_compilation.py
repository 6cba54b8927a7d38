"""Kernels that compile are counted, and what keeps Triton from it ends on one screen."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from triton import knobs
from triton.runtime.build import compile_module_from_src

from specter.errors import SpecterError
from specter.kernels.compilation import check_compiler, compiling

C_SOURCE = "#include <Python.h>\n"
# Compiles for a GPU that need not be there; without the interpreter, so in a process of its own.
COMPILES = """
import sys
import triton, triton.language as tl
from rich.console import Console
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specter.kernels.compilation import compiling

@triton.jit
def add_one(x):
    tl.store(x, tl.load(x) + 1)

@triton.jit
def add_two(x):
    tl.store(x, tl.load(x) + 2)

for _ in range(2):
    with compiling(Console(file=sys.stdout, width=500)):
        for kernel in (add_one, add_two):
            triton.compile(ASTSource(kernel, {"x": "*fp32"}, {}), target=GPUTarget("cuda", 80, 32))
    print("--")
"""


def silent() -> Console:
    return Console(file=io.StringIO(), width=500)


def build() -> None:
    """What Triton does first on a machine: compile C."""
    compile_module_from_src(C_SOURCE, "front_test")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which nothing is compiled yet."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_kernels_are_counted_once_per_machine(tmp_path: Path) -> None:
    path = tmp_path / "compiles.py"
    path.write_text(COMPILES)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    first, second, _ = done.stdout.split("--\n")
    assert "first run on this GPU: 1 kernels compiled, the last add_one" in first
    assert "2 kernels compiled in" in first and f"kept in {tmp_path / 'kept'}" in first
    assert second == ""


def test_without_a_compiler_one_screen_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SpecterError, match="finds no C compiler") as caught, compiling(silent()):
        build()
    assert "install gcc" in caught.value.remedy


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(SpecterError, match="C compiler false fails"), compiling(silent()):
        build()


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(SpecterError, match="C compiler /nowhere/cc"), compiling(silent()):
        build()


def test_a_cache_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.write_text("a file where the directory should be")
    with pytest.raises(SpecterError, match="cache .* cannot be written") as caught, compiling(silent()):
        build()
    assert "TRITON_CACHE_DIR" in caught.value.remedy


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), FileNotFoundError(2, "no file", "a.txt")])
def test_other_errors_pass_and_the_listener_is_restored(error: Exception) -> None:
    before = knobs.compilation.listener
    with pytest.raises(type(error)) as caught, compiling(silent()):
        raise error
    assert caught.value is error and knobs.compilation.listener is before


def test_lines_are_rare_and_what_was_kept_is_not_counted() -> None:
    console = silent()
    times: Any = type("Times", (), {"total": 0})
    with compiling(console):
        listener: Any = knobs.compilation.listener
        for number in range(100):
            listener(src=None, metadata={"name": f"k{number}"}, metadata_group={}, times=times, cache_hit=number < 10)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2 and "the last k10" in lines[0] and lines[1].startswith("90 kernels compiled")


def test_the_check_runs_a_kernel() -> None:
    check_compiler(torch.device("cpu"), silent())
