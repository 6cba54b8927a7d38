"""Corpus building: reading, de-duplication, the split, and the tokenizer's round trip."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from tokenizers import Tokenizer

from specter.arguments import parse_arguments, run_command
from specter.errors import SpecterError
from specter.quantize.calibration import TOKENIZER
from tools.standin.corpus import Deduplicator, is_validation, load_tokens, tokenize, train_tokenizer
from tools.standin.sources import Source, is_english, read_source, strip_markup
from tools.standin.train import Options, run

SENTENCE = "It is the first of the lines that a reader of this page will see, and it is in English. "


@settings(deadline=None, max_examples=80)
@given(text=st.text(max_size=60))
def test_every_text_survives_the_shipped_tokenizer(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    first, *ids = tokenizer.encode(text).ids
    assert first == 0
    if "<s>" not in text:
        assert tokenizer.decode(ids) == text
        assert 0 not in ids


def test_shipped_tokenizer_has_the_model_vocabulary_and_single_digits() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    assert tokenizer.get_vocab_size() == 8192 and tokenizer.token_to_id("<s>") == 0
    assert tokenizer.encode("1234").tokens == ["<s>", "1", "2", "3", "4"]


def test_documents_are_separated_by_id_0() -> None:
    tokenizer = train_tokenizer([SENTENCE * 3, "def f(x):\n    return x\n" * 20], vocab=300)
    ids = tokenize(tokenizer, ["ab", "abc"])
    assert ids.dtype == np.uint16
    assert ids.tolist() == tokenizer.encode("ab").ids + tokenizer.encode("abc").ids
    assert ids.tolist().count(0) == 2


def test_repeated_documents_and_paragraphs_go() -> None:
    unique = Deduplicator()
    first, second = SENTENCE * 8, SENTENCE.replace("reader", "writer") * 8
    assert unique(first) == first.strip()
    assert unique(first) is None
    assert unique(f"{first}\n\n{second}") == second.strip()
    assert unique("short") is None


def test_split_is_fixed_and_small() -> None:
    held_out = sum(is_validation(f"document {number}") for number in range(5000))
    assert 60 < held_out < 140
    assert is_validation("document 1") == is_validation("document 1")


def test_markup_and_foreign_pages_go(tmp_path: Path) -> None:
    page = f"<html><head><title>x</title></head><body><p>{SENTENCE * 8}</p><script>no()</script>a &lt; b</body></html>"
    assert strip_markup(page).endswith("a < b") and "no()" not in strip_markup(page)
    assert is_english(SENTENCE * 8) and not is_english("Ceci n'est pas une page en anglais, mais en bon français. " * 9)
    (tmp_path / "a.html").write_text(page)
    (tmp_path / "b.html").write_text("Dies ist eine deutsche Seite und gehört nicht hinein. " * 30)
    assert len(list(read_source(Source("p", "*.html", "html"), tmp_path))) == 1


def test_compressed_files_and_the_limit(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.rst.gz").write_bytes(gzip.compress((name * 500).encode()))
    documents = list(read_source(Source("p", "*.rst.gz", max_chars=1100), tmp_path))
    assert [text[0] for text in documents] == ["a", "b"]
    with pytest.raises(SpecterError, match="no file matches"):
        list(read_source(Source("p", "*.pod"), tmp_path))


def test_tokens_file_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "tokens.safetensors.xz"
    with pytest.raises(SpecterError, match="no training tokens"):
        load_tokens(path)
    path.write_bytes(b"not xz")
    with pytest.raises(SpecterError, match="cannot be read"):
        load_tokens(path)
    path.write_bytes(lzma.compress(save({"train": np.arange(5, dtype=np.uint16), "valid": np.zeros(2, np.uint16)})))
    assert load_tokens(path)["train"].tolist() == [0, 1, 2, 3, 4]


def test_options() -> None:
    options = parse_arguments(Options, ["model=deepseek_v2_lite", "seconds=5", "batch=3"])
    assert (options.seconds, options.batch) == (5.0, 3)
    for bad in ("modle=x", "batch=many", "model=gpt", "seconds"):
        with pytest.raises(SystemExit, match="2"):
            run_command(run, Options, [bad])
