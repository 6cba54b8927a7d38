"""Our block formats against the `gguf` package, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specter.quantize.ggml_blocks import IQ4_NL, Q2_K, Q4_K, Q5_0, Q8_0, BlockFormat

NUM_BLOCKS = 20_000

gguf = pytest.importorskip("gguf", reason="gguf is not installed (tests/crosscheck/README.md)")


@pytest.mark.parametrize("form", [Q8_0, Q5_0, IQ4_NL, Q4_K, Q2_K], ids=lambda form: form.name)
def test_random_blocks_decode_and_weights_encode_alike(form: BlockFormat) -> None:
    """Both ways, as far as the package encodes."""
    generator = np.random.default_rng(1)
    kind = gguf.GGMLQuantizationType[form.name]
    raw = generator.integers(0, 256, (NUM_BLOCKS, form.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(raw, kind)
    ours = form.decode(torch.from_numpy(raw)).numpy()
    finite = np.isfinite(theirs).all(1)  # some random bytes are an fp16 infinity or NaN
    assert finite.sum() > NUM_BLOCKS // 2
    np.testing.assert_array_equal(ours[finite].view(np.uint32), theirs[finite].view(np.uint32))
    weights = generator.standard_normal((NUM_BLOCKS // 10, form.num_values), dtype=np.float32) * 0.05
    try:
        coded = gguf.quants.quantize(weights, kind)
    except NotImplementedError:
        return
    np.testing.assert_array_equal(form.encode(torch.from_numpy(weights)).numpy(), coded)
