"""The parts of the Triton decoder against their torch counterparts: all scales, levels, codes and extensions."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from specter.codecs.residual import windows as reference
from specter.codecs.residual.fields import Levels, from_fields
from specter.codecs.residual.resident import unpack_params
from specter.codecs.residual.windows import CANDIDATES, EXACT_ZERO, Windows
from specter.kernels.residual_parts import extend, extension_bits, level_words, rebuild

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_BLOCK = 4096


@triton.jit
def _words_kernel(groups, out, reach, edge, TWO_SIDED: tl.constexpr, BF16: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, level_words(tl.load(groups + at // 16), at % 16, reach, edge, TWO_SIDED, BF16))


@triton.jit
def _weights_kernel(words, codes, extensions, out, widths, TWO_SIDED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value, key = rebuild(tl.load(words + at), tl.load(codes + at), TWO_SIDED)
    bits = tl.load(extensions + at) | (1 << 20)  # what follows in the stream must not matter
    value, _ = extend(value, key, bits, TWO_SIDED)
    tl.store(out + at, (value >> 16) & 0xFFFF)
    tl.store(widths + at, extension_bits(key, TWO_SIDED))


def all_params(dtype: torch.dtype) -> Tensor:
    """A group for every scale in the codec's range, padded to whole blocks; zero points in turn."""
    first, last = (1, 0x7BFF) if dtype == torch.float16 else (27 << 7, (227 << 7) - 1)
    count = (last - first + _BLOCK) // _BLOCK * _BLOCK
    scales = torch.arange(first, first + count).clamp(max=last)
    zeros = (torch.arange(count) * 7 % 16).half()
    return (scales | zeros.view(torch.int16).int() << 16).int()


@pytest.mark.parametrize("windows", CANDIDATES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_level_words_of_all_scales(windows: Windows, dtype: torch.dtype) -> None:
    params = all_params(dtype).to(DEVICE)
    out = torch.zeros(len(params), 16, dtype=torch.int32, device=DEVICE)
    _words_kernel[(out.numel() // _BLOCK,)](
        params, out, windows.reach, windows.edge, TWO_SIDED=windows.two_sided, BF16=dtype == torch.bfloat16,
        BLOCK=_BLOCK,
    )  # fmt: skip
    expected = reference.level_words(*unpack_params(params.cpu(), dtype), windows)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("windows", [Windows(False, 8), Windows(False, 15), Windows(True, 14), Windows(True, 22)])
def test_weights_of_all_codes(windows: Windows) -> None:
    scales, zeros = torch.tensor([2.0**-24, 0.0123, 1.0, 65504.0]), torch.tensor([8, 0, 15, 3], dtype=torch.int32)
    words = reference.level_words(scales.half().float(), zeros, windows).flatten()
    grid = torch.cartesian_prod(words, torch.arange(1024, dtype=torch.int32), torch.arange(16, dtype=torch.int32))
    levels = Levels.of(grid[:, 0])
    is_code = grid[:, 1] >> levels.width == 0
    long_bits = torch.where(grid[:, 1] >= levels.num_short, levels.long_bits(windows), 0)
    is_zero = levels.is_zero & (grid[:, 1] == EXACT_ZERO)
    fits = is_code & (grid[:, 2] >> torch.where(is_zero, 1, long_bits) == 0)
    grid = grid[fits][: int(fits.sum()) // _BLOCK * _BLOCK].contiguous()
    parts = [part.contiguous().to(DEVICE) for part in grid.unbind(1)]
    out, widths = (torch.zeros_like(parts[0]) for _ in range(2))
    _weights_kernel[(len(grid) // _BLOCK,)](*parts, out, widths, TWO_SIDED=windows.two_sided, BLOCK=_BLOCK)
    levels = Levels.of(grid[:, 0])
    long_bits = torch.where(grid[:, 1] >= levels.num_short, levels.long_bits(windows), 0)
    assert torch.equal(widths.cpu(), long_bits)
    expected = from_fields(grid[:, 1], grid[:, 2], levels, windows)
    overflows = levels.top - expected.bitwise_and(0x7FFF) < -0x4000  # numbers that no weight has
    assert torch.equal(out.cpu()[~overflows], expected[~overflows])
    assert len(grid) > 10_000
