"""Sizes of blobs, in 32-bit words (see `layout`). Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

SEGMENT = 512  # weights
BLOCK_SEGMENTS = 16
BLOCK = SEGMENT * BLOCK_SEGMENTS
HEADER_WORDS = 16
ENTRY_WORDS = 2 + BLOCK_SEGMENTS // 2  # of the table
GUARD_WORDS = 4
ALIGN_WORDS = 16


def aligned(num_words: int) -> int:
    return math.ceil(num_words / ALIGN_WORDS) * ALIGN_WORDS


def stream_offset(num_weights: Sequence[int]) -> int:
    """The first word of the streams of an expert whose matrices have these numbers of weights."""
    num_blocks = sum(math.ceil(num / BLOCK) for num in num_weights)
    return aligned(HEADER_WORDS + ENTRY_WORDS * num_blocks + 2)


def blob_words(num_weights: Sequence[int], stream_words: int, num_patches: int) -> int:
    """Words of a residual blob."""
    return aligned(stream_offset(num_weights) + stream_words + GUARD_WORDS + num_patches)


def raw_words(num_weights: Sequence[int]) -> int:
    """Words of a raw blob; no blob is larger."""
    return aligned(HEADER_WORDS + sum(num_weights) // 2)
