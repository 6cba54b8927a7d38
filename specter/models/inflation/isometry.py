"""Spreads one axis of a narrow model over a wide one, and reads it back.

S [wide, narrow] has orthogonal columns of squared length wide / narrow, so a spread vector S x has the root mean square
of x, and RMSNorm is unchanged, epsilon included. A matrix that reads S x is W S^T, which yields wide / narrow times
W x; the norm's gain divides by that factor, which leaves the INT4 scales of the weights as they are.

Tiled: row j of S picks dimension j % narrow. All copies of a weight round alike, so an inflated INT4 draft has exactly
the errors of the narrow one. Random: an orthonormal basis times sqrt(wide / narrow), which averages rounding errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["tiled", "random"]


@dataclass(frozen=True, slots=True)
class Isometry:
    """S [wide, narrow]; tiled if there is no matrix."""

    narrow: int
    wide: int
    matrix: Tensor | None = None

    @classmethod
    def random(cls, narrow: int, wide: int, generator: torch.Generator, device: torch.device | str) -> Isometry:
        """The random isometry, drawn on the CPU, so a seed gives the same one on every device."""
        gaussian = torch.randn(wide, narrow, generator=generator, dtype=torch.float64)
        basis = torch.linalg.qr(gaussian).Q * math.sqrt(wide / narrow)
        return cls(narrow, wide, basis.to(device, torch.float32))

    @property
    def shrink(self) -> float:
        """narrow / wide: undoes the change of length of a spread vector."""
        return self.narrow / self.wide if self.wide else 1.0

    def rows(self, x: Tensor) -> Tensor:
        """S x: [..., narrow, m] -> [..., wide, m]."""
        if self.matrix is None:
            return x.repeat(*[1] * (x.dim() - 2), self.wide // self.narrow, 1)
        return self.matrix @ x

    def columns(self, x: Tensor) -> Tensor:
        """x S^T: [..., m, narrow] -> [..., m, wide]."""
        if self.matrix is None:
            return x.repeat(*[1] * (x.dim() - 1), self.wide // self.narrow)
        return x @ self.matrix.T


@dataclass(frozen=True, slots=True)
class NeuronCopies:
    """Repeated neurons of a gated MLP; the weights of the copies' outputs add up to one.

    Tiled: all weights are powers of two, 1 / p and 2 / p with p the least power of two not below the number of copies,
    so scaling is exact in every float format (44 copies: 24 of 1/64 and 20 of 1/32); `up` takes the 1 / p.
    Random: random weights.
    """

    up: float  # factor of the up rows
    down: tuple[float, ...]  # factor of the down columns, per copy; up * sum(down) = 1

    @classmethod
    def build(cls, narrow: int, wide: int, generator: torch.Generator | None) -> NeuronCopies:
        """`generator` None: tiled."""
        num_copies = wide // narrow if narrow else 1  # a model without this MLP
        if generator is not None:
            drawn = torch.rand(num_copies, generator=generator, dtype=torch.float64) + 0.5
            return cls(1.0, tuple((drawn / drawn.sum()).tolist()))
        power = 2 ** math.ceil(math.log2(num_copies))
        num_large = power - num_copies
        return cls(1.0 / power, (1.0,) * (num_copies - num_large) + (2.0,) * num_large)

    def column_factors(self, narrow: int) -> Tensor:
        """Factors of the down matrix's columns, fp32 [wide]: copy by copy, `narrow` columns each."""
        return torch.tensor(self.down, dtype=torch.float32).repeat_interleave(narrow)
