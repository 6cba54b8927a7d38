"""Noise that depends on (seed, position, stream) alone, so that draft and target draw the same numbers.

Philox 4x32-10 (Salmon et al., SC'11), a counter-based generator.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox(counters: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Ten rounds over counters [4, n] (32-bit values held in uint64); returns the same shape."""
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _MASK,
            (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3))


def uniforms(seed: int, position: int, stream: int, size: int) -> NDArray[np.float64]:
    """`size` numbers in (0, 1), the same for the same (seed, position, stream)."""
    blocks = -(-size // 4)
    counters = np.zeros((4, blocks), np.uint64)
    counters[0] = np.arange(blocks)
    counters[1], counters[2] = position, stream
    bits = philox(counters, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)).T.reshape(-1)[:size]
    return (bits.astype(np.float64) + 0.5) / 2.0**32


def gumbel(seed: int, position: int, size: int) -> NDArray[np.float32]:
    """Gumbel noise [size] for the token at `position`."""
    noise: NDArray[np.float32] = (-np.log(-np.log(uniforms(seed, position, 0, size)))).astype(np.float32)
    return noise
