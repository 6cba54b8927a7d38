"""Rotary tables and the softmax scale, shared by the decoder, the trainer and the inflation.

DeepSeek-V2 rotates interleaved pairs (x[2i], x[2i+1]). YaRN blends the original and the interpolated
frequencies over a ramp and multiplies the softmax scale by mscale squared (arXiv 2309.00071, 2405.04434).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specter.model.spec import ModelSpec, RopeSpec


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 or mscale == 0.0 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeSpec, dim: int) -> Tensor:
    """Inverse frequencies [dim / 2] fp32."""
    plain = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.factor == 1.0:
        return plain

    def pair_of(rotations: float) -> float:
        return dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_of(rope.beta_fast)), 0)
    high = min(math.ceil(pair_of(rope.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def rotary_table(spec: ModelSpec, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each [num_positions, rope_dim / 2] fp32."""
    angles = torch.outer(
        torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(spec.rope, spec.rope_dim)
    )
    rope = spec.rope
    gain = _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return angles.cos() * gain, angles.sin() * gain


def softmax_scale(spec: ModelSpec) -> float:
    """Scale of q·k, YaRN's mscale squared included."""
    return spec.qk_dim**-0.5 * _mscale(spec.rope.factor, spec.rope.mscale_all_dim) ** 2


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates interleaved pairs of x [..., rope_dim]; cos and sin broadcast over [..., rope_dim / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
