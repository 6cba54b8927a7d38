"""The interpreter's product of a tile, made exact, and small launches for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch


def _float64(handle: Any) -> Any:
    if str(handle.dtype.scalar) == "bf16":  # held as the upper halves of fp32
        return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return handle.data.astype(np.float64)


@pytest.fixture(autouse=True)
def _exact_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the interpreter's product of a tile by one summed in fp64 and rounded once.

    The interpreter reads bf16 as integers, and numpy's BLAS gives a row other bits at another place in the tile, which
    tensor cores do not. These tests check that nothing in the kernels around the product
    depends on place or neighbours.
    """
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    def create_dot(_builder: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
        total = np.matmul(_float64(a), _float64(b)) + d.data
        return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture(autouse=True)
def _small_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners launch few large blocks: the interpreter pays per program."""
    from specter.models.cuda import runner
    from tests.kernels.test_gpu_decoder import DRAFT, TARGET

    monkeypatch.setattr(runner, "Target", partial(runner.Target, tuning=TARGET))
    for name in ("Draft", "ByExpertDraft", "UnfusedDraft"):
        monkeypatch.setattr(runner, name, partial(getattr(runner, name), tuning=DRAFT))
