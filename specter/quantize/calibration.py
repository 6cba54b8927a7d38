"""Calibration text: tokens, or a text that the model's tokenizer encodes.

The shipped tokens, data/standins/calibration.safetensors, are cut from the stand-ins' training split by
`python -m tools.standin.calibration`: no evaluation prompt and no validation text is in them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load
from torch import Tensor

from specter.errors import SpecterError
from specter.models.spec import ModelSpec
from specter.text.tokenizer import Tokenizer, load_tokenizer

CALIBRATION = (Path(__file__).parent / "shipped" / "calibration.safetensors").resolve()  # a link, or in a wheel a file
TOKENIZER = CALIBRATION.with_name("tokenizer.json")  # of the shipped tokens
SEQUENCE_LENGTH = 256
REMEDY = "leave it out to use the shipped one, give a text (.txt), or cut one by python -m tools.standin.calibration"
HELD_OUT_ONE_IN = 8  # sequences kept out of the Hessians, on which errors are measured


@dataclass(frozen=True, slots=True)
class CalibrationText:
    tokens: Tensor  # int64 [sequences, length]; errors are measured on the last `num_held_out` sequences
    num_held_out: int
    sha256: str  # of the file


def load_calibration(
    path: Path, spec: ModelSpec, num_sequences: int = 0, tokenizer: Path | None = None
) -> CalibrationText:
    """Reads calibration tokens; `num_sequences` of them, spread over the file (0: all).

    Args:
        path: uint16 `tokens` [sequences, length] in a safetensors file, or a UTF-8 text (.txt), which the model's
            tokenizer encodes, in windows of `SEQUENCE_LENGTH`.
        tokenizer: the model's. If it is not the stand-ins', it encodes the text of the shipped tokens again.

    Raises SpecterError: a file that is missing, damaged or too short, or tokens outside the model's vocabulary.
    """
    theirs = None if tokenizer is None else load_tokenizer(tokenizer)
    tokens = _read_text(path, theirs) if path.suffix == ".txt" else _read_tokens(path)
    if path.resolve() == CALIBRATION:
        tokens = _for_model(tokens, spec, tokenizer, theirs)
    if tokens.shape[1] > spec.max_positions:
        raise SpecterError(f"{path}: sequences of {tokens.shape[1]} exceed {spec.max_positions} positions", REMEDY)
    if int(tokens.max()) >= spec.vocab:
        raise SpecterError(
            f"{path}: token {tokens.max()} is beyond the vocabulary of {spec.vocab} of {spec.name}",
            "calibrate with tokens of the model's own tokenizer",
        )
    if num_sequences:
        if not 2 <= num_sequences <= len(tokens):
            raise SpecterError(
                f"sequences={num_sequences} is outside 2..{len(tokens)} of {path}", "give fewer, or 0: all"
            )
        tokens = tokens[np.linspace(0, len(tokens) - 1, num_sequences).astype(np.int64)]
    return CalibrationText(
        tokens=torch.from_numpy(tokens),
        num_held_out=max(1, len(tokens) // HELD_OUT_ONE_IN),
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
    )


def _for_model(
    tokens: NDArray[np.int64], spec: ModelSpec, path: Path | None, theirs: Tokenizer | None
) -> NDArray[np.int64]:
    """The shipped tokens [N, length] in the model's vocabulary: windows [n, length]."""
    if path is None or theirs is None:
        if spec.vocab > load_tokenizer(TOKENIZER).backend.get_vocab_size():
            raise SpecterError(
                f"{spec.name} has {spec.vocab} tokens, the calibration text is coded by the stand-ins' tokenizer",
                "give tokenizer=FILE, the model's tokenizer.json; for an inflated stand-in "
                "data/standins/tokenizer.json",
            )
        return tokens
    if path.read_bytes() == TOKENIZER.read_bytes():
        return tokens
    shipped = load_tokenizer(TOKENIZER)
    return _encode([shipped.decode(row) for row in tokens.tolist()], theirs, tokens.shape[1])


def _encode(texts: list[str], tokenizer: Tokenizer, length: int) -> NDArray[np.int64]:
    """The texts one after the other, as windows [n, length] of tokens."""
    ids = np.array([token for text in texts for token in tokenizer.encode_bare(text)], np.int64)
    return ids[: len(ids) // length * length].reshape(-1, length)


def _read_tokens(path: Path) -> NDArray[np.int64]:
    try:
        tokens = load(path.read_bytes())["tokens"]
    except (OSError, SafetensorError, KeyError) as error:
        raise SpecterError(f"no calibration tokens in {path} ({error})", REMEDY) from None
    if tokens.ndim != 2 or tokens.dtype != np.uint16 or len(tokens) < 2:
        raise SpecterError(f"{path}: tokens are {tokens.dtype} {list(tokens.shape)}, not uint16 [>= 2, length]", REMEDY)
    return tokens.astype(np.int64)


def _read_text(path: Path, tokenizer: Tokenizer | None) -> NDArray[np.int64]:
    if tokenizer is None:
        raise SpecterError(f"{path} is text, and no tokenizer is given", "give tokenizer=FILE, the model's")
    try:
        paragraphs = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecterError(f"no calibration text in {path} ({error})", REMEDY) from None
    tokens = _encode(paragraphs, tokenizer, SEQUENCE_LENGTH)
    if len(tokens) < 2:
        raise SpecterError(f"{path} makes {len(tokens)} sequences of {SEQUENCE_LENGTH} tokens", "give more text")
    return tokens
