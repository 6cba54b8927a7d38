"""`python -m tools.crosscheck_gguf`: our block formats against the `gguf` package (see tools/README.md)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import version

import gguf
import numpy as np
import torch

from specter.arguments import run_command
from specter.quantize.ggml_blocks import IQ4_NL, Q2_K, Q4_K, Q5_0, Q8_0, BlockFormat


@dataclass(frozen=True)
class Options:
    """Decoding of random blocks must be equal bit for bit, encoding byte for byte where the package encodes."""

    blocks: int = 20_000


def check(form: BlockFormat, num_blocks: int) -> bool:
    generator = np.random.default_rng(1)
    kind = gguf.GGMLQuantizationType[form.name]
    raw = generator.integers(0, 256, (num_blocks, form.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(raw, kind)
    ours = form.decode(torch.from_numpy(raw)).numpy()
    finite = np.isfinite(theirs).all(1)  # some random bytes are an fp16 infinity or NaN
    decodes = bool((theirs[finite].view(np.uint32) == ours[finite].view(np.uint32)).all())
    weights = generator.standard_normal((num_blocks // 10, form.num_values), dtype=np.float32) * 0.05
    try:
        coded = gguf.quants.quantize(weights, kind)
    except NotImplementedError:
        encodes = "not in the package"
    else:
        encodes = "equal" if (coded == form.encode(torch.from_numpy(weights)).numpy()).all() else "DIFFERENT"
    print(f"{form.name}: decoding {'equal' if decodes else 'DIFFERENT'} on {finite.sum()} blocks, encoding {encodes}")
    return decodes and encodes != "DIFFERENT"


def run(options: Options) -> None:
    print(f"gguf {version('gguf')}")
    results = [check(form, options.blocks) for form in (Q8_0, Q5_0, IQ4_NL, Q4_K, Q2_K)]
    if not all(results):
        sys.exit(1)


if __name__ == "__main__":
    run_command(run, Options)
