"""The shipping format of stand-in checkpoints: int8 codes with one fp16 scale per row.

Every tensor of two or more dimensions becomes `name` (int8, same shape) and `name.scale` (fp16, shape[:-1]); others
become fp16. Everything is measured on the decoded values.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_SUFFIX = ".scale"
FORMAT = "specter-int8-v1"


def encode(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Codes a state dict; inverse of `decode_tensor` up to rounding."""
    coded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() < 2:
            coded[name] = tensor.half().contiguous()
            continue
        rows = tensor.float()
        scale = (rows.abs().amax(-1) / 127).clamp(min=6e-8).half()
        codes = (rows / scale.float()[..., None]).round().clamp(-127, 127)
        coded[name] = codes.to(torch.int8).contiguous()
        coded[name + SCALE_SUFFIX] = scale.contiguous()
    return coded


def decode_tensor(codes: Tensor, scale: Tensor) -> Tensor:
    """One tensor back, as fp32 that holds BF16 values: codes int8 [..., n], scale fp16 [...].

    The checkpoints that stand-ins stand for are BF16. Rounding here gives CPU, device and residual codec the same
    weights.
    """
    return (codes.float() * scale.float()[..., None]).bfloat16().float()
