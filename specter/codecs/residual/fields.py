"""Weights as fields of the stream: main code, its width, extension and its width, or a patch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specter.codecs.residual.windows import EXACT_ZERO, LONG_BITS, Windows


@dataclass(frozen=True, slots=True)
class Levels:
    """The parts of level words (see `windows.level_words`), int32 of any shape."""

    top: Tensor  # magnitude bits
    is_negative: Tensor
    is_zero: Tensor  # bool: level k = 0
    num_short: Tensor
    width: Tensor

    @classmethod
    def of(cls, words: Tensor) -> Levels:
        zero = (words >> 15 & 1).bool()
        return cls(words >> 16 & 0x7FFF, words >> 31 & 1, zero, words >> 5 & 1023, words & 15)

    def long_bits(self, windows: Windows) -> Tensor:
        """Extension bits of the level's long codes."""
        if windows.two_sided:
            return torch.full_like(self.width, LONG_BITS)
        return torch.where(self.is_zero, LONG_BITS, 1).int()


@dataclass(frozen=True, slots=True)
class Fields:
    """One entry per weight, int32 of any shape."""

    code: Tensor
    width: Tensor
    extension: Tensor
    extension_width: Tensor
    is_patch: Tensor  # bool; code and extension are 0


def to_fields(weights: Tensor, words: Tensor, windows: Windows) -> Fields:
    """Fields of weights, BF16 bits as int32 0..65535, whose level words are `words`."""
    levels = Levels.of(words)
    magnitude, is_negative = weights & 0x7FFF, weights >> 15
    below = levels.top - magnitude
    number = torch.where(levels.is_zero, 2 * below + is_negative, below)
    long_bits = levels.long_bits(windows)
    behind = number - levels.num_short
    if windows.two_sided:
        rest = torch.where(number < 0, -2 * (number >> LONG_BITS) - 1, behind >> LONG_BITS << 1)
        extension = torch.where(number < 0, number, behind) & 15
        is_long = (number < 0) | (behind >= 0)
        fits = torch.ones_like(is_long)
    else:
        rest, extension = behind >> long_bits, behind & (1 << long_bits) - 1
        is_long, fits = behind >= 0, number >= 0
    code = torch.where(is_long, levels.num_short + rest, number)
    limit = torch.where(levels.is_zero, EXACT_ZERO, 1 << levels.width)
    fits &= (code < limit) & (levels.is_zero | (is_negative == levels.is_negative))
    is_exact_zero = levels.is_zero & (magnitude == 0)
    code, extension = (
        torch.where(is_exact_zero, zero, torch.where(fits, value, 0))
        for zero, value in ((EXACT_ZERO, code), (is_negative, extension))
    )
    is_long = code >= levels.num_short
    return Fields(
        code=code,
        width=levels.width,
        extension=torch.where(is_long, extension, 0),
        extension_width=torch.where(is_long, long_bits, 0),
        is_patch=~(fits | is_exact_zero),
    )


def extension_widths(code: Tensor, levels: Levels, windows: Windows) -> Tensor:
    return torch.where(code >= levels.num_short, levels.long_bits(windows), 0)


def from_fields(code: Tensor, extension: Tensor, levels: Levels, windows: Windows) -> Tensor:
    """BF16 bits, int32 0..65535; the inverse of `to_fields` where that gives no patch."""
    rest = code - levels.num_short
    if windows.two_sided:
        number = torch.where(rest & 1 == 1, -8 * rest - 8, levels.num_short + 8 * rest)
    else:
        number = levels.num_short + (rest << levels.long_bits(windows))
    number = torch.where(rest >= 0, number + extension, code)
    step = torch.where(levels.is_zero, number >> 1, number)
    sign = torch.where(levels.is_zero, number & 1, levels.is_negative)
    is_exact_zero = levels.is_zero & (code == EXACT_ZERO)
    magnitude = torch.where(is_exact_zero, 0, levels.top - step) & 0x7FFF
    return magnitude | torch.where(is_exact_zero, extension & 1, sign) << 15
