"""Small transfers between host and device that do not queue behind an expert's copy.

A copy engine serves one copy at a time, so a transfer of a hundred bytes would wait for megabytes. These kernels read
and write page-locked host memory directly; the device maps it at the host's addresses.

    copy: bytes = 2 * size * itemsize;  ring int32 [num_rows, size] -> row int32 [size]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter.kernels.device import pow2

_BLOCK = 1024


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory, page-locked if `device` is a GPU."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


@triton.jit(do_not_specialize=["size"])
def _copy(source, target, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)


def copy_pinned(source: Tensor, target: Tensor) -> None:
    """target = source. Same size and dtype, both contiguous; one on the device, the other page-locked."""
    size = source.numel()
    _copy[(triton.cdiv(size, _BLOCK),)](source, target, size, BLOCK=_BLOCK, num_warps=4)


@triton.jit
def _next_row(ring, next_row, row, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    index = tl.load(next_row)
    tl.store(row + at, tl.load(ring + index * SIZE + at, mask=at < SIZE), mask=at < SIZE)
    tl.store(next_row, (index + 1) % ROWS)


class PinnedRing:
    """A ring of int32 rows in page-locked memory: the host writes, the device reads in the same order.

    The host is at most `num_rows` rows ahead of the device; the caller synchronizes before it would be further ahead.

    Attributes:
        row: int32 [size] on the device, the row last read.
    """

    def __init__(self, num_rows: int, size: int, device: torch.device) -> None:
        self.row = torch.zeros(size, dtype=torch.int32, device=device)
        self._rows = pinned_zeros((num_rows, size), torch.int32, device)
        self._host = self._rows.numpy()
        self._next_row = torch.zeros(1, dtype=torch.int32, device=device)
        self._num_written = 0

    def write(self, fill: int, places: Sequence[int], values: Sequence[int]) -> None:
        """Writes the host's next row: `values` at `places`, `fill` elsewhere."""
        row = self._host[self._num_written % len(self._host)]
        row[:] = fill
        row[places] = values
        self._num_written += 1

    def write_row(self, values: Sequence[int]) -> None:
        """Writes the host's next row, whole."""
        self._host[self._num_written % len(self._host)] = values
        self._num_written += 1

    def restart(self) -> None:
        """Discards all rows on both sides. Synchronizes the device."""
        self._next_row.zero_()
        if self.row.is_cuda:
            torch.cuda.synchronize(self.row.device)
        self._num_written = 0

    def read_next(self) -> None:
        """Loads the oldest unread row into `row`. Issued to the current stream; can be captured in a graph."""
        num_rows, size = self._rows.shape
        _next_row[(1,)](self._rows, self._next_row, self.row, ROWS=num_rows, SIZE=size, BLOCK=pow2(size), num_warps=1)
