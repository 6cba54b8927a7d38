"""Any text is a prompt, on every command line; nothing in it is read as syntax."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from harness.plan import compose
from specter.config import to_yaml
from specter.errors import SpecterError
from specter.results import read_config
from specter.run import check_overrides, take_prompt

TEXTS = [
    "Hello!", "It's fine", "a#b", "f(x)", "x=3?", "<|user|>hi<|end|>", "Hello, world", "true", "1e3", "1_000", "null",
    "${k}", "  leading spaces", "two\nlines", "an emoji 🙂 and 한국어", '"quoted"', "'single'", "{a: b}", "[1, 2]",
    "\\${k}", "%env", "~", "a: b", "-m", "\ttab",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_is_its_text(text: str, tmp_path: Path) -> None:
    rest, prompt = take_prompt(["k=8", f"prompt={text}", "-m"])
    assert (rest, prompt) == (["k=8", "-m"], text)
    (tmp_path / "prompt.txt").write_text(text)
    assert take_prompt([f"prompt_file={tmp_path / 'prompt.txt'}"]) == ([], text)


@pytest.mark.parametrize("text", TEXTS)
def test_a_written_run_keeps_its_prompt(text: str, tmp_path: Path) -> None:
    config = dataclasses.replace(compose([]), prompt=text)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_config(tmp_path) == config


def test_no_prompt_leaves_the_data_set() -> None:
    assert take_prompt(["k=8"]) == (["k=8"], None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prompt=a", "prompt=b"], "several prompts"),
        (["prompt=a", "prompt_file=b"], "several prompts"),
        (["prompt= "], "prompt is empty"),
        (["prompt_file=/nowhere/at-all"], "cannot be read"),
    ],
)
def test_a_prompt_that_is_none_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(SpecterError, match=message):
        take_prompt(arguments)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"abc\xff\xfe")
    with pytest.raises(SpecterError, match="not UTF-8.*byte 3"):
        take_prompt([f"prompt_file={tmp_path / 'bytes'}"])


@pytest.mark.parametrize("argument", ["budget={high", "dataset.name=It's", "system=a b[", "k=$(x"])
def test_what_hydra_cannot_parse_is_named_with_a_remedy(argument: str) -> None:
    with pytest.raises(SpecterError, match="is not understood") as caught:
        check_overrides(["k=8", argument, "-m"])
    assert repr(argument) in str(caught.value) and "key=value" in caught.value.remedy


def test_the_command_reads_standard_input_as_it_is() -> None:
    """Ends before a model is loaded: the KV cache is too short for the text, whose length the message states."""
    command = [sys.executable, "-m", "specter.run", "prompt_file=-", "prompt_tokens=0", "max_new_tokens=250"]
    text = "${k} It's, null {" * 20
    done = subprocess.run(
        [*command, "system=lru"], input=text, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert "exceed kv_capacity=256" in done.stderr and "Traceback" not in done.stderr
