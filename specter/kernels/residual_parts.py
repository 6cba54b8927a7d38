"""The parts of the residual decoder: level words, fields of the stream, and weights from fields (see `residual`).

All tensors have one dimension; a program is one warp. `windows` and `fields` in `specter.codecs.residual` are the same
in torch.
"""

# mypy: disable-error-code=no-untyped-def
# (the arguments of a kernel are typed by its launch)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _floor_log2(x):
    return (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _top(x):
    return x.to(tl.int32, bitcast=True) >> 16


@triton.jit
def _bottom(x):
    return (x.to(tl.int32, bitcast=True) + 0xFFFF) >> 16


@triton.jit
def level_words(params, level, reach, edge, TWO_SIDED: tl.constexpr, BF16: tl.constexpr):
    """`windows.level_words` of each entry's own level."""
    if BF16:
        scale = (params << 16).to(tl.float32, bitcast=True)
    else:
        scale = (params & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    offset = level - (params >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.int32)
    steps = tl.abs(offset).to(tl.float32)
    if TWO_SIDED:
        top, low = _top((steps + 0.5625) * scale), _bottom((steps - 0.5625) * scale)
        above = _top((steps + reach) * scale) - top
        below = low - _bottom(tl.maximum(steps - reach, 0.125) * scale)
        middle = tl.minimum(tl.maximum(top - low + 1, 1), 512)
        total = middle + tl.minimum(tl.maximum(2 * tl.maximum(above, below), 0), 1535)
        width = _floor_log2(total + 15 * ((3 * middle + 3) >> 2) - 1) - 3
        short = tl.minimum((((16 << width) - total) * 34953) >> 19, 1 << width)  # a 15th of less than 2^14
        top = tl.where(offset == 0, _top(0.9375 * scale), top)
    else:
        outwards = tl.where((level == 0) | (level == 15), edge, reach)
        top = _top((steps + outwards) * scale)
        count = tl.minimum(tl.maximum(top - _bottom((steps - reach) * scale) + 1, 1), 1023)
        width = _floor_log2(count)
        short = (2 << width) - count
    rest = tl.where(offset == 0, (1 << 15) | (768 << 5) | 10, (short << 5) | width)
    return tl.where(offset < 0, -2147483648, 0) | (top << 16) | rest


@triton.jit
def _u64(x):
    return x.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def window64(stream, bit):
    """64 bits of the stream from `bit` on."""
    at = stream + (bit >> 5)
    shift = (bit & 31).to(tl.uint64)
    low = _u64(tl.load(at)) | (_u64(tl.load(at + 1)) << 32)
    return (low >> shift) | ((_u64(tl.load(at + 2)) << 1) << (63 - shift))


@triton.jit
def window32(stream, bit):
    at = stream + (bit >> 5)
    both = _u64(tl.load(at)) | (_u64(tl.load(at + 1)) << 32)
    return (both >> (bit & 31).to(tl.uint64)).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def starts(counts, base):
    """Where each octet's bits start, and where the last one's end."""
    return tl.cumsum(counts, 0) - counts + base, base + tl.sum(counts, 0)


@triton.jit
def look_up(table, first, codes, SHIFT: tl.constexpr):
    return tl.gather(table, first | ((codes >> SHIFT) & 15), 0)


@triton.jit
def main_code(word, window, at):
    """A main code, and where the next one starts."""
    width = word & 15
    code = (window >> at.to(tl.uint64)).to(tl.uint32).to(tl.int32, bitcast=True) & ((1 << width) - 1)
    return code, at + width


@triton.jit
def rebuild(word, code, TWO_SIDED: tl.constexpr):
    """The weight without its extension (bits 31..16), and a key of that extension, 0 for short codes.

    The key is the extension's factor in two-sided windows, and its mask in others. Only level k = 0 has a code 1023.
    """
    short = (word >> 5) & 1023
    rest = code - short
    is_zero = (word & 0x8000) != 0
    factor = tl.where(is_zero, 0x7FFF8000, -65536)
    if TWO_SIDED:
        is_above = (rest & 1) != 0
        number = tl.where(is_above, rest * -8 - 8, rest * 8 + short)
        value = tl.where(rest >= 0, number, code) * factor + word
        key = factor
    else:
        key = tl.where(is_zero, 15, 1)
        value = (code + tl.maximum(rest, 0) * key) * factor + word
    value = tl.where(code == 1023, 0x8000, value)  # exact zero; the extension is its sign
    return value, tl.where(rest >= 0, key, 0)


@triton.jit
def extension_bits(key, TWO_SIDED: tl.constexpr):
    return tl.where(key != 0, 4, 0) if TWO_SIDED else tl.minimum(key, 4)


@triton.jit
def extend(value, key, bits, TWO_SIDED: tl.constexpr):
    """The weight, and the extension bits behind its own."""
    if TWO_SIDED:
        value += (bits & 15) * key
    else:
        value += (bits & key) * tl.where(key > 1, 0x7FFF8000, -65536)
    return value, bits >> extension_bits(key, TWO_SIDED)


@triton.jit
def pair(low, high):
    return ((low >> 16) & 0xFFFF) | (high & -65536)
