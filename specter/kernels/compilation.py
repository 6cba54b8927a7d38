"""Kernels that compile for a GPU: how many so far, and what keeps Triton from it, on one screen.

Triton compiles a kernel at its first launch and keeps it on disk, so a first run on a machine takes longer.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from triton import knobs

from specter.errors import SpecterError
from specter.kernels.pinned_io import copy_pinned, pinned_zeros

_SECONDS_BETWEEN_LINES = 3.0
_INSTALL = "install gcc (Debian: apt-get install gcc libc6-dev python3-dev), or name a compiler in CC"


class _Listener:
    """Called by Triton for every kernel. Prints lines, which a log keeps and a bar below them allows."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_compiled, self._begin, self._next_line = 0, time.monotonic(), 0.0

    def __call__(self, *, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            return
        now = time.monotonic()
        if not self._num_compiled:
            self._begin = now - times.total / 1e6
        self._num_compiled += 1
        if now >= self._next_line:
            self._next_line = now + _SECONDS_BETWEEN_LINES
            self._console.print(
                f"first run on this GPU: {self._num_compiled} kernels compiled, the last {metadata['name']}, "
                f"{now - self._begin:.0f} s"
            )

    def finish(self) -> None:
        if self._num_compiled:
            seconds = time.monotonic() - self._begin
            self._console.print(f"{self._num_compiled} kernels compiled in {seconds:.0f} s; kept in {knobs.cache.dir}")


@contextmanager
def compiling(console: Console) -> Iterator[None]:
    """Within, prints the number of kernels that have compiled, if any do.

    Raises SpecterError: there is no C compiler, it fails, there is no ptxas, or Triton's cache cannot be written.
    """
    listener, before = _Listener(console), knobs.compilation.listener
    knobs.compilation.listener = listener
    try:
        yield
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        fault = _fault_of(error)
        if fault is None:
            raise
        raise fault from None
    finally:
        knobs.compilation.listener = before
        listener.finish()


def _fault_of(error: Exception) -> SpecterError | None:
    """The fault of the machine that keeps Triton from compiling, if it is one."""
    if isinstance(error, subprocess.CalledProcessError):
        return SpecterError(f"the C compiler {error.cmd[0]} fails on the launchers of Triton's kernels", _INSTALL)
    if isinstance(error, RuntimeError) and "C compiler" in str(error):
        return SpecterError("Triton finds no C compiler, with which it builds the launchers of its kernels", _INSTALL)
    if isinstance(error, RuntimeError) and "ptxas" in str(error):
        return SpecterError(
            f"Triton finds no assembler for this GPU: {error}", "install the triton of requirements.lock"
        )
    if isinstance(error, OSError) and error.filename and error.filename == os.environ.get("CC"):
        return SpecterError(f"the C compiler {error.filename}, which CC names, does not start", _INSTALL)
    if isinstance(error, OSError) and str(error.filename or "").startswith(knobs.cache.dir):
        return SpecterError(
            f"Triton's cache {knobs.cache.dir} cannot be written: {error.strerror}",
            "set TRITON_CACHE_DIR to a directory that can",
        )
    return None


def check_compiler(device: torch.device, console: Console) -> None:
    """Runs the smallest kernel, before anything large is loaded. Raises SpecterError as `compiling`."""
    with compiling(console):
        copy_pinned(pinned_zeros((1,), torch.int32, device), torch.zeros(1, dtype=torch.int32, device=device))
