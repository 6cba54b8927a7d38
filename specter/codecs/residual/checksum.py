"""A 64-bit checksum of 32-bit words that is computed where the words lie, on a CPU or a GPU.

checksum(w) = sum over i of w_i * m_i modulo 2^64, with odd pseudo-random m_i. A change within one word changes the sum
for certain, because an odd number times a difference below 2^64 is not 0. Any other damage goes unseen with a
probability of about 2^-32. It guards against damage, not against forgery.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

_CHUNK = 1 << 18  # words that share one table of multipliers; part of the format


def checksum(words: Tensor) -> Tensor:
    """int64 [...] of words int32 [..., n]."""
    total = torch.zeros(words.shape[:-1], dtype=torch.int64, device=words.device)
    inner = _multipliers(_CHUNK, 1, words.device)
    outer = _multipliers(-(-words.shape[-1] // _CHUNK), 2, words.device)
    for number, part in enumerate(words.split(_CHUNK, -1)):
        total += (part.long() * inner[: part.shape[-1]]).sum(-1) * outer[number]
    return total


def combined(parts: Sequence[Tensor]) -> Tensor:
    """One checksum of several, int64 [...] each; their order counts."""
    factors = _multipliers(len(parts), 3, parts[0].device)
    return torch.stack([part * factor for part, factor in zip(parts, factors, strict=True)]).sum(0)


@cache
def _multipliers(count: int, seed: int, device: torch.device) -> Tensor:
    """Odd numbers, int64 [count]: splitmix64 of (seed, index)."""
    with np.errstate(over="ignore"):
        x = (np.arange(count, dtype=np.uint64) + np.uint64(seed << 40)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64)).to(device)
