"""Quantised matrices: INT4 codes, as every draft reads them, and what all formats have in common.

W[o, i] = scale[o, i // group] * (code[o, i] - zero[o, i // group]), code and zero in 0..15
(symmetric: zero is 8 everywhere).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specter.errors import SpecterError


class Matrices(Protocol):
    """A batch of quantised matrices [..., out, in] in any format."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrices [..., out, in]; products are formed in fp32 and rounded once to `dtype`."""

    def to(self, device: torch.device | str) -> Matrices: ...


@dataclass(frozen=True, slots=True)
class Int4Matrices:
    """A batch of quantised matrices [..., out, in]."""

    codes: Tensor  # uint8 [..., out, in], values 0..15, unpacked
    scales: Tensor  # fp16 [..., out, in / group]
    zeros: Tensor  # uint8 [..., out, in / group]
    group: int  # input channels per group; the whole row where the row is shorter than the asked-for group

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """See `Matrices`."""
        out_in = self.codes.shape
        codes = self.codes.view(*out_in[:-1], -1, self.group).float()
        weights = self.scales.float()[..., None] * (codes - self.zeros.float()[..., None])
        return weights.view(out_in).to(dtype)

    def layer(self, index: int) -> Int4Matrices:
        """One layer of a batch whose first dim is layers."""
        return Int4Matrices(self.codes[index], self.scales[index], self.zeros[index], self.group)

    def to(self, device: torch.device | str) -> Int4Matrices:
        return Int4Matrices(self.codes.to(device), self.scales.to(device), self.zeros.to(device), self.group)


@dataclass(frozen=True, slots=True)
class Int4Experts:
    """All routed experts of a model: leading dims [MoE layers, E]; gate/up are [.., F, D], down [.., D, F]."""

    gate: Int4Matrices
    up: Int4Matrices
    down: Int4Matrices
    method: str  # "gptq", "rtn" or "awq"
    num_fallback: int  # experts quantised by round-to-nearest for want of calibration tokens
    # AWQ: fp32 [MoE layers, D], by which gate's and up's input is multiplied
    input_scales: Tensor | None = None
    num_ignored: int = 0  # modules besides the routed experts that the directory quantises; no draft uses them

    def check_plain(self) -> None:
        """Raises SpecterError if codes and scales alone are not the experts: the GPU's kernels read nothing else."""
        if self.input_scales is not None:
            raise SpecterError(
                "the GPU draft does not read the scales of its input that AWQ needs", "use method=gptq or method=rtn"
            )
