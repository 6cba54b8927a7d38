"""Reference kernels in plain torch: any device, no tuning, and the bits that other kernels are held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor], object]  # (a [M, K], b [K, N], out [M, N]): out = a @ b


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """The matrix product of this device's BLAS."""
    torch.mm(a, b, out=out)


def tiled_product(mm: Product, x: Tensor, weight: Tensor, tile: int) -> Tensor:
    """x [n * tile, K] @ weight [K, N], one product of `tile` rows at a time: a row's bits depend on no other tile."""
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


def expert_tiles(mm: Product, x: Tensor, gate_up_t: Sequence[Tensor], down_t: Sequence[Tensor]) -> Tensor:
    """Gated MLPs, one expert per tile: x [n, tile, D], n matrices [D, 2F] and n [F, D] -> [n, tile, D].

    Every product has the shape of one tile, whatever n is: the composition of a wave leaves no trace in the bits.
    """
    num_tiles, tile, hidden = x.shape
    wide = x.new_empty(num_tiles, tile, gate_up_t[0].shape[1])
    for rows, weight, out in zip(x.unbind(0), gate_up_t, wide.unbind(0), strict=True):
        mm(rows, weight, out)
    narrow = gated(wide)
    result = x.new_empty(num_tiles, tile, hidden)
    for rows, weight, out in zip(narrow.unbind(0), down_t, result.unbind(0), strict=True):
        mm(rows, weight, out)
    return result
