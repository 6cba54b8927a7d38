"""What all Triton kernels share: programmatic dependent launch, and how a launch is configured.

With PDL the next kernel of a stream starts while this one drains. A kernel may read its weights at once, but
must call `wait_previous` before it touches anything that an earlier kernel wrote. Because every kernel waits,
"the previous one is complete" holds for all earlier ones too.
"""

# mypy: disable-error-code=no-untyped-def
# (the arguments of a kernel are typed by its launch)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

TILE = 16  # rows of one matrix product on the tensor cores


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream of T rows, and what the next norm needs of it.

    RMS norm costs no pass of its own: whoever completes channels of the stream also writes them times the next
    gain, and the sum of their squares per row and block of channels. The product that follows reads the former
    as it is, and multiplies its sums by 1 / rms once, from the latter: rmsnorm(x) W = (gain * x) W / rms(x).

    LayerNorm has a pass of its own (`specter.kernels.layer_norm`), which overwrites `scaled`: `is_normed`.
    """

    x: Tensor  # fp32 [T, D]
    scaled: Tensor  # [T, D] model dtype, gain * x
    squares: Tensor  # fp32 [T, blocks], written by one producer: a buffer for each number of blocks
    is_normed: bool = False  # whoever reads `scaled` finds it normalised, and leaves `squares` alone


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel's free choices.

    Attributes:
        block_n: output channels per program. block_k: input channels per step.
        max_registers: per thread, so that all programs are on the device at once; None leaves it to the compiler.
    """

    block_n: int
    block_k: int = 0
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None

    def options(self, pdl: bool) -> dict[str, Any]:
        """What Triton's launcher is told."""
        return {"num_warps": self.num_warps, "maxnreg": self.max_registers, "launch_pdl": pdl}


def pow2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@triton.jit
def wait_previous(PDL: tl.constexpr):
    """Lets the next kernel start, and waits for the previous one's results."""
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def wait_then_release(PDL: tl.constexpr):
    """As `wait_previous`, but the next kernel starts only after the wait of every program of this one.

    What was written before the previous kernel is then complete when the next one starts, and may be read there
    without waiting (past the L1, which may hold older bytes).
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def load_squares(squares, rows, BLOCKS: tl.constexpr, BLOCK_B: tl.constexpr):
    """Partial sums of squares of rows [M], out of [T, BLOCKS]; to be asked for early and summed late."""
    blocks = tl.arange(0, BLOCK_B)
    return tl.load(squares + rows[:, None] * BLOCKS + blocks[None, :], mask=(blocks < BLOCKS)[None, :], other=0.0)


@triton.jit
def inverse_rms(squares, K: tl.constexpr, eps, NORMED: tl.constexpr):
    """1 / rms of rows [M] whose partial sums of squares are [M, BLOCK_B]; 1 if the rows are normalised."""
    if NORMED:
        return tl.full((squares.shape[0],), 1.0, tl.float32)
    return tl.rsqrt(tl.sum(squares, axis=1) / K + eps)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))
