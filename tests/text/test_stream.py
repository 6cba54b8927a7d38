"""Text while it is committed: complete characters, nothing twice, cut before stop strings, whatever the rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from specter.text.stream import TextStream
from specter.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.files import STANDIN, TEXTS, deepseek_like, llama_like, qwen_like

STORY = "Grüße! 한국어 👩\u200d💻 — 1_000 “quotes”\n\n  indented;  e\u0301 " * 2
KINDS: dict[str, Callable[[], Backend]] = {"deepseek": deepseek_like, "llama": llama_like, "qwen": qwen_like}
BROKEN = "\N{REPLACEMENT CHARACTER}"
standin, bytes_only, fallback = load_tokenizer(STANDIN), Tokenizer(deepseek_like()), Tokenizer(llama_like())


def rounds(ids: list[int], seed: int = 0) -> Iterator[list[int]]:
    """The tokens in commits of 1 to 5."""
    choose, left = random.Random(seed), list(ids)
    while left:
        size = choose.randint(1, 5)
        yield left[:size]
        left = left[size:]


def streamed(stream: TextStream, ids: list[int], seed: int = 0) -> str:
    return "".join([*(stream.add(tokens) for tokens in rounds(ids, seed)), stream.finish()])


@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_are_the_text(kind: str) -> None:
    tokenizer = Tokenizer(KINDS[kind]())
    for text in (*TEXTS, STORY):
        ids = tokenizer.encode(text)
        assert streamed(TextStream(tokenizer), ids) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_goes_on_behind_its_prompt(kind: str) -> None:
    """The decoder of a Llama-like file strips a space at the beginning of a text, and here alone."""
    tokenizer = Tokenizer(KINDS[kind]())
    ids = tokenizer.encode(STORY)
    for cut in range(len(ids)):
        whole, prompt = tokenizer.decode(ids), tokenizer.decode(ids[:cut])
        text = streamed(TextStream(tokenizer, ids[:cut]), ids[cut:], seed=cut)
        assert whole.endswith(text)
        before = whole.removesuffix(text)
        assert before.startswith(prompt.rstrip(BROKEN)) if BROKEN in prompt else before == prompt


@pytest.mark.parametrize("kind", KINDS)
def test_no_piece_has_a_broken_character(kind: str) -> None:
    tokenizer = Tokenizer(KINDS[kind]())
    stream = TextStream(tokenizer)
    assert all(BROKEN not in stream.add([token]) for token in tokenizer.encode(STORY))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_those_of_the_librarys_stream(kind: str) -> None:
    """`DecodeStream` has no end, so that a partial character is lost; and it raises where a byte token changes the
    character before it."""
    tokenizer = Tokenizer(KINDS[kind]())
    stream, theirs = TextStream(tokenizer), DecodeStream(skip_special_tokens=True)
    for token in tokenizer.encode(STORY):
        assert stream.add([token]) == (theirs.step(tokenizer.backend, token) or "")


@given(ids=st.lists(st.integers(0, 8194), max_size=60), seed=st.integers(0, 9))
def test_any_tokens_stream_to_their_text(ids: list[int], seed: int) -> None:
    """Of a byte-level file: bytes that are no UTF-8, special tokens and ids without a token."""
    assert streamed(TextStream(bytes_only), ids, seed) == bytes_only.decode(ids)


@given(ids=st.lists(st.integers(0, 400), max_size=60))
def test_any_bytes_of_a_byte_fallback_end_without_an_error(ids: list[int]) -> None:
    """Text that was given away stays, though a later byte makes the decoder replace it."""
    whole, text = fallback.decode(ids), streamed(TextStream(fallback), ids)
    assert text == whole or BROKEN in whole


def test_a_text_that_never_becomes_utf8_is_given_away() -> None:
    byte = standin.encode_bare("é")[0]  # 0xC3: begins a character of two bytes
    assert standin.decode([byte]) == BROKEN
    stream = TextStream(standin)
    assert sum(len(stream.add([byte])) for _ in range(100)) > 80


def test_an_incomplete_character_comes_at_the_end() -> None:
    ids = standin.encode("a🙂")[:-1]
    stream = TextStream(standin)
    assert stream.add(ids) == "a"
    assert stream.finish() == BROKEN
    assert stream.finish() == ""


# -- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_a_stop_string_ends_the_text_whatever_the_rounds(seed: int) -> None:
    ids = standin.encode("one two\n\nUser: three\n\nUser: four")
    stream = TextStream(standin, stops=["\n\nUser:", "four"])
    assert streamed(stream, ids, seed) == "one two"
    assert stream.stop_reason == "stop"
    assert standin.decode(ids[: stream.num_tokens]).endswith("\n\nUser:")  # not a token further
    assert stream.add(ids) == "" and stream.finish() == ""


def test_the_beginning_of_a_stop_string_is_held_until_it_is_decided() -> None:
    stream = TextStream(standin, stops=["abcd", "bcx"])
    pieces = [stream.add(standin.encode_bare(character)) for character in "zabce"]
    assert pieces == ["z", "", "", "", "abce"]
    assert stream.stop_reason is None


def test_what_is_held_comes_at_the_end() -> None:
    stream = TextStream(standin, stops=["\n\nUser"])
    assert stream.add(standin.encode_bare("yes\n\nUse")) == "yes"
    assert stream.finish() == "\n\nUse" and stream.stop_reason is None


def test_the_earliest_stop_string_wins() -> None:
    stream = TextStream(standin, stops=["c", "bc", ""])
    assert streamed(stream, standin.encode_bare("abcd")) == "a"


@given(text=st.text("ab\né", max_size=30), stops=st.lists(st.text("ab\né", min_size=1, max_size=3), max_size=3))
def test_stop_strings_cut_as_in_the_whole_text(text: str, stops: list[str]) -> None:
    """At the first token with which one of them is complete."""
    ids = standin.encode_bare(text)
    stream = TextStream(standin, stops=stops)
    found = streamed(stream, ids)
    seen = standin.decode(ids[: stream.num_tokens])
    ends = [seen.find(stop) for stop in stops if stop in seen]
    assert found == (seen[: min(ends)] if ends else text)
    assert (stream.stop_reason == "stop") == bool(ends)
    assert not any(stop in found for stop in stops)


def test_eos_ends_the_text_and_is_not_in_it() -> None:
    ids = standin.encode_bare("Hello, world")
    stream = TextStream(standin, eos=[ids[2]])
    assert streamed(stream, ids) == standin.decode(ids[:2])
    assert stream.stop_reason == "eos" and stream.num_tokens == 3


def test_eos_gives_away_what_is_held() -> None:
    ids = [*standin.encode_bare("yes\n"), 0]
    stream = TextStream(standin, stops=["\n\n"], eos=[0])
    assert stream.add(ids) == "yes" and stream.finish() == "\n"
