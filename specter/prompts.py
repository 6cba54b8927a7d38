"""Prompts: from the command line, a shipped JSONL file or a hub data set."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

from specter.config import DatasetConfig, RunConfig
from specter.errors import SpecterError
from specter.models.hub_config import read_spec
from specter.text import tokenizer as text_tokenizer
from specter.text.tokenizer import Tokenizer

MIN_HUB_CHARS = 80  # skips headings and empty lines of hub data sets
WARMUP_PATH = Path("data/prompts/warmup.txt")


def prompt_text(config: RunConfig) -> str:
    """The text that this run continues.
    Raises SpecterError: no such input, an unreadable file, or a hub data set that cannot be loaded."""
    if config.prompt is not None:
        return config.prompt
    dataset, index = config.dataset, config.input
    if dataset.source == "shipped":
        texts = shipped_texts(Path(dataset.path))
        if index >= len(texts):
            raise SpecterError(
                f"input={index} but {dataset.name} has {len(texts)} inputs", f"use input between 0 and {len(texts) - 1}"
            )
        text = texts[index]
    elif found := _hub_texts(dataset, index, 1):
        text = found[0]
    else:
        raise SpecterError(f"{dataset.name} has no input {index}", "use a smaller input")
    if not text.strip():
        raise SpecterError(f"input {index} of {dataset.name} is empty", "choose another input")
    return text


def read_text(path: Path | None) -> str:
    """A text file, or standard input. Raises SpecterError: it cannot be read, or is not UTF-8."""
    name = "standard input" if path is None else str(path)
    try:
        return (sys.stdin.buffer.read() if path is None else path.read_bytes()).decode("utf-8")
    except OSError as error:
        raise SpecterError(f"{name} cannot be read: {error.strerror}", "give a text file") from None
    except UnicodeDecodeError as error:
        raise SpecterError(f"{name} is not UTF-8: {error.reason} at byte {error.start}", "save it as UTF-8") from None


def load_tokenizer(config: RunConfig) -> Tokenizer:
    """The model's tokenizer. Raises SpecterError for a missing or damaged file."""
    return text_tokenizer.load_tokenizer(Path(config.model.tokenizer), read_spec(Path(config.model.checkpoint)).vocab)


def warmup_text() -> str:
    """The text that warms the expert cache before every input."""
    if not WARMUP_PATH.is_file():
        raise SpecterError(f"no warm-up text at {WARMUP_PATH}", "run from the root of the repository")
    return WARMUP_PATH.read_text()


def encode(tokenizer: Tokenizer, text: str, config: RunConfig) -> list[int]:
    """Token ids of a prompt, cut to its first `prompt_tokens`."""
    ids = tokenizer.encode(text)
    return ids[: config.prompt_tokens] if config.prompt_tokens else ids


def shipped_texts(path: Path) -> list[str]:
    """All texts of a JSONL file with one {"id", "text"} object per line."""
    if not path.is_file():
        raise SpecterError(f"no prompts at {path}", "run from the root of the repository, or correct dataset.path")
    texts = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise SpecterError(f"{path} is not UTF-8: {error}", "save it as UTF-8") from None
    for number, line in enumerate(lines, start=1):
        try:
            texts.append(str(json.loads(line)["text"]))
        except (json.JSONDecodeError, KeyError, TypeError):
            raise SpecterError(f"{path}:{number} is not a prompt", 'write {"id": ..., "text": ...} lines') from None
    return texts


def first_texts(dataset: DatasetConfig, num: int) -> list[str]:
    """At most the first `num` texts of a data set. Raises SpecterError as `prompt_text` does."""
    if dataset.source == "shipped":
        return shipped_texts(Path(dataset.path))[:num]
    return _hub_texts(dataset, 0, num)


def _hub_texts(dataset: DatasetConfig, start: int, num: int) -> list[str]:
    if dataset.hub_id is None or dataset.split is None or dataset.column is None:
        raise SpecterError(f"{dataset.name} names no hub_id, split and column", "see conf/dataset/hub_gsm8k.yaml")
    from datasets import load_dataset  # slow to import; only needed for hub data sets

    try:
        rows = load_dataset(dataset.hub_id, dataset.hub_config, split=dataset.split, streaming=True)
        texts = (str(row[dataset.column]) for row in rows)
        long_enough = (text for text in texts if len(text) >= MIN_HUB_CHARS)
        return list(itertools.islice(long_enough, start, start + num))
    except Exception as error:  # the library raises a dozen types: network, gate, missing split
        raise SpecterError(
            f"data set {dataset.hub_id} cannot be loaded: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
            "check the network; a gated set needs its terms accepted on the hub and `hf auth login`; "
            "without a network use a shipped data set (dataset=gsm8k)",
        ) from None
