"""Small messages between host and device that must not queue behind an expert's copy.

A copy engine serves one copy at a time: a hundred bytes would wait for megabytes. These kernels read and write
page-locked host memory in place instead, which the device sees under the host's own addresses.
"""

# mypy: disable-error-code=no-untyped-def
# (the arguments of a kernel are typed by its launch)

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter.kernels.device import pow2

_BLOCK = 1024


def room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory, page-locked if `device` is a GPU."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


@triton.jit(do_not_specialize=["size"])
def _send(source, target, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)


def send(source: Tensor, target: Tensor) -> None:
    """target = source, alike in size and dtype; one of them on the device, the other page-locked; both contiguous."""
    size = source.numel()
    _send[(triton.cdiv(size, _BLOCK),)](source, target, size, BLOCK=_BLOCK, num_warps=4)


@triton.jit
def _receive(ring, next_row, row, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    index = tl.load(next_row)
    tl.store(row + at, tl.load(ring + index * SIZE + at, mask=at < SIZE), mask=at < SIZE)
    tl.store(next_row, (index + 1) % ROWS)


class Ring:
    """Rows that the host writes and the device reads one after the other, however far it lags behind.

    The host may be at most `num_rows` ahead of the device; who writes more must wait for the device in between.

    Attributes:
        row: int32 [size] on the device, the row last received.
    """

    def __init__(self, num_rows: int, size: int, device: torch.device) -> None:
        self.row = torch.zeros(size, dtype=torch.int32, device=device)
        self._rows = room((num_rows, size), torch.int32, device)
        self._host = self._rows.numpy()
        self._next_row = torch.zeros(1, dtype=torch.int32, device=device)
        self._num_written = 0

    def write(self, fill: int, places: Sequence[int], values: Sequence[int]) -> None:
        """The host's next row: `values` at `places`, `fill` elsewhere."""
        row = self._host[self._num_written % len(self._host)]
        row[:] = fill
        row[places] = values
        self._num_written += 1

    def restart(self) -> None:
        """Forgets every row on both sides; waits for the device."""
        self._next_row.zero_()
        if self.row.is_cuda:
            torch.cuda.synchronize(self.row.device)
        self._num_written = 0

    def receive(self) -> None:
        """`row` becomes the oldest row not received yet; issued to the current stream, fit for a graph."""
        num_rows, size = self._rows.shape
        _receive[(1,)](self._rows, self._next_row, self.row, ROWS=num_rows, SIZE=size, BLOCK=pow2(size), num_warps=1)
