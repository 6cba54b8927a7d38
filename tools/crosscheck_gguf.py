"""Our block formats against the `gguf` package, on random blocks. Needs that package: see tools/README.md.

    python tools/crosscheck_gguf.py

Decoding must be equal bit for bit, and encoding byte for byte where the package encodes. Exits with 1 if it is not.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import gguf
import numpy as np
import torch

from specter.quantize.ggml_blocks import IQ4_NL, Q2_K, Q4_K, Q5_0, Q8_0, BlockFormat

NUM_BLOCKS = 20_000


def check(form: BlockFormat) -> bool:
    generator = np.random.default_rng(1)
    kind = gguf.GGMLQuantizationType[form.name]
    raw = generator.integers(0, 256, (NUM_BLOCKS, form.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(raw, kind)
    ours = form.decode(torch.from_numpy(raw)).numpy()
    finite = np.isfinite(theirs).all(1)  # random bytes are now and then an fp16 beyond numbers
    decodes = bool((theirs[finite].view(np.uint32) == ours[finite].view(np.uint32)).all())
    weights = generator.standard_normal((NUM_BLOCKS // 10, form.num_values), dtype=np.float32) * 0.05
    try:
        coded = gguf.quants.quantize(weights, kind)
    except NotImplementedError:
        encodes = "which the package has not"
    else:
        encodes = "equal" if (coded == form.encode(torch.from_numpy(weights)).numpy()).all() else "DIFFERENT"
    print(f"{form.name}: decoding {'equal' if decodes else 'DIFFERENT'} on {finite.sum()} blocks, encoding {encodes}")
    return decodes and encodes != "DIFFERENT"


if __name__ == "__main__":
    print(f"gguf {version('gguf')}")
    results = [check(form) for form in (Q8_0, Q5_0, IQ4_NL, Q4_K, Q2_K)]
    sys.exit(not all(results))
