"""A row of activations as int16 with one fp32 scale per eight channels, for products with INT4 codes: 2.5 K bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

OCTET = 8  # channels whose codes share one int32
_LARGEST, _SMALLEST = 32767, 1e-30  # value, peak of an octet; equal to those in `store_octets`


@dataclass(frozen=True, slots=True)
class Octets:
    """A row of K channels as integers: channel 8 o + 2 p + h is values[p, o, h] * scales[o]."""

    values: Tensor  # int16 [4, K / 8, 2]
    scales: Tensor  # fp32 [K / 8]

    @classmethod
    def empty(cls, num_channels: int, device: torch.device | str) -> Octets:
        num = num_channels // OCTET
        return cls(torch.zeros(4, num, 2, dtype=torch.int16, device=device), torch.zeros(num, device=device))

    @classmethod
    def of(cls, x: Tensor) -> Octets:
        """Quantises x [K] as `store_octets` does."""
        octets = x.float().view(-1, OCTET)
        scales = octets.abs().amax(1).clamp(min=_SMALLEST) / _LARGEST
        values = (octets / scales[:, None] + 0.5).floor().to(torch.int16)
        return cls(values.view(-1, 4, 2).transpose(0, 1).contiguous(), scales)

    def decode(self) -> Tensor:
        """x fp32 [K]."""
        return (self.values.transpose(0, 1).flatten(1).float() * self.scales[:, None]).flatten()


@triton.jit
def store_octets(x, octet, octets, scales, limit, OCTETS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores x fp32 [BLOCK_N] as octets `octet`…`limit` - 1; OCTETS: octets in the whole row."""
    parts = tl.reshape(x, (BLOCK_N // 8, 8))
    scale = tl.maximum(tl.max(tl.abs(parts), axis=1), 1e-30) / 32767.0
    values = tl.floor(parts / scale[:, None] + 0.5).to(tl.int16)
    at, lanes = octet + tl.arange(0, BLOCK_N // 8), tl.arange(0, 8)
    place = (lanes // 2 * (2 * OCTETS) + lanes % 2)[None, :] + at[:, None] * 2
    tl.store(octets + place, values, mask=(at < limit)[:, None])
    tl.store(scales + at, scale, mask=at < limit)


@triton.jit
def _pair(codes, x, SHIFT: tl.constexpr):
    """Dot product of two codes (bytes of `codes`) with the two int16 halves of x."""
    return ((codes >> SHIFT) & 15) * ((x << 16) >> 16) + ((codes >> (SHIFT + 8)) & 15) * (x >> 16)


@triton.jit
def octet_sums(words, a, b, c, d, DP2A: tl.constexpr):
    """Sum of code * value over each word's octet, exact, as fp32; a…d: pairs of values of the octet."""
    if DP2A:
        bits = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, sum;
            and.b32 low, $1, 0x0F0F0F0F;
            shr.u32 high, $1, 4;
            and.b32 high, high, 0x0F0F0F0F;
            dp2a.lo.s32.u32 sum, $2, low, 0x4B400000;
            dp2a.hi.s32.u32 sum, $3, low, sum;
            dp2a.lo.s32.u32 sum, $4, high, sum;
            dp2a.hi.s32.u32 $0, $5, high, sum;
            }""",
            "=r,r,r,r,r,r", [words, a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        return bits.to(tl.float32, bitcast=True) - 12582912.0
    low, high = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
    return (_pair(low, a, 0) + _pair(low, b, 16) + _pair(high, c, 0) + _pair(high, d, 16)).to(tl.float32)
