"""The routed experts of one layer: their weights, their inputs, and their quantized form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.codecs.int4 import Int4Matrices
from specter.errors import SpecterError


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """The routed experts of one layer, in any floating type."""

    gate: Tensor  # [E, F, D]
    up: Tensor  # [E, F, D]
    down: Tensor  # [E, D, F]


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of one layer's experts on calibration text."""

    hidden: Tensor  # [tokens, D], the experts' input (after the norm)
    routing: Tensor  # int [tokens, k], expert ids

    def counts(self, num_experts: int) -> Tensor:
        """The number of tokens of each expert, int64 [E] on the CPU."""
        return torch.bincount(self.routing.flatten(), minlength=num_experts).cpu()

    def visits(self, num_experts: int) -> list[Tensor]:
        """The rows of each expert, int64 [n] in ascending order."""
        order = self.routing.flatten().argsort(stable=True)
        return list((order // self.routing.shape[1]).split(self.counts(num_experts).tolist()))

    def check_finite(self) -> None:
        """Raises SpecterError if the activations hold NaN or infinity."""
        if not bool(torch.isfinite(self.hidden).all()):
            raise SpecterError(
                "the target's activations on the calibration text hold NaN or infinity",
                "check the checkpoint's weights",
            )


@dataclass(frozen=True, slots=True)
class Int4Layer:
    """A quantizer's result for one layer."""

    gate: Int4Matrices
    up: Int4Matrices
    down: Int4Matrices
    tokens: Tensor  # int64 [E], calibration tokens per expert
    fallback: Tensor  # bool [E], rounded to nearest for lack of tokens
    input_scales: Tensor | None = None  # AWQ: fp32 [D], factors of the input of gate and up

    def dequantize(self) -> LayerExperts:
        """fp32 experts with the same outputs; factors of the input are multiplied into the matrices."""
        gate, up, down = (part.dequantize() for part in (self.gate, self.up, self.down))
        if self.input_scales is not None:
            gate, up = gate * self.input_scales, up * self.input_scales
        return LayerExperts(gate, up, down)


@dataclass(frozen=True, slots=True)
class Hessians:
    """Sums of x x^T and mean |x| over the tokens of each expert."""

    hidden: Tensor  # fp32 [E, D, D], inputs of gate and up
    inner: Tensor  # fp32 [E, F, F], inputs of down
    inner_magnitudes: Tensor  # fp32 [E, F]


def expert_output(experts: LayerExperts, expert: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """One expert on rows [n, D] in fp32: its inner activation [n, F] and its output [n, D]."""
    gate = F.silu(rows @ experts.gate[expert].float().T)
    inner = gate * (rows @ experts.up[expert].float().T)
    return inner, inner @ experts.down[expert].float().T


def collect_hessians(experts: LayerExperts, inputs: LayerInputs) -> Hessians:
    """Raises SpecterError if the activations are not finite."""
    inputs.check_finite()
    num_experts, inter, hidden = experts.gate.shape
    device = inputs.hidden.device
    hidden_sums = torch.zeros(num_experts, hidden, hidden, device=device)
    inner_sums = torch.zeros(num_experts, inter, inter, device=device)
    magnitudes = torch.zeros(num_experts, inter, device=device)
    for expert, visitors in enumerate(inputs.visits(num_experts)):
        rows = inputs.hidden[visitors].float()
        inner, _ = expert_output(experts, expert, rows)
        hidden_sums[expert] = rows.T @ rows
        inner_sums[expert] = inner.T @ inner
        magnitudes[expert] = inner.abs().sum(0) / max(len(rows), 1)
    return Hessians(hidden_sums, inner_sums, magnitudes)


def output_error(experts: LayerExperts, quantised: LayerExperts, inputs: LayerInputs) -> float:
    """Relative error of the experts' outputs over `inputs`: |y_quantised - y| / |y|, over all experts."""
    error = norm = 0.0
    for expert, visitors in enumerate(inputs.visits(len(experts.gate))):
        rows = inputs.hidden[visitors].float()
        _, exact = expert_output(experts, expert, rows)
        _, rounded = expert_output(quantised, expert, rows)
        error += float((rounded - exact).square().sum())
        norm += float(exact.square().sum())
    return (error / norm) ** 0.5 if norm else 0.0
