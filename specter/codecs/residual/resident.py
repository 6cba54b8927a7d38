"""INT4 codes, scales and zeros as they lie on the device for the draft (see `specter.kernels.int4_moe`).

    words  int32 [..., rows, columns / 8]: the codes of an octet, eight neighbouring columns
    params int32 [..., rows, columns / group]: scale in the low half, zero point above it as fp16

The codec reads exactly these words, so that codes are resident once and a checksum covers what a decoder uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specter.codecs.int4 import Int4Matrices
from specter.codecs.residual.checksum import checksum, combined
from specter.codecs.residual.layout import Layout, Matrix
from specter.errors import SpecterError

OCTET = 8
SHIFTS = (0, 8, 16, 24, 4, 12, 20, 28)  # bit of each column's code in the word of its octet
SCALE_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class ResidentCodes:
    """A batch of matrices; leading dims are the batch's."""

    words: Tensor
    params: Tensor
    scale_dtype: torch.dtype = torch.float16

    @classmethod
    def pack(cls, matrices: Int4Matrices) -> ResidentCodes:
        """The words of `matrices`, on their device. Scales may be fp16 or bf16.

        Raises:
            SpecterError: scales of another type, or a zero point outside 0..15.
        """
        if matrices.scales.dtype not in SCALE_DTYPES:
            raise SpecterError(f"INT4 scales are {matrices.scales.dtype}", "store them as fp16 or bf16")
        if bool((matrices.zeros > 15).any()):
            raise SpecterError("an INT4 zero point is above 15", "quantise with zeros in 0..15")
        words = torch.zeros_like(matrices.codes[..., ::OCTET], dtype=torch.int32)
        for column, shift in enumerate(SHIFTS):
            words |= matrices.codes[..., column::OCTET].int() << shift
        scales = matrices.scales.view(torch.int16).int() & 0xFFFF
        return cls(words, scales | matrices.zeros.half().view(torch.int16).int() << 16, matrices.scales.dtype)

    def __getitem__(self, index: int | slice) -> ResidentCodes:
        """A part of the first dim."""
        return ResidentCodes(self.words[index], self.params[index], self.scale_dtype)

    def to(self, device: torch.device | str) -> ResidentCodes:
        return ResidentCodes(self.words.to(device), self.params.to(device), self.scale_dtype)

    @property
    def matrix(self) -> Matrix:
        rows, columns = self.words.shape[-2], self.words.shape[-1] * OCTET
        return Matrix(rows, columns, columns // self.params.shape[-1])


def layout_of(codes: Sequence[ResidentCodes]) -> Layout:
    """The layout of an expert with these matrices. Raises SpecterError for shapes that the codec does not take."""
    return Layout(tuple(part.matrix for part in codes))


def stack_rows(parts: Sequence[ResidentCodes]) -> ResidentCodes:
    """Matrices of equal width one above the other: gate and up as one."""
    words, params = torch.cat([part.words for part in parts], -2), torch.cat([part.params for part in parts], -2)
    return ResidentCodes(words, params, parts[0].scale_dtype)


def unpack_codes(words: Tensor) -> Tensor:
    """Codes int32 [..., 8 n] of words [..., n]."""
    return torch.stack([(words >> shift) & 15 for shift in SHIFTS], -1).flatten(-2)


def unpack_params(params: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales fp32 and zeros int32, shaped like params."""
    scales = (params << 16 >> 16).to(torch.int16).view(scale_dtype).float()
    return scales, (params >> 16).to(torch.int16).view(torch.float16).int()


def codes_checksum(codes: Sequence[ResidentCodes]) -> Tensor:
    """int64 [...], one per expert of the batch: of all words and params of its matrices."""
    flat = [tensor.flatten(-2) for part in codes for tensor in (part.words, part.params)]
    return combined([checksum(tensor) for tensor in flat])
