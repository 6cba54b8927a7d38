"""`python -m tools.standin.calibration`: cuts data/standins/calibration.safetensors from the training corpus."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from specter.arguments import run_command
from specter.errors import SpecterError
from specter.quantize.calibration import CALIBRATION, SEQUENCE_LENGTH
from tools.standin.corpus import TOKENS, load_tokens


@dataclass(frozen=True)
class Options:
    """Windows of calibration tokens, evenly spread over the training split."""

    data: Path = TOKENS
    out: Path = CALIBRATION
    sequences: int = 256
    length: int = SEQUENCE_LENGTH


def cut_windows(train: NDArray[np.uint16], num_sequences: int, length: int) -> NDArray[np.uint16]:
    """`num_sequences` windows of `length` tokens, evenly spread over the training tokens [N].

    Raises SpecterError: too little text for windows that do not overlap.
    """
    if len(train) < num_sequences * length:
        raise SpecterError(
            f"{len(train)} training tokens do not make {num_sequences} windows of {length}", "build the whole corpus"
        )
    starts = np.linspace(0, len(train) - length, num_sequences).astype(np.int64)
    return train[starts[:, None] + np.arange(length)]


def run(options: Options) -> None:
    tokens = cut_windows(load_tokens(options.data)["train"], options.sequences, options.length)
    save_file({"tokens": tokens}, options.out, metadata={"source": "training split of data/corpus"})
    print(f"{options.out}: {tokens.shape[0]} sequences of {tokens.shape[1]} tokens")


if __name__ == "__main__":
    run_command(run, Options)
