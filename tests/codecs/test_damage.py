"""Damage anywhere is refused by name before a weight is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specter.codecs.residual.decode import check_blob, check_layer, decode
from specter.codecs.residual.encode import finish
from specter.codecs.residual.layout import CHECKSUM_WORDS, Header, Kind
from specter.codecs.residual.resident import ResidentCodes, layout_of
from specter.codecs.residual.sizes import ENTRY_WORDS, HEADER_WORDS
from specter.errors import SpecterError
from tests.codecs.experts import NEAREST, TWO_SIDED, make_layer

NAME = "MoE layer 3, expert 5"
LAYER = make_layer("student", [(6, 1024), (4, 1408)], 2, noise=0.005, moved=0.1)
BLOBS = LAYER.encode(TWO_SIDED).blobs
RAW = make_layer("bits", [(2, 64), (2, 64)], 1, 64)


def flipped(words: Tensor, bit: int) -> Tensor:
    """A copy with one bit changed."""
    copy = words.clone()
    copy.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    return copy


def assert_refused(blob: Tensor, codes: Sequence[ResidentCodes], match: str = "") -> None:
    with pytest.raises(SpecterError, match=NAME) as caught:
        decode(blob, codes, NAME)
    assert match in str(caught.value)


def test_whole_blobs_pass() -> None:
    for expert, blob in enumerate(BLOBS):
        assert check_blob(blob, LAYER.codes_of(expert), NAME).num_patches > 0


def test_a_layer_is_checked_at_once() -> None:
    names = ["first", "second"]
    assert check_layer(BLOBS, LAYER.codes, names) == [Header.unpack(blob, NAME) for blob in BLOBS]
    for blobs, name in ((BLOBS[::-1], "first"), ([BLOBS[0], flipped(BLOBS[1], 9999)], "second")):
        with pytest.raises(SpecterError, match=name):
            check_layer(blobs, LAYER.codes, names)


def test_every_bit_of_the_header() -> None:
    for bit in range(32 * HEADER_WORDS):
        assert_refused(flipped(BLOBS[0], bit), LAYER.codes_of(0))


@given(bit=st.integers(32 * HEADER_WORDS, 32 * len(BLOBS[0]) - 1))
@settings(max_examples=300, deadline=None)
def test_a_bit_of_table_stream_or_patches(bit: int) -> None:
    assert_refused(flipped(BLOBS[0], bit), LAYER.codes_of(0), "checksum")


def test_every_bit_of_a_small_blob() -> None:
    layer = make_layer("gauss", [(1, 512), (1, 512)], 1, noise=0.01)
    blob = layer.encode(NEAREST).blobs[0]
    assert check_blob(blob, layer.codes_of(0), NAME).kind is Kind.RESIDUAL
    for bit in range(32 * len(blob)):
        with pytest.raises(SpecterError, match=NAME):
            check_blob(flipped(blob, bit), layer.codes_of(0), NAME)


@given(bit=st.integers(0, 10**6), part=st.integers(0, 1), of_params=st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_bit_of_codes_or_scales(bit: int, part: int, of_params: bool) -> None:
    codes = LAYER.codes_of(0)
    words, params = codes[part].words, codes[part].params
    if of_params:
        codes[part] = ResidentCodes(words, flipped(params, bit % (32 * params.numel())))
    else:
        codes[part] = ResidentCodes(flipped(words, bit % (32 * words.numel())), params)
    assert_refused(BLOBS[0], codes, "other INT4 codes")


@given(bit=st.integers(0, 32 * len(RAW.encode().blobs[0]) - 1))
@settings(max_examples=50, deadline=None)
def test_a_bit_of_a_raw_blob(bit: int) -> None:
    assert_refused(flipped(RAW.encode().blobs[0], bit), RAW.codes_of(0))


def test_another_experts_blob() -> None:
    assert_refused(BLOBS[1], LAYER.codes_of(0), "other INT4 codes")


def test_another_models_blob() -> None:
    assert_refused(make_layer(shapes=[(6, 1408), (4, 1024)]).encode().blobs[0], LAYER.codes_of(0), "other shapes")


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 200, -1])
def test_truncated_blobs(length: int) -> None:
    assert_refused(BLOBS[0][:length], LAYER.codes_of(0))


def test_blobs_of_another_type() -> None:
    assert_refused(BLOBS[0].view(torch.uint8), LAYER.codes_of(0), "no blob")
    assert_refused(BLOBS[0].view(1, -1), LAYER.codes_of(0), "no blob")


def test_another_version() -> None:
    blob = BLOBS[0].clone()
    blob[1] += 1
    assert_refused(blob, LAYER.codes_of(0), "version 2")


# -- blobs whose checksum is right: written by another program, wrongly ---------------------------


def rewritten(change: Callable[[Tensor], None], **fields: int) -> Tensor:
    """BLOBS[0] with other content and a checksum that fits."""
    blob = BLOBS[0].clone()
    change(blob)
    header = replace(Header.unpack(BLOBS[0], NAME), **fields)  # type: ignore[arg-type]
    whole = finish(header, blob[HEADER_WORDS:])
    assert fields or not torch.equal(whole[CHECKSUM_WORDS], BLOBS[0][CHECKSUM_WORDS])
    return whole


LAYOUT = layout_of(LAYER.codes)
HEADER = Header.unpack(BLOBS[0], NAME)
STREAM_WORDS = HEADER.patch_offset - LAYOUT.stream_offset - 4


def add(index: int, value: int) -> Callable[[Tensor], None]:
    def change(blob: Tensor) -> None:
        blob[index] += value

    return change


def swap_patches(blob: Tensor) -> None:
    at = slice(HEADER.patch_offset, HEADER.patch_offset + 2)
    blob[at] = blob[at].flip(0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (add(HEADER_WORDS, 1), "table"),  # the first stream does not begin at 0
        (add(HEADER_WORDS + ENTRY_WORDS, -1), "segments"),  # a block's start
        (add(HEADER_WORDS + ENTRY_WORDS * LAYOUT.num_blocks, 1), "table"),  # the streams' end
        (add(HEADER_WORDS + 1, 1), "table"),  # the first patch
        (add(HEADER_WORDS + ENTRY_WORDS * LAYOUT.num_blocks + 1, -1), "table"),  # the last one
        (add(HEADER_WORDS + 3, 1), "segments"),  # a segment's offset
        (add(LAYOUT.stream_offset - 1, 1), "table"),  # padding
        (add(HEADER.patch_offset - 1, 1), "runs into"),  # guard
        (add(HEADER.patch_offset, 0x2000 << 16), "patches out of order"),  # outside the block
        (swap_patches, "patches out of order"),
        (add(-1, 1), "another size"),  # the last padding
    ],
)
def test_wrong_content_with_a_right_checksum(change: Callable[[Tensor], None], match: str) -> None:
    assert_refused(rewritten(change), LAYER.codes_of(0), match)


@pytest.mark.parametrize(
    "fields", [{"patch_offset": HEADER.patch_offset + 16}, {"num_patches": HEADER.num_patches + 1}, {"kind": 1}]
)
def test_wrong_headers_with_a_right_checksum(fields: dict[str, int]) -> None:
    assert_refused(rewritten(lambda blob: None, **fields), LAYER.codes_of(0))


def test_words_between_stream_and_patches() -> None:
    """The last block must end in the last word of the streams."""
    blob = torch.cat([BLOBS[0][: HEADER.patch_offset], torch.zeros(16).int(), BLOBS[0][HEADER.patch_offset :]])
    blob[HEADER_WORDS + ENTRY_WORDS * LAYOUT.num_blocks] += 16
    header = replace(HEADER, patch_offset=HEADER.patch_offset + 16, num_words=len(blob))
    assert_refused(finish(header, blob[HEADER_WORDS:]), LAYER.codes_of(0), "segments")


def test_words_behind_the_patches() -> None:
    blob = torch.cat([BLOBS[0], torch.zeros(16).int()])
    header = replace(HEADER, num_words=len(blob))
    assert_refused(finish(header, blob[HEADER_WORDS:]), LAYER.codes_of(0), "another size")


def test_patches_of_the_next_block() -> None:
    """A position beyond its own block, where the next block has a weight and no patch."""
    layer = make_layer("gauss", [(32, 512), (1, 512)], 1)
    layer.weights[0][0, 0, 0] = 1e30
    blob, codes = layer.encode(NEAREST).blobs[0], layer.codes_of(0)
    header = check_blob(blob, codes, NAME)
    assert header.num_patches == 1
    blob[header.patch_offset] += 0x2000 << 16
    assert_refused(finish(header, blob[HEADER_WORDS:]), codes, "outside their block")


@given(word=st.integers(0, STREAM_WORDS - 1), bit=st.integers(0, 31))
@settings(max_examples=60, deadline=None)
def test_a_wrong_stream_never_crashes(word: int, bit: int) -> None:
    """With a right checksum a stream may decode to other weights, but is decoded or refused by name."""
    blob = flipped(BLOBS[0], 32 * (LAYOUT.stream_offset + word) + bit)
    blob = finish(HEADER, blob[HEADER_WORDS:])
    assert refusal(blob) is None or NAME in str(refusal(blob))


def refusal(blob: Tensor) -> SpecterError | None:
    try:
        decode(blob, LAYER.codes_of(0), NAME)
    except SpecterError as error:
        return error
    return None
