"""Rotary tables and the softmax scale of the decoder, the trainer and the inflation.

DeepSeek-V2 rotates interleaved pairs (x[2i], x[2i+1]); the other families' halves (x[i], x[i + d/2]) are interleaved
on loading. YaRN blends the original and the interpolated frequencies over a ramp and multiplies the softmax scale by
mscale squared (arXiv 2309.00071, 2405.04434). LongRoPE divides each frequency by its own factor, from one set up to
the original length and another beyond (arXiv 2402.13753).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.models.spec import ModelSpec, RopeSpec


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 or mscale == 0.0 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeSpec, dim: int, is_long: bool = False) -> Tensor:
    """Inverse frequencies [dim / 2] fp32; `is_long` affects LongRoPE only."""
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.short_factors:
        return 1.0 / (torch.tensor(rope.long_factors if is_long else rope.short_factors) * powers)
    plain = 1.0 / powers
    if rope.factor == 1.0:
        return plain

    def pair_of(rotations: float) -> float:
        return dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_of(rope.beta_fast)), 0)
    high = min(math.ceil(pair_of(rope.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def is_long(rope: RopeSpec, capacity: int) -> bool:
    """Whether a KV cache of `capacity` positions uses LongRoPE's long factors: the capacity decides, not the length, so
    that a position's keys never change (docs/decisions/0010)."""
    return bool(rope.short_factors) and capacity > rope.original_max_positions


def check_prompt(spec: ModelSpec, capacity: int, num_tokens: int) -> None:
    """Refuses a prompt shorter than LongRoPE's switch in a KV cache longer than it. Raises SpecterError: the published
    model would rotate this prompt by the short factors, and its continuation by the long ones."""
    original = spec.rope.original_max_positions
    if is_long(spec.rope, capacity) and num_tokens <= original:
        raise SpecterError(
            f"a prompt of {num_tokens} tokens in a KV cache of {capacity} positions would cross the switch of LongRoPE "
            f"at {original} positions of {spec.name}, where every earlier key changes",
            f"set kv_capacity to at most {original} for prompts up to {original} tokens, or give a longer prompt",
        )


def rotary_table(spec: ModelSpec, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each [num_positions, rope_dim / 2] fp32; `num_positions` is the KV capacity (see `is_long`)."""
    rope = spec.rope
    long = is_long(rope, num_positions)
    frequencies = inverse_frequencies(rope, spec.rope_dim, long)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    if rope.short_factors:
        gain = rope.long_mscale if long else rope.short_mscale
    else:
        gain = _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return angles.cos() * gain, angles.sin() * gain


def softmax_scale(spec: ModelSpec) -> float:
    """Scale of q·k, YaRN's mscale squared included."""
    return float(spec.qk_dim**-0.5) * _mscale(spec.rope.factor, spec.rope.mscale_all_dim) ** 2


def interleave_halves(rows: Tensor, dim: int) -> Tensor:
    """Reorders rows [heads * dim, ...] within each head from halves (i, i + dim / 2) to pairs (2i, 2i + 1)."""
    pairs: Tensor = rows.unflatten(0, (-1, 2, dim // 2)).transpose(1, 2)
    return pairs.flatten(0, 2)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (x[i], x[i + d/2]) of x [..., d]; cos and sin broadcast over [..., d / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
