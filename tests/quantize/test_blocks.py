"""GGML's block formats: decoding bit for bit as published, encoding close, narrow rows as at full size."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter.errors import SpecterError
from specter.quantize.ggml_blocks import (
    FORMATS,
    IQ4_NL,
    LEVELS,
    Q2_K,
    Q4_K,
    Q5_0,
    Q8_0,
    BlockFormat,
    _decode_offsets,
    _quantize_offsets,
    format_of,
    round_to_blocks,
)

ALL = (Q8_0, Q5_0, IQ4_NL, Q4_K, Q2_K)
HALVES = {"Q4_K": (0, 2), "Q2_K": (80, 82)}  # bytes of fp16 values
# SHA-256 of gguf 0.19.0's fp32 values of `random_blocks(format, 256)`.
PUBLISHED = {
    "Q8_0": "8a7f3fdb217484ae6fa7bc9946acb22d6545b7dabd0fa184abec3cde41df162c",
    "Q5_0": "36e8bd60bcd97071db3d0808726bc58c97da9242c8ca57706351343bd6c1b384",
    "IQ4_NL": "b432bff852cebad87b6d2c4120053b667aac8947511698166d6cde204fc6d239",
    "Q4_K": "bbe01e82416051bee0deb813fc5cd8f7c4a02ba9c1f7cc6d83596d5f8149cf07",
    "Q2_K": "3b9271ed3e657f203b88c5dcc5d5bc28bc088851057e46962b14c39fee6b3917",
}
FIELDS = {Q4_K: (15, 63, 32), Q2_K: (3, 15, 16)}  # largest code, largest scale, values of a sub-block
# Relative error on Gaussian weights, a little above what was measured.
EXPECTED_ERROR = {"Q8_0": 0.006, "Q5_0": 0.045, "IQ4_NL": 0.078, "Q4_K": 0.075, "Q2_K": 0.285}


def random_blocks(form: BlockFormat, num: int) -> np.ndarray:
    """Any bytes, but finite scales."""
    raw = np.random.default_rng(0).integers(0, 256, (num, form.num_bytes), dtype=np.uint8)
    for half in HALVES.get(form.name, (0,)):
        raw[:, half + 1] &= 0xBF
    return raw


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
def test_decoding_is_the_published_one_bit_for_bit(form: BlockFormat) -> None:
    values = form.decode(torch.from_numpy(random_blocks(form, 256))).numpy()
    assert values.dtype == np.float32 and values.shape == (256, form.num_values)
    assert hashlib.sha256(values.tobytes()).hexdigest() == PUBLISHED[form.name]


def half(block: bytes, start: int) -> np.float32:
    return np.float32(np.frombuffer(block[start : start + 2], np.float16)[0])


def by_hand(form: BlockFormat, block: bytes) -> list[np.float32]:
    """Every weight of one block, read from its bits one by one."""
    values = []
    for i in range(form.num_values):
        match form.name:
            case "Q8_0":
                values.append(half(block, 0) * np.float32(np.int8(np.uint8(block[2 + i]))))
            case "Q5_0":
                low = block[6 + i % 16] >> 4 * (i // 16) & 15
                fifth = block[2 + i // 8] >> i % 8 & 1
                values.append(half(block, 0) * np.float32((low | fifth << 4) - 16))
            case "IQ4_NL":
                values.append(half(block, 0) * np.float32(LEVELS[block[2 + i % 16] >> 4 * (i // 16) & 15]))
            case "Q4_K":
                packed, sub = block[4:16], i // 32
                if sub < 4:
                    s, m = packed[sub] & 63, packed[sub + 4] & 63
                else:
                    s = packed[sub + 4] & 15 | packed[sub - 4] >> 6 << 4
                    m = packed[sub + 4] >> 4 | packed[sub] >> 6 << 4
                q = block[16 + 32 * (i // 64) + i % 32] >> 4 * (i // 32 % 2) & 15
                scaled = half(block, 0) * np.float32(s) * np.float32(q)
                values.append(scaled - half(block, 2) * np.float32(m))
            case "Q2_K":
                s, m = block[i // 16] & 15, block[i // 16] >> 4
                q = block[16 + 32 * (i // 128) + i % 32] >> 2 * (i // 32 % 4) & 3
                scaled = half(block, 80) * np.float32(s) * np.float32(q)
                values.append(scaled - half(block, 82) * np.float32(m))
    return values


@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
def test_layout_is_the_documented_one(form: BlockFormat) -> None:
    raw = random_blocks(form, 4)
    for row, values in zip(raw, form.decode(torch.from_numpy(raw)).numpy(), strict=True):
        np.testing.assert_array_equal(values, np.array(by_hand(form, row.tobytes())))


@given(form=st.sampled_from(ALL), seed=st.integers(0, 10**6), exponent=st.integers(-2, 2), shift=st.floats(-0.2, 0.2))
@settings(max_examples=40, deadline=None)
def test_codes_survive_the_bits(form: BlockFormat, seed: int, exponent: int, shift: float) -> None:
    """Errors are those of the format at any magnitude and offset; a decoded block can be coded again."""
    weights = (gaussian(4, form.num_values, seed=seed) + shift) * 10.0**exponent
    once = form.decode(form.encode(weights))
    error = (once - weights).norm() / weights.norm()
    assert error < 1.3 * EXPECTED_ERROR[form.name]
    if form in FIELDS:  # every field is read back as it was chosen
        d, dmin, scales, offsets, codes = _quantize_offsets(weights, *FIELDS[form])
        assert torch.equal(once, _decode_offsets(d[:, None], dmin[:, None], scales, offsets, codes))
    else:
        again = form.decode(form.encode(once))
        assert (again - once).norm() <= 0.35 * (once - weights).norm() + 1e-6 * weights.norm()


@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
def test_error_on_gaussian_weights(form: BlockFormat) -> None:
    weights = gaussian(200, form.num_values)
    error = (form.decode(form.encode(weights)) - weights).norm() / weights.norm()
    assert 0.9 * EXPECTED_ERROR[form.name] < error < EXPECTED_ERROR[form.name]


@pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)
def test_zeros_stay_zeros(form: BlockFormat) -> None:
    assert (form.decode(form.encode(torch.zeros(3, form.num_values))) == 0).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("width", [32, 64, 128])
def test_a_narrow_row_is_coded_as_the_tiled_one(name: str, width: int) -> None:
    narrow = gaussian(2, 3, width)
    wide = narrow.repeat(1, 1, 512 // width)
    assert torch.equal(round_to_blocks(wide, name)[..., :width], round_to_blocks(narrow, name))


def test_rows_that_no_super_block_divides_take_another_format() -> None:
    assert format_of("q2_k", 1408) is IQ4_NL and format_of("q4_k", 1408) is Q5_0 and format_of("q8_0", 1408) is Q8_0
    assert format_of("q2_k", 2048) is Q2_K and format_of("q4_k", 6400) is Q4_K
    weights = gaussian(4, 1408)
    by_rows = [Q5_0.decode(Q5_0.encode(row.view(44, 32))).flatten() for row in weights]
    assert torch.equal(round_to_blocks(weights, "q4_k"), torch.stack(by_rows))


def test_what_blocks_cannot_hold_is_refused() -> None:
    with pytest.raises(SpecterError, match="rows of 48"):
        round_to_blocks(gaussian(4, 48), "q4_k")
    weights = gaussian(4, 64)
    weights[0, 0] = float("inf")
    with pytest.raises(SpecterError, match="infinity"):
        round_to_blocks(weights, "q8_0")
