"""Matrices in GGML's block formats: Q2_K, Q4_K and Q8_0 of the fidelity study, which runs their dequantized values.

No draft runs on these blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.quantize.ggml_blocks import IQ4_NL, Q2_K, Q4_K, Q5_0, Q8_0, SUPER_BLOCK, BlockFormat

# As in llama.cpp, rows whose width is no multiple of 256 take the second format: the 1408 wide down projections of
# DeepSeek and Qwen.
FORMATS: dict[str, tuple[BlockFormat, BlockFormat]] = {
    "q2_k": (Q2_K, IQ4_NL),
    "q4_k": (Q4_K, Q5_0),
    "q8_0": (Q8_0, Q8_0),
}
_BLOCKS_AT_ONCE = 1 << 16  # bounds the memory of the search for scales


@dataclass(frozen=True, slots=True)
class BlockMatrices:
    """A batch of matrices [..., out, in] as blocks along `in`."""

    blocks: Tensor  # uint8 [..., out, blocks per row, bytes]
    width: int  # in
    format: BlockFormat

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrices [..., out, in]."""
        values = self.format.decode(self.blocks.flatten(0, -2)).view(*self.blocks.shape[:-2], -1)
        return values[..., : self.width].to(dtype)


def format_of(name: str, width: int) -> BlockFormat:
    """The format of rows of `width` weights under the type `name`.

    A narrow stand-in's row whose width divides 256 is repeated to fill a block: the full-size row is the narrow row
    repeated (docs/decisions/0006), so the codes are those of the full-size model.

    Raises SpecterError: blocks of 32 do not divide the row.
    """
    wanted, otherwise = FORMATS[name]
    if width % Q8_0.num_values:
        raise SpecterError(
            f"blocks of {Q8_0.num_values} do not divide rows of {width} weights",
            "use gptq, rtn or awq, whose groups may be smaller",
        )
    return wanted if width % wanted.num_values == 0 or SUPER_BLOCK % width == 0 else otherwise


def quantize_blocks(weights: Tensor, name: str) -> BlockMatrices:
    """Quantizes `weights` [..., out, in] of any floating type to the type `name` (see `format_of`).

    Raises SpecterError: a width that blocks do not divide, or a weight that is not finite.
    """
    width = weights.shape[-1]
    chosen = format_of(name, width)
    if not bool(torch.isfinite(weights).all()):
        raise SpecterError("weights to quantise hold NaN or infinity", "check the checkpoint; download it again")
    values = min(chosen.num_values, width)
    pieces = weights.float().reshape(-1, values).split(_BLOCKS_AT_ONCE)
    blocks = torch.cat([chosen.encode(piece) for piece in pieces])
    return BlockMatrices(blocks.view(*weights.shape[:-1], -1, chosen.num_bytes), width, chosen)
