"""What happens to rows one by one: the families' norms, and biases."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from specter.model.spec import ModelSpec


def norm(spec: ModelSpec, x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """The family's norm of x [..., D], RMSNorm or LayerNorm; without gain where the next matrix has it folded in."""
    if spec.layer_norm:
        return F.layer_norm(x, (spec.hidden,), gain, bias, spec.norm_eps)
    return F.rms_norm(x, (spec.hidden,), gain, spec.norm_eps)


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
