"""Shared by all Triton kernels: programmatic dependent launch (PDL), launch options, the residual stream.

With PDL the next kernel of a stream starts while this one drains. A kernel reads its weights at once and calls
`wait_previous` before it reads or writes data of an earlier kernel. Every kernel waits, so completion of the
previous kernel implies completion of all earlier ones.
"""

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
    """Residual stream of T rows, with the inputs of the next norm.

    RMSNorm needs no kernel: the kernel that writes x also writes gain * x and partial sums of squares. The next
    product reads gain * x and divides its result by the rms: rmsnorm(x) W = (gain * x) W / rms(x).
    LayerNorm is a kernel (`specter.kernels.layer_norm`) that overwrites `scaled`; `is_normed` is then true.
    """

    x: Tensor  # fp32 [T, D]
    scaled: Tensor  # [T, D] model dtype, gain * x
    squares: Tensor  # fp32 [T, blocks], sums of squares per block of channels of the writing kernel
    is_normed: bool = False  # `scaled` is normalised; `squares` is not read


@dataclass(frozen=True, slots=True)
class Launch:
    """Tunable launch parameters of a kernel.

    Attributes:
        block_n: output channels per program. block_k: input channels per step.
        max_registers: per thread, to fit all programs on the device at once; None: the compiler decides.
    """

    block_n: int
    block_k: int = 0
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None

    def options(self, pdl: bool) -> dict[str, Any]:
        """Keyword arguments of Triton's launcher."""
        return {"num_warps": self.num_warps, "maxnreg": self.max_registers, "launch_pdl": pdl}


def pow2(n: int) -> int:
    """Smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


@triton.jit
def wait_previous(PDL: tl.constexpr):
    """Allows the next kernel to start, then waits for the previous kernel to complete."""
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def wait_then_release(PDL: tl.constexpr):
    """As `wait_previous`, but the next kernel starts only after all programs of this one have waited.

    The next kernel may then read, without waiting, data written before the previous kernel (bypassing the L1,
    which can hold stale lines).
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def load_squares(squares, rows, BLOCKS: tl.constexpr, BLOCK_B: tl.constexpr):
    """Partial sums of squares [M, BLOCK_B] of `rows` [M], from [T, BLOCKS]; load early, sum late."""
    blocks = tl.arange(0, BLOCK_B)
    return tl.load(squares + rows[:, None] * BLOCKS + blocks[None, :], mask=(blocks < BLOCKS)[None, :], other=0.0)


@triton.jit
def inverse_rms(squares, K: tl.constexpr, eps, NORMED: tl.constexpr):
    """1 / rms [M] from partial sums of squares [M, BLOCK_B]; 1 if the rows are normalised."""
    if NORMED:
        return tl.full((squares.shape[0],), 1.0, tl.float32)
    return tl.rsqrt(tl.sum(squares, axis=1) / K + eps)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))
