"""Matrices and experts as INT4 codes, which every draft reads.

W[o, i] = scale[o, i // group] * (code[o, i] - zero[o, i // group]), code and zero in 0..15
(symmetric: zero is 8 everywhere).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specter.errors import SpecterError


@dataclass(frozen=True, slots=True)
class Int4Matrices:
    """A batch of matrices [..., out, in]."""

    codes: Tensor  # uint8 [..., out, in], values 0..15, unpacked
    scales: Tensor  # fp16 [..., out, in / group]
    zeros: Tensor  # uint8 [..., out, in / group]
    group: int  # input channels per group, at most the row

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrices [..., out, in], multiplied in fp32 and rounded once to `dtype`."""
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
    num_fallback: int  # experts rounded to nearest for lack of calibration tokens
    input_scales: Tensor | None = None  # AWQ: fp32 [MoE layers, D], factors of the input of gate and up
    num_ignored: int = 0  # quantized modules of the directory besides the routed experts

    def check_plain(self) -> None:
        """Raises SpecterError for input scales, which the GPU kernels do not read."""
        if self.input_scales is not None:
            raise SpecterError(
                "the GPU draft does not read the scales of its input that AWQ needs", "use method=gptq or method=rtn"
            )
