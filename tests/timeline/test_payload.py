"""Slots of one size for blobs of many: the most of them, and every byte counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specter.timeline.payload import ALIGN_BYTES, STRADDLE_BYTES, Blobs, Slots

SIZES = st.lists(st.integers(1, 2000).map(lambda n: n * ALIGN_BYTES), min_size=1, max_size=40)


def tails(sizes: list[int], slot_bytes: int) -> int:
    return sum(size - slot_bytes + STRADDLE_BYTES for size in sizes if size > slot_bytes)


@given(SIZES, st.integers(0, 3_000_000))
def test_slots_and_tails_stay_within_the_bytes_given(sizes: list[int], num_bytes: int) -> None:
    slots = Blobs(sizes).in_bytes(num_bytes)
    assert slots.num == 0 or slots.total_bytes <= num_bytes
    assert slots.num <= len(sizes) and slots.tail_bytes == tails(sizes, slots.num_bytes)


@given(SIZES, st.integers(0, 3_000_000))
def test_no_other_size_of_slot_gives_more_of_them(sizes: list[int], num_bytes: int) -> None:
    found = Blobs(sizes).in_bytes(num_bytes)
    for size in sizes:
        assert found.num >= min((num_bytes - tails(sizes, size)) // size, len(sizes))


@given(SIZES)
def test_one_copy_and_the_tail_are_the_blob(sizes: list[int]) -> None:
    blobs = Blobs(sizes)
    slots = blobs.for_experts(len(sizes))
    copies = blobs.link_bytes(slots.num_bytes)
    assert all(copy == min(size, slots.num_bytes) for copy, size in zip(copies, sizes, strict=True))
    assert slots.total_bytes <= Slots(len(sizes), max(sizes)).total_bytes


def test_a_long_tail_does_not_size_the_slots() -> None:
    """90 blobs of 1 MB and 10 of 2 MB: slots of 1 MB, and 10 MB of tails."""
    sizes = [1 << 20] * 90 + [2 << 20] * 10
    slots = Blobs(sizes).in_bytes(60 << 20)
    assert (slots.num, slots.num_bytes, slots.tail_bytes) == (49, 1 << 20, 10 * ((1 << 20) + STRADDLE_BYTES))
