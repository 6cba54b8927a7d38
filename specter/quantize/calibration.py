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
from specter.model.spec import ModelSpec

ROOT = Path(__file__).resolve().parents[2]
CALIBRATION = ROOT / "data" / "standins" / "calibration.safetensors"
TOKENIZER = CALIBRATION.with_name("tokenizer.json")  # the shipped tokens'
NUM_SEQUENCES = 256
SEQUENCE_LENGTH = 256
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


def recode(tokens: NDArray[np.int64], theirs: Tokenizer) -> NDArray[np.int64]:
    """Tokens [N, length] of the shipped tokenizer as text, coded by another tokenizer: windows [n, length] of it."""
    texts = Tokenizer.from_file(str(TOKENIZER)).decode_batch(tokens.tolist())
    ids = np.concatenate([np.array(one.ids, np.int64) for one in theirs.encode_batch(texts, add_special_tokens=False)])
    length = tokens.shape[1]
    return ids[: len(ids) // length * length].reshape(-1, length)


def load_calibration(
    path: Path, spec: ModelSpec, num_sequences: int = 0, tokenizer: Path | None = None
) -> CalibrationText:
    """Reads calibration tokens, uint16 `tokens` [sequences, length]; `num_sequences` of them, spread over the file.

    Args:
        tokenizer: the model's; another one than the stand-ins' codes the shipped text anew.

    Raises:
        SpecterError: the file is missing or damaged, too short, or speaks of tokens that the model lacks.
    """
    remedy = "use data/standins/calibration.safetensors, or cut one by python -m specter.quantize.calibration"
    try:
        content = path.read_bytes()
        tokens = load(content)["tokens"]
    except (OSError, SafetensorError, KeyError) as error:
        raise SpecterError(f"no calibration tokens in {path} ({error})", remedy) from None
    if tokens.ndim != 2 or tokens.dtype != np.uint16 or len(tokens) < 2:
        raise SpecterError(f"{path}: tokens are {tokens.dtype} {list(tokens.shape)}, not uint16 [>= 2, length]", remedy)
    tokens = tokens.astype(np.int64)
    if tokens.shape[1] > spec.max_positions:
        raise SpecterError(f"{path}: sequences of {tokens.shape[1]} exceed {spec.max_positions} positions", remedy)
    if int(tokens.max()) >= spec.vocab:
        raise SpecterError(
            f"{path}: token {tokens.max()} is beyond the vocabulary of {spec.vocab} of {spec.name}",
            "calibrate with tokens of the model's own tokenizer",
        )
    if path == CALIBRATION:
        tokens = _for_model(tokens, spec, tokenizer)
    if num_sequences:
        if not 2 <= num_sequences <= len(tokens):
            raise SpecterError(
                f"sequences={num_sequences} is outside 2..{len(tokens)} of {path}", "give fewer, or 0: all"
            )
        tokens = tokens[np.linspace(0, len(tokens) - 1, num_sequences).astype(np.int64)]
    return CalibrationText(
        tokens=torch.from_numpy(tokens),
        num_held_out=max(1, len(tokens) // HELD_OUT_ONE_IN),
        sha256=hashlib.sha256(content).hexdigest(),
    )


def _for_model(tokens: NDArray[np.int64], spec: ModelSpec, tokenizer: Path | None) -> NDArray[np.int64]:
    """The shipped tokens in the model's own vocabulary. Raises SpecterError if that cannot be known."""
    if tokenizer is None:
        if spec.vocab > Tokenizer.from_file(str(TOKENIZER)).get_vocab_size():
            raise SpecterError(
                f"{spec.name} has {spec.vocab} tokens, the calibration text is coded by the stand-ins' tokenizer",
                "give tokenizer=FILE, the model's tokenizer.json; for an inflated stand-in "
                "data/standins/tokenizer.json",
            )
        return tokens
    try:
        theirs = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # the library raises bare Exceptions
        raise SpecterError(
            f"{tokenizer} is not a tokenizer: {error}", "give tokenizer=FILE, a tokenizer.json"
        ) from None
    return tokens if tokenizer.read_bytes() == TOKENIZER.read_bytes() else recode(tokens, theirs)


def main() -> None:
    from specter.standin.corpus import TOKENS, load_tokens

    tokens = cut_windows(load_tokens(TOKENS)["train"], NUM_SEQUENCES, SEQUENCE_LENGTH)
    save_file({"tokens": tokens}, CALIBRATION, metadata={"source": "training split of data/corpus"})
    print(f"{CALIBRATION}: {tokens.shape[0]} sequences of {tokens.shape[1]} tokens")


if __name__ == "__main__":
    main()
