"""Reference kernels in plain torch: any device, no tuning, and the bits that other kernels are held to."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor], object]  # (a [M, K], b [K, N], out [M, N]): out = a @ b


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """The matrix product of this device's BLAS."""
    torch.mm(a, b, out=out)


def tiled_product(mm: Product, x: Tensor, weight: Tensor, tile: int, out: Tensor | None = None) -> Tensor:
    """x [n * tile, K] @ weight [K, N], one product of `tile` rows at a time: a row's bits depend on no other tile."""
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[1])
    if x.shape[0] == tile:
        mm(x, weight, out)
        return out
    for rows, result in zip(x.split(tile), out.split(tile), strict=True):
        mm(rows, weight, result)
    return out


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [..., 2F] (gate first) -> [..., F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gated_(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, in the place of gate."""
    return F.silu(gate, inplace=True).mul_(up)
