"""Windows: which BF16 values a code, scale and zero point allow, and the number that each of them has.

Write m = code - zero, k = |m|, s = scale. BF16 magnitudes are ordered as integers; sign and k give a window of them
around k * s. Widths of codes follow from (code, scale, zero) alone, so no width is stored.

Values of a level are numbered downwards from `top`: value = top - number. At k = 0 the sign is the number's lowest bit:
magnitude = top - number / 2. A level's main codes have `width` bits, 10 at k = 0. The first `num_short` of them are
short and are the number itself. Others are long, and extension bits x follow. With r = code - num_short:

| windows | level | bits of x | number of a long code |
|---|---|---|---|
| one-sided | k >= 1 | 1 | num_short + 2 r + x |
| one-sided | k = 0 | 4 | num_short + 16 r + x |
| two-sided | all, r even | 4 | num_short + 8 r + x |
| two-sided | all, r odd | 4 | -8 (r + 1) + x: above top |

At k = 0 the last code, 1023, is exact zero with sign x. Anything that has no number is a patch.

One-sided windows fit codes that are the nearest level. GPTQ also takes the second nearest: then two-sided ones are
smaller, whose short codes lie in the middle of the window.

Arithmetic is fp32 and exact: scales have at most 11 significant bits and are multiplied by multiples of 1/16 below 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ZERO_WIDTH, ZERO_SHORT = 10, 768  # level k = 0: three octaves are short
LONG_BITS = 4  # extension of k = 0, and of all levels in two-sided windows
EXACT_ZERO = (1 << ZERO_WIDTH) - 1  # code of level k = 0
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-100, 2.0**100  # products stay normal fp32 numbers
_NEAR = 9 / 16  # half-width of the short part of a two-sided window, in steps; also the least reach beyond codes 0, 15
_FLOOR = 1 / 8  # two-sided windows of k = 1 end here
_ZERO_TOP = 15 / 16  # top of k = 0 in two-sided windows


@dataclass(frozen=True, slots=True)
class Windows:
    """The free parameters; all experts of a launch share them.

    Attributes:
        reach16: half-width of a window in 16ths of a step; below 16 in one-sided windows.
    """

    two_sided: bool
    reach16: int

    @property
    def reach(self) -> float:
        return self.reach16 / 16

    @property
    def edge(self) -> float:
        """Reach beyond codes 0 and 15 in one-sided windows: rounding leaves a little more than half a step there."""
        return max(self.reach, _NEAR)


CANDIDATES = (
    *(Windows(False, reach16) for reach16 in (8, 10, 12, 15)),
    *(Windows(True, reach16) for reach16 in (14, 16, 18, 20, 22)),
)


def level_words(scales: Tensor, zeros: Tensor, windows: Windows) -> Tensor:
    """int32 [..., 16]: of each group's levels, the sign and top << 16 | (k is 0) << 15 | num_short << 5 | width.

    Args:
        scales: fp32 [...], within SMALLEST_SCALE..LARGEST_SCALE. zeros: int32 [...].
    """
    levels = torch.arange(16, dtype=torch.int32, device=scales.device)
    offset = levels - zeros[..., None]
    steps = offset.abs().float()
    scale = scales[..., None]
    if windows.two_sided:
        top, short, width = _two_sided(steps, scale, windows)
    else:
        edge = torch.where((levels == 0) | (levels == 15), windows.edge, windows.reach)
        top, short, width = _one_sided(steps, scale, edge, windows.reach)
    is_zero = offset == 0
    short, width = torch.where(is_zero, ZERO_SHORT, short), torch.where(is_zero, ZERO_WIDTH, width)
    sign = (offset < 0).int() << 31
    return sign | top << 16 | is_zero.int() << 15 | short << 5 | width


def _one_sided(steps: Tensor, scale: Tensor, edge: Tensor, reach: float) -> tuple[Tensor, Tensor, Tensor]:
    top = _floor_bits((steps + edge) * scale)
    count = (top - _ceil_bits((steps - reach) * scale) + 1).clamp(1, 1023)
    width = _log2(count)
    return top, (2 << width) - count, width


def _two_sided(steps: Tensor, scale: Tensor, windows: Windows) -> tuple[Tensor, Tensor, Tensor]:
    """The least width whose short codes cover three quarters of the middle."""
    top, low = _floor_bits((steps + _NEAR) * scale), _ceil_bits((steps - _NEAR) * scale)
    highest = _floor_bits((steps + windows.reach) * scale)
    lowest = _ceil_bits((steps - windows.reach).clamp(min=_FLOOR) * scale)
    middle = (top - low + 1).clamp(1, 512)
    total = middle + (2 * torch.maximum(highest - top, low - lowest)).clamp(0, 1535)
    width = _log2(total + 15 * ((3 * middle + 3) >> 2) - 1) + 1 - LONG_BITS
    short = torch.minimum(((16 << width) - total) // 15, 1 << width)
    return torch.where(steps == 0, _floor_bits(_ZERO_TOP * scale), top), short, width


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def _floor_bits(values: Tensor) -> Tensor:
    """BF16 bits of the next value towards 0."""
    return _bits(values) >> 16


def _ceil_bits(values: Tensor) -> Tensor:
    """BF16 bits of the next value away from 0; of negative values, something large."""
    return (_bits(values) + 0xFFFF) >> 16


def _log2(values: Tensor) -> Tensor:
    """Floor of the logarithm of positive int32 below 2^24."""
    return (_bits(values.float()) >> 23) - 127
