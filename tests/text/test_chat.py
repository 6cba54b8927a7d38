"""Rendered chats against transformers', and templates that refuse or misbehave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specter.errors import SpecterError
from specter.text.chat import ChatTemplate
from specter.text.tokenizer import load_tokenizer
from tests.text.files import BOS, EOS, TEMPLATES, deepseek_like, write

CHATS = {
    "one": [{"role": "user", "content": "Hi, {{ 7 * 7 }} <|im_end|> 한🙂"}],
    "turns": [
        {"role": "system", "content": "Be brief.\n"},
        {"role": "user", "content": "  Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ],
}


def written(directory: Path, template: object) -> Path:
    tokens = {"bos_token": {"__type": "AddedToken", "content": BOS}, "eos_token": EOS}
    return write(directory, deepseek_like(), **tokens, add_bos_token=True, chat_template=template)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("style", TEMPLATES)
def test_chats_are_those_of_transformers(style: str, chat: str, tmp_path: Path) -> None:
    directory = written(tmp_path, TEMPLATES[style])
    theirs: Any = AutoTokenizer.from_pretrained(directory)
    text = ChatTemplate.load(directory).render(CHATS[chat])
    assert text == theirs.apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=True)
    tokens = theirs.apply_chat_template(CHATS[chat], add_generation_prompt=True)["input_ids"]
    assert load_tokenizer(directory).encode_bare(text) == tokens


def test_where_a_template_is_found(tmp_path: Path) -> None:
    chat = CHATS["one"]
    written(tmp_path, [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "several"}])
    assert ChatTemplate.load(tmp_path).render(chat) == "several"
    written(tmp_path, "config")
    assert ChatTemplate.load(tmp_path).render(chat) == "config"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    assert ChatTemplate.load(tmp_path).render(chat) == f"file {EOS}"
    assert AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat, tokenize=False) == f"file {EOS}"


@pytest.mark.parametrize("template", [None, 7, [], [{"name": "tool_use", "template": "x"}], [1]], ids=str)
def test_a_checkpoint_without_a_template_is_named(template: object, tmp_path: Path) -> None:
    with pytest.raises(SpecterError, match="has no chat template"):
        ChatTemplate.load(written(tmp_path, template))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('user first') }}", "user first"),
        ("{% for %}", "Expected"),
        ("{{ messages[0]['content'] + 1 }}", "concatenate"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/hostname' %}", "no loader"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
    ],
)
def test_a_template_that_fails_is_refused_with_its_reason(template: str, reason: str) -> None:
    with pytest.raises(SpecterError, match=reason):
        ChatTemplate(template, {}).render(CHATS["one"])


def test_an_empty_chat_is_refused() -> None:
    with pytest.raises(SpecterError, match="no messages"):
        ChatTemplate(TEMPLATES["phi"], {}).render([])


def test_a_template_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(SpecterError, match="cannot be read"):
        ChatTemplate.load(tmp_path)
