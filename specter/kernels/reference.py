"""Reference kernels in plain torch, for any device; the tests compare the other kernels with these bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor], object]  # (a [M, K], b [K, N], out [M, N]): out = a @ b


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b by the device's BLAS."""
    torch.mm(a, b, out=out)


def tiled_product(mm: Product, x: Tensor, weight: Tensor, tile: int, out: Tensor | None = None) -> Tensor:
    """x [n * tile, K] @ weight [K, N], one product per `tile` rows: a row's bits depend on no other tile."""
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
    """silu(gate) * up, written into `gate`."""
    return F.silu(gate, inplace=True).mul_(up)
