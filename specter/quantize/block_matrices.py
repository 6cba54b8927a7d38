"""Matrices in GGML's block formats: what the fidelity study calls Q2_K, Q4_K and Q8_0.

No draft of ours runs on these blocks. Their dequantised values are what routing fidelity depends on, and the study runs
those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.quantize.ggml_blocks import IQ4_NL, Q2_K, Q4_K, Q5_0, Q8_0, SUPER_BLOCK, BlockFormat

# A row that 256 does not divide takes another format, as llama.cpp does it: rows of 1408 in DeepSeek's and Qwen's
# down projections.
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

    def to(self, device: torch.device | str) -> BlockMatrices:
        return BlockMatrices(self.blocks.to(device), self.width, self.format)


def format_of(name: str, width: int) -> BlockFormat:
    """The format that rows of `width` weights get when `name` is asked for.

    A narrow stand-in's row, of which 256 is a multiple, fills one block as often as it fits: the same row at full size
    is that row repeated (docs/decisions/0006), so the codes are those of the full-size model.

    Raises:
        SpecterError: blocks of 32 do not divide the row.
    """
    wanted, otherwise = FORMATS[name]
    if width % Q8_0.num_values:
        raise SpecterError(
            f"blocks of {Q8_0.num_values} do not divide rows of {width} weights",
            "use gptq, rtn or awq, whose groups may be smaller",
        )
    return wanted if width % wanted.num_values == 0 or SUPER_BLOCK % width == 0 else otherwise


def quantize_blocks(weights: Tensor, name: str) -> BlockMatrices:
    """Quantises `weights` [..., out, in] of any floating type to the format `name` (see `format_of`).

    Raises:
        SpecterError: a width that blocks do not divide, or a weight that is not finite.
    """
    width = weights.shape[-1]
    chosen = format_of(name, width)
    if not bool(torch.isfinite(weights).all()):
        raise SpecterError("weights to quantise hold NaN or infinity", "check the checkpoint; download it again")
    values = min(chosen.num_values, width)
    pieces = weights.float().reshape(-1, values).split(_BLOCKS_AT_ONCE)
    blocks = torch.cat([chosen.encode(piece) for piece in pieces])
    return BlockMatrices(blocks.view(*weights.shape[:-1], -1, chosen.num_bytes), width, chosen)
