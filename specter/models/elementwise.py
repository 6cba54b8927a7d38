"""Row-wise operations: norms and biases."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.models.spec import ModelSpec


def norm(spec: ModelSpec, x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """RMSNorm or LayerNorm of x [..., D]; without gain where the next matrix has it folded in."""
    if spec.layer_norm:
        unit = F.layer_norm(x, (spec.hidden,), None, None, spec.norm_eps)
    else:
        unit = x * inverse_rms(x, spec.norm_eps)
    return unit if gain is None else affine(unit, gain, bias)


def affine(x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """A norm's gain and bias, where no matrix has them folded in."""
    return x * gain if bias is None else torch.addcmul(bias, x, gain)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of squares + eps) of the rows of x [..., D] -> [..., 1]; on a CPU faster than F.rms_norm."""
    squares = torch.linalg.vecdot(x, x)
    mean = torch.add(_constant(eps, x.dtype, x.device), squares, alpha=1 / x.shape[-1])
    return mean.rsqrt_().unsqueeze(-1)


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


@cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached across passes and training
        return torch.tensor(value, dtype=dtype, device=device)
