"""Synthetic experts with INT4 codes, for the codec's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specter.codecs.int4 import Int4Matrices
from specter.codecs.residual.encode import Encoded, encode_layer
from specter.codecs.residual.resident import ResidentCodes
from specter.codecs.residual.windows import Windows
from specter.quantize.rtn import quantize_rtn

NEAREST, TWO_SIDED = Windows(False, 8), Windows(True, 18)
KINDS = ("gauss", "student", "columns", "zeros", "repeated")


def make_weights(kind: str, shape: Sequence[int], seed: int = 0) -> Tensor:
    """bf16 weights of one of KINDS, or of random bits ("bits")."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    match kind:
        case "gauss":
            weights = 0.02 * normal(*shape)
        case "student":
            weights = 0.02 * normal(*shape) / normal(5, *shape).square().mean(0).sqrt()
        case "columns":
            weights = 0.02 * normal(*shape) * torch.exp(0.5 * normal(shape[-1]))
        case "zeros":
            weights = 0.02 * normal(*shape) * (torch.rand(*shape, generator=generator) > 0.1)
        case "repeated":
            weights = 0.02 * normal(*shape[:-2], 1, shape[-1]).repeat(*[1] * (len(shape) - 2), shape[-2], 1)
        case "bits":
            bits = torch.randint(-32768, 32768, tuple(shape), generator=generator, dtype=torch.int32)
            return bits.to(torch.int16).view(torch.bfloat16)
        case _:
            raise ValueError(kind)
    return weights.bfloat16()


def with_noise(weights: Tensor, share: float, seed: int = 0) -> Tensor:
    """Some weights replaced by random bit patterns: infinities, NaN payloads and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.where(
        torch.rand(weights.shape, generator=generator) < share, make_weights("bits", weights.shape, seed), weights
    )


def quantize(
    weights: Tensor, group: int, *, sym: bool = True, moved: float = 0.0, dtype: torch.dtype = torch.float16
) -> Int4Matrices:
    """Nearest levels of the finite weights; a share `moved` of the codes goes to a neighbour, as GPTQ does it."""
    finite = torch.where(weights.float().abs() < 100, weights.float(), 0.0)
    matrices = quantize_rtn(finite, group, sym=sym)
    generator = torch.Generator().manual_seed(1)
    chance = torch.rand(weights.shape, generator=generator)
    codes = matrices.codes.int() + (chance < moved / 2).int() - (chance > 1 - moved / 2).int()
    scales = matrices.scales.to(dtype)
    return Int4Matrices(codes.clamp(0, 15).byte(), scales, matrices.zeros, matrices.group)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights and codes of a layer's experts: gate_up and down."""

    weights: list[Tensor]
    codes: list[ResidentCodes]

    def encode(self, windows: Windows | None = None, blocks_at_once: int = 64) -> Encoded:
        return encode_layer(self.weights, self.codes, windows, blocks_at_once)

    def codes_of(self, expert: int) -> list[ResidentCodes]:
        return [part[expert] for part in self.codes]


def make_layer(
    kind: str = "gauss",
    shapes: Sequence[tuple[int, int]] = ((6, 1024), (4, 1408)),
    num_experts: int = 2,
    group: int = 128,
    noise: float = 0.0,
    seed: int = 0,
    sym: bool = True,
    moved: float = 0.0,
    dtype: torch.dtype = torch.float16,
) -> Layer:
    clean = [make_weights(kind, (num_experts, *shape), seed + index) for index, shape in enumerate(shapes)]
    codes = [ResidentCodes.pack(quantize(weights, group, sym=sym, moved=moved, dtype=dtype)) for weights in clean]
    return Layer([with_noise(weights, noise, seed) for weights in clean], codes)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.view(torch.int16), right.view(torch.int16))
