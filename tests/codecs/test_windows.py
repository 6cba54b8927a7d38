"""Windows against exact arithmetic, and fields of every bit pattern."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter.codecs.residual.fields import Levels, extension_widths, from_fields, to_fields
from specter.codecs.residual.windows import CANDIDATES, EXACT_ZERO, LONG_BITS, Windows, level_words

ALL_BITS = torch.arange(1 << 16, dtype=torch.int32)


def bf16_value(bits: int) -> Fraction:
    value = torch.tensor(bits).to(torch.int16).view(torch.bfloat16).double()
    return Fraction(float(value))


@st.composite
def scales(draw: st.DrawFn) -> float:
    """Positive fp16 (denormals too) or bf16 numbers in the codec's range."""
    if draw(st.booleans()):
        return float(torch.tensor(draw(st.integers(1, 0x7BFF))).to(torch.int16).view(torch.float16))
    return float(torch.tensor(draw(st.integers(27 << 7, (227 << 7) - 1))).to(torch.int16).view(torch.bfloat16))


@given(scale=scales(), zero=st.integers(0, 15), windows=st.sampled_from(CANDIDATES))
@settings(max_examples=60, deadline=None)
def test_windows_are_exact(scale: float, zero: int, windows: Windows) -> None:
    """The top of every window is the last bf16 value that is not beyond it, in rational arithmetic."""
    words = level_words(torch.tensor([scale]), torch.tensor([zero], dtype=torch.int32), windows)
    levels = Levels.of(words[0])
    for code in range(16):
        steps = abs(code - zero)
        if windows.two_sided:
            reach = Fraction(15, 16) if steps == 0 else Fraction(9, 16)
        else:
            reach = Fraction(max(windows.reach16, 9) if code in (0, 15) else windows.reach16, 16)
        top, limit = int(levels.top[code]), (steps + reach) * Fraction(scale)
        assert bf16_value(top) <= limit < bf16_value(top + 1)
        assert bool(levels.is_negative[code]) == (code < zero) and bool(levels.is_zero[code]) == (code == zero)


@given(scale=scales(), zero=st.integers(0, 15), windows=st.sampled_from(CANDIDATES), code=st.integers(0, 15))
@settings(max_examples=100, deadline=None)
def test_every_bit_pattern_is_a_field_or_a_patch(scale: float, zero: int, windows: Windows, code: int) -> None:
    word = level_words(torch.tensor([scale]), torch.tensor([zero], dtype=torch.int32), windows)[0, code]
    words = word.expand(1 << 16)
    fields, levels = to_fields(ALL_BITS, words, windows), Levels.of(words)
    back = from_fields(fields.code, fields.extension, levels, windows)
    assert torch.equal(back[~fields.is_patch], ALL_BITS[~fields.is_patch])
    assert torch.equal(fields.extension_width, extension_widths(fields.code, levels, windows))
    assert bool((fields.code >= 0).all()) and bool((fields.code >> fields.width == 0).all())
    assert bool((fields.extension >> fields.extension_width == 0).all())
    assert not bool((fields.code[fields.is_patch] | fields.extension_width[fields.is_patch]).any())
    assert int(fields.width[0]) <= 10 and int(fields.extension_width.max()) <= LONG_BITS
    assert int(levels.width[0]) < 10 or bool(levels.is_zero[0])  # only k = 0 has the code of an exact zero
    if code == zero:
        assert fields.code[[0, 0x8000]].tolist() == [EXACT_ZERO, EXACT_ZERO]
        assert fields.extension[[0, 0x8000]].tolist() == [0, 1]


@pytest.mark.parametrize("windows", CANDIDATES)
def test_nearest_values_have_numbers(windows: Windows) -> None:
    """Whatever rounds to a level is no patch, and in one-sided windows of half a step little else has a number."""
    scale, zero = 0.0123, 8
    scale = float(torch.tensor(scale).half())
    values = ALL_BITS.to(torch.int16).view(torch.bfloat16).float()
    nearest = (values / scale + zero).round()
    words = level_words(torch.tensor([scale]), torch.tensor([zero], dtype=torch.int32), windows)[0]
    for code in range(16):
        fields = to_fields(ALL_BITS, words[code].expand(1 << 16), windows)
        tiny = (values.abs() < scale / 512) & (values != 0)
        assert not bool((fields.is_patch & (nearest == code) & ~tiny).any())
        if windows == Windows(False, 8):
            beyond = (values / scale + zero - code).abs() > 0.6
            assert bool(fields.is_patch[beyond & (values != 0)].all())
