"""Calibration text: a small tracked file of tokens, cut from the training split of the corpus.

`python -m specter.quantize.calibration` makes data/standins/calibration.safetensors from the corpus.
Evaluation prompts and validation text are never in it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save_file
from tokenizers import Tokenizer
from torch import Tensor

from specter.errors import SpecterError
from specter.models.spec import ModelSpec

ROOT = Path(__file__).resolve().parents[2]
CALIBRATION = ROOT / "data" / "standins" / "calibration.safetensors"
TOKENIZER = CALIBRATION.with_name("tokenizer.json")  # the shipped tokens'
NUM_SEQUENCES = 256
SEQUENCE_LENGTH = 256
REMEDY = "use data/standins/calibration.safetensors, or cut one by python -m specter.quantize.calibration"
HELD_OUT_ONE_IN = 8  # sequences kept out of the Hessians, on which errors are measured


@dataclass(frozen=True, slots=True)
class CalibrationText:
    tokens: Tensor  # int64 [sequences, length]; the last `num_held_out` sequences are for measuring
    num_held_out: int
    sha256: str  # of the file


def cut_windows(train: NDArray[np.uint16], num_sequences: int, length: int) -> NDArray[np.uint16]:
    """`num_sequences` windows of `length` tokens, evenly spread over the training tokens [N].

    Raises:
        SpecterError: too little text for windows that do not overlap.
    """
    if len(train) < num_sequences * length:
        raise SpecterError(
            f"{len(train)} training tokens do not make {num_sequences} windows of {length}", "build the whole corpus"
        )
    starts = np.linspace(0, len(train) - length, num_sequences).astype(np.int64)
    return train[starts[:, None] + np.arange(length)]


def load_calibration(
    path: Path, spec: ModelSpec, num_sequences: int = 0, tokenizer: Path | None = None
) -> CalibrationText:
    """Reads calibration tokens; `num_sequences` of them, spread over the file.

    Args:
        path: uint16 `tokens` [sequences, length] in a safetensors file, or a UTF-8 text (.txt), which the model's
            tokenizer codes, in windows of `SEQUENCE_LENGTH`.
        tokenizer: the model's; another one than the stand-ins' codes the shipped tokens' text anew.

    Raises:
        SpecterError: the file is missing or damaged, too short, or speaks of tokens that the model lacks.
    """
    theirs = None if tokenizer is None else _read_tokenizer(tokenizer)
    if path.suffix == ".txt":
        tokens = _read_text(path, theirs)
    else:
        tokens = _read_tokens(path)
        is_shipped = path.resolve() == CALIBRATION
        if is_shipped and theirs is not None and tokenizer is not None:
            is_same = tokenizer.read_bytes() == TOKENIZER.read_bytes()
            tokens = tokens if is_same else recode(tokens, theirs)
        elif is_shipped and spec.vocab > _read_tokenizer(TOKENIZER).get_vocab_size():
            raise SpecterError(
                f"{spec.name} has {spec.vocab} tokens, the calibration text is coded by the stand-ins' tokenizer",
                "give tokenizer=FILE, the model's tokenizer.json; for an inflated stand-in "
                "data/standins/tokenizer.json",
            )
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


def recode(tokens: NDArray[np.int64], theirs: Tokenizer) -> NDArray[np.int64]:
    """Tokens [N, length] of the shipped tokenizer as text, coded by another tokenizer: windows [n, length] of it."""
    texts = _read_tokenizer(TOKENIZER).decode_batch(tokens.tolist())
    ids = [np.array(one.ids, np.int64) for one in theirs.encode_batch(texts, add_special_tokens=False)]
    return _windows(np.concatenate(ids), tokens.shape[1])


def _windows(ids: NDArray[np.int64], length: int) -> NDArray[np.int64]:
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
    coded = tokenizer.encode_batch(paragraphs, add_special_tokens=False)
    tokens = _windows(np.array([token for one in coded for token in one.ids], np.int64), SEQUENCE_LENGTH)
    if len(tokens) < 2:
        raise SpecterError(f"{path} makes {len(tokens)} sequences of {SEQUENCE_LENGTH} tokens", "give more text")
    return tokens


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise SpecterError(f"{path} is not a tokenizer: {error}", "give tokenizer=FILE, a tokenizer.json") from None


def main() -> None:
    from tools.standin.corpus import TOKENS, load_tokens

    tokens = cut_windows(load_tokens(TOKENS)["train"], NUM_SEQUENCES, SEQUENCE_LENGTH)
    save_file({"tokens": tokens}, CALIBRATION, metadata={"source": "training split of data/corpus"})
    print(f"{CALIBRATION}: {tokens.shape[0]} sequences of {tokens.shape[1]} tokens")


if __name__ == "__main__":
    main()
