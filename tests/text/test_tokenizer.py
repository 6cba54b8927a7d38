"""Token ids against transformers', for tokenizer files of several kinds; what is refused, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from harness.plan import compose
from specter.errors import SpecterError
from specter.prompts import encode, load_tokenizer, shipped_texts
from specter.text import tokenizer as text
from tests.text.files import BOS, END, EOS, STANDIN, TEXTS, USER, deepseek_like, llama_like, qwen_like, write

DEEPSEEK_BOS = {"__type": "AddedToken", "content": BOS, "normalized": True}
KINDS: dict[str, tuple[Callable[[], Backend], str, dict[str, Any]]] = {  # file, model_type, named tokens
    "deepseek": (deepseek_like, "deepseek_v2", {"bos_token": DEEPSEEK_BOS, "eos_token": EOS}),
    "llama": (llama_like, "phimoe", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "qwen": (qwen_like, "qwen2_moe", {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
}  # fmt: skip


def written(directory: Path, kind: str, **config: Any) -> Path:
    build, model_type, named = KINDS[kind]
    write(directory, build(), **named | config)
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory


def of_transformers(directory: Path, one: str, special: bool = True) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(directory)(one, add_special_tokens=special).input_ids
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    directory = written(tmp_path, kind)
    ours = text.load_tokenizer(directory)
    for one in TEXTS:
        assert ours.encode(one) == of_transformers(directory, one), one
        assert ours.encode_bare(one) == of_transformers(directory, one, special=False), one


@pytest.mark.parametrize(
    "config",
    [
        {"additional_special_tokens": [USER, END]},
        {"extra_special_tokens": [USER, END]},
        {"pad_token": "<pad>"},
        {
            "added_tokens_decoder": {
                "8195": {"content": END, "rstrip": True, "special": True},
                "8194": {"content": USER, "special": False, "normalized": False},
            }
        },
        {"split_special_tokens": True},
    ],
    ids=lambda config: next(iter(config)),
)
def test_tokens_that_only_the_configuration_names_are_those_of_transformers(
    config: dict[str, Any], tmp_path: Path
) -> None:
    directory = written(tmp_path, "deepseek", **config)
    ours = text.load_tokenizer(directory)
    for one in (*TEXTS, f"a {END}  b", "<pad> x"):
        assert ours.encode(one) == of_transformers(directory, one), one


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend"])
def test_bos_is_added_where_the_configuration_demands_it_and_the_post_processor_lacks_it(
    tokenizer_class: str, tmp_path: Path
) -> None:
    """transformers 4 adds it for Llama classes; the pinned version drops add_bos_token (decision 0017)."""
    directory = written(tmp_path, "deepseek", add_bos_token=True, tokenizer_class=tokenizer_class)
    ours = text.load_tokenizer(directory)
    bos = ours.encode_bare(BOS)
    for one in TEXTS:
        assert ours.encode(one) == bos + of_transformers(directory, one), one
        assert ours.encode_bare(one) == of_transformers(directory, one, special=False), one


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}], ids=str)
def test_bos_of_the_post_processor_comes_once(config: dict[str, bool], tmp_path: Path) -> None:
    directory = written(tmp_path, "llama", **config)
    ours = text.load_tokenizer(directory)
    for one in TEXTS:
        assert ours.encode(one) == of_transformers(directory, one) == [1, *ours.encode_bare(one)]


@pytest.mark.parametrize("config", [{}, {"add_bos_token": False}, {"add_bos_token": True, "bos_token": None}], ids=str)
def test_no_bos_without_a_demand(config: dict[str, Any], tmp_path: Path) -> None:
    ours = text.load_tokenizer(written(tmp_path, "deepseek", **config))
    assert ours.encode("Hello") == ours.encode_bare("Hello")


def test_stored_truncation_and_padding_are_not_applied(tmp_path: Path) -> None:
    stored = qwen_like()
    stored.enable_truncation(3)
    stored.enable_padding(length=200)
    directory = write(tmp_path, stored, eos_token="<|im_end|>")
    for one in TEXTS:
        assert (
            text.load_tokenizer(directory).encode(one) == qwen_like().encode(one).ids == of_transformers(directory, one)
        )


def test_an_id_beyond_the_models_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    directory = written(tmp_path, "qwen")
    ours = text.load_tokenizer(directory, vocab=8194)  # the stand-ins' 8,192 and two of three special ones
    assert ours.encode("a<|im_start|>")[-1] == 8193
    for encoder in (ours.encode, ours.encode_bare):
        with pytest.raises(SpecterError, match=r"'<\|im_end\|>', whose id 8194 is beyond .* of 8194"):
            encoder("a<|im_start|><|im_end|>")


def test_a_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(SpecterError, match="not Unicode"):
        text.load_tokenizer(STANDIN).encode("a\ud800")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "not a tokenizer"),
        ("tokenizer.json", None, "not a tokenizer"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("tokenizer_config.json", "[]", "not an object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "damaged"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {"no": 1}}}', "damaged"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "damaged"),
        ("tokenizer_config.json", '{"additional_special_tokens": 1}', "damaged"),
        ("tokenizer_config.json", '{"bos_token": {"no": 1}}', "damaged"),
    ],
)
def test_damaged_files_are_refused(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    written(tmp_path, "qwen")
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SpecterError, match=message):
        text.load_tokenizer(tmp_path)


def test_eos_ids_are_those_of_both_files(tmp_path: Path) -> None:
    assert text.eos_ids(tmp_path) == frozenset()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert text.eos_ids(tmp_path) == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 8]}')
    assert text.eos_ids(tmp_path) == {7, 8, 9}
    for wrong in ('"7"', "true", "[1.5]", "-1"):
        (tmp_path / "config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(SpecterError, match="eos_token_id is"):
            text.eos_ids(tmp_path)


def test_prompts_of_experiments_have_the_ids_of_the_shipped_file() -> None:
    config = compose(["prompt_tokens=0"])
    theirs, ours = Backend.from_file(config.model.tokenizer), load_tokenizer(config)
    texts = [one for path in sorted(Path("data/prompts").glob("*.jsonl")) for one in shipped_texts(path)]
    assert len(texts) > 20 and [encode(ours, one, config) for one in texts] == [theirs.encode(one).ids for one in texts]
