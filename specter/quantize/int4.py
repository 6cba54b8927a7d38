"""INT4 codes of the routed experts, as every quantizer makes them and every draft reads them.

W[o, i] = scale[o, i // group] * (code[o, i] - zero[o, i // group]), code and zero in 0..15
(symmetric: zero is 8 everywhere).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Int4Matrices:
    """A batch of quantised matrices [..., out, in]."""

    codes: Tensor  # uint8 [..., out, in], values 0..15, unpacked
    scales: Tensor  # fp16 [..., out, in / group]
    zeros: Tensor  # uint8 [..., out, in / group]
    group: int  # input channels per group; the whole row where the row is shorter than the asked-for group

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrices [..., out, in]; products are formed in fp32 and rounded once to `dtype`."""
        out_in = self.codes.shape
        codes = self.codes.view(*out_in[:-1], -1, self.group).float()
        weights = self.scales.float()[..., None] * (codes - self.zeros.float()[..., None])
        return weights.view(out_in).to(dtype)


@dataclass(frozen=True, slots=True)
class Int4Experts:
    """All routed experts of a model: leading dims [MoE layers, E]; gate/up are [.., F, D], down [.., D, F]."""

    gate: Int4Matrices
    up: Int4Matrices
    down: Int4Matrices
    method: str  # "gptq" or "rtn"
    num_fallback: int  # experts quantised by round-to-nearest for want of calibration tokens
