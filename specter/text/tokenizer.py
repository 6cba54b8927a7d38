"""The tokenizer of a checkpoint: tokenizer.json, with what tokenizer_config.json adds to it (docs/decisions/0018)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from specter.errors import SpecterError
from specter.files import read_object

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_REMEDY = "use the file that came with the checkpoint"


class Tokenizer:
    """Texts to token ids and back. The only encoder of texts: nothing is cut or padded.

    Args:
        backend: without truncation and padding.
        bos: put before every text; None where the backend's post-processor adds it, or nothing does.
        vocab: of the model; None if unknown.
    """

    def __init__(self, backend: tokenizers.Tokenizer, bos: int | None = None, vocab: int | None = None) -> None:
        self.backend = backend
        self._bos = [] if bos is None else [bos]
        self._vocab = vocab

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens around it that the checkpoint demands.

        Raises:
            SpecterError: a token that the model does not have, by name, or a text that is not Unicode.
        """
        return [*self._bos, *self._ids(text, adds_special=True)]

    def encode_bare(self, text: str) -> list[int]:
        """Token ids of a text alone, for example of a rendered chat, whose template wrote the special tokens.
        Raises SpecterError as `encode`."""
        return self._ids(text, adds_special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self.backend.decode(ids)

    def _ids(self, text: str, adds_special: bool) -> list[int]:
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=adds_special).ids
        except TypeError:  # of the library, for half of a surrogate pair
            raise SpecterError("the text is not Unicode: it has a lone surrogate", "give it as UTF-8") from None
        if self._vocab is not None and max(ids, default=0) >= self._vocab:
            beyond = next(token for token in ids if token >= self._vocab)
            raise SpecterError(
                f"the text has the token {self.backend.id_to_token(beyond)!r}, whose id {beyond} is beyond the "
                f"model's vocabulary of {self._vocab}",
                "leave it out, or use the tokenizer.json that came with this checkpoint",
            )
        return ids


def load_tokenizer(path: Path, vocab: int | None = None) -> Tokenizer:
    """Loads a tokenizer.json, or the one of a directory, and honours the tokenizer_config.json beside it.

    Special tokens that the configuration names are special in texts. BOS is added if `add_bos_token` is true and the
    post-processor of tokenizer.json does not add it. Stored truncation and padding are dropped: they cut prompts.

    Args:
        vocab: of the model; ids beyond it are refused.
    Raises:
        SpecterError: a missing or damaged file.
    """
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise SpecterError(f"{path} is not a tokenizer: {error}", "give a tokenizer.json") from None
    backend.no_truncation()
    backend.no_padding()
    config = read_tokenizer_config(path.parent)
    try:
        _add_special(backend, config)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise SpecterError(f"the added tokens of {_config(path.parent)} are damaged: {error}", _REMEDY) from None
    if config.get("split_special_tokens"):
        backend.encode_special_tokens = True
    bos_token = special_tokens(config).get("bos_token")
    if not config.get("add_bos_token") or bos_token is None:
        return Tokenizer(backend, vocab=vocab)
    bos = backend.token_to_id(bos_token)
    adds_it = bos in backend.encode("").ids
    return Tokenizer(backend, None if adds_it else bos, vocab)


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json; empty if there is none. Raises SpecterError if it is damaged."""
    path = _config(directory)
    return read_object(path, _REMEDY) if path.exists() else {}


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens of a tokenizer_config.json by role, such as `bos_token`."""
    found = {name: _content(config[name]) for name in _NAMES if config.get(name)}
    return {name: token for name, token in found.items() if token}


def eos_ids(directory: Path) -> frozenset[int]:
    """The ids that end a text, by config.json and by generation_config.json of a checkpoint; empty if neither has one.
    Raises SpecterError if one of them is damaged."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        value = read_object(path, _REMEDY).get("eos_token_id") if path.exists() else None
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(one) is int and one >= 0 for one in ids):
            raise SpecterError(f"{path}: eos_token_id is {value!r}", "give a token id, or a list of them")
        found.update(ids)
    return frozenset(found)


def _config(directory: Path) -> Path:
    return directory / "tokenizer_config.json"


def _content(token: Any) -> str:
    """A token that is written as a text, or as a mapping with flags."""
    return str(token["content"] if isinstance(token, Mapping) else token)


def _add_special(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Adds what the configuration names and tokenizer.json lacks, as transformers does."""
    stated = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    flags = [(one["content"], {flag: one[flag] for flag in _FLAGS if flag in one}) for _, one in stated]
    backend.add_tokens([AddedToken(token, **of_token) for token, of_token in flags])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [name for name in _named(config) if name not in known]
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in missing])


def _named(config: Mapping[str, Any]) -> Iterator[str]:
    yield from special_tokens(config).values()
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    yield from map(_content, extra.values() if isinstance(extra, Mapping) else extra)
