"""Quantises all routed experts of one layer, given what the target feeds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.errors import SpecterError
from specter.model.spec import ModelSpec
from specter.quantize.gptq import quantize_gptq
from specter.quantize.int4 import Int4Matrices
from specter.quantize.rtn import quantize_rtn

METHODS = ("gptq", "rtn")


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """The routed experts of one layer, in any floating type."""

    gate: Tensor  # [E, F, D]
    up: Tensor  # [E, F, D]
    down: Tensor  # [E, D, F]


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What the target computed on calibration text just before one layer's experts."""

    hidden: Tensor  # [tokens, D], the experts' input (after the norm)
    routing: Tensor  # int [tokens, k], expert ids

    def visits(self, num_experts: int) -> list[Tensor]:
        """For each expert the rows that visit it, int64 [n] in ascending order."""
        experts, order = self.routing.flatten().sort(stable=True)
        counts = torch.bincount(experts, minlength=num_experts)
        return list((order // self.routing.shape[1]).split(counts.tolist()))


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    gate: Int4Matrices
    up: Int4Matrices
    down: Int4Matrices
    tokens: Tensor  # int64 [E], calibration tokens that visited each expert
    fallback: Tensor  # bool [E], rounded to nearest although GPTQ was asked for

    def to(self, device: torch.device | str) -> QuantizedLayer:
        gate, up, down = (
            Int4Matrices(m.codes.to(device), m.scales.to(device), m.zeros.to(device), m.group)
            for m in (self.gate, self.up, self.down)
        )
        return QuantizedLayer(gate, up, down, self.tokens, self.fallback)

    def dequantize(self) -> LayerExperts:
        return LayerExperts(self.gate.dequantize(), self.up.dequantize(), self.down.dequantize())


@dataclass(frozen=True, slots=True)
class Hessians:
    """Sums of x x^T over the tokens of each expert: what GPTQ needs to know of the calibration text."""

    tokens: Tensor  # int64 [E]
    hidden: Tensor  # fp32 [E, D, D], inputs of gate and up
    inner: Tensor  # fp32 [E, F, F], inputs of down: the expert's own activation


def expert_output(experts: LayerExperts, expert: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """One expert on rows [n, D] in fp32: its inner activation [n, F] and its output [n, D]."""
    gate = F.silu(rows @ experts.gate[expert].float().T)
    inner = gate * (rows @ experts.up[expert].float().T)
    return inner, inner @ experts.down[expert].float().T


def collect_hessians(experts: LayerExperts, inputs: LayerInputs) -> Hessians:
    num_experts, inter, hidden = experts.gate.shape
    device = inputs.hidden.device
    tokens = torch.zeros(num_experts, dtype=torch.int64)
    hidden_sums = torch.zeros(num_experts, hidden, hidden, device=device)
    inner_sums = torch.zeros(num_experts, inter, inter, device=device)
    for expert, visitors in enumerate(inputs.visits(num_experts)):
        rows = inputs.hidden[visitors].float()
        inner, _ = expert_output(experts, expert, rows)
        tokens[expert] = len(rows)
        hidden_sums[expert] = rows.T @ rows
        inner_sums[expert] = inner.T @ inner
    return Hessians(tokens, hidden_sums, inner_sums)


def default_min_tokens(spec: ModelSpec) -> int:
    """Tokens from which GPTQ beats rounding on text it has not seen: two per input channel.

    Measured on the DeepSeek stand-in (D = 64, layers 0, 8, 16 and 25), relative output error of rounding 0.086 /
    0.101 / 0.150 / 0.129; of GPTQ from 64 tokens 0.093 / 0.120 / 0.181 / 0.151, from 128 tokens 0.081 / 0.100 / 0.149
    / 0.126, from 2000 tokens 0.072 / 0.088 / 0.133 / 0.113.
    """
    return 2 * spec.hidden


def quantize_layer(
    experts: LayerExperts, inputs: LayerInputs, method: str, group_size: int, min_tokens: int
) -> QuantizedLayer:
    """Quantises the three matrices of every expert, symmetric.

    An expert visited by fewer than `min_tokens` calibration tokens is rounded to nearest: a Hessian of few
    tokens makes GPTQ worse than that.

    Raises:
        SpecterError: weights or activations that are not finite, a group that does not divide a row.
    """
    if not bool(torch.isfinite(inputs.hidden).all()):
        raise SpecterError(
            "the target's activations on the calibration text hold NaN or infinity", "check the checkpoint's weights"
        )
    gate, up, down = (quantize_rtn(w, group_size) for w in (experts.gate, experts.up, experts.down))
    if method == "rtn":
        num_experts = len(experts.gate)
        tokens = torch.bincount(inputs.routing.flatten(), minlength=num_experts).cpu()
        return QuantizedLayer(gate, up, down, tokens, torch.zeros(num_experts, dtype=torch.bool))

    hessians = collect_hessians(experts, inputs)
    covered = (hessians.tokens >= min_tokens).nonzero().flatten().to(experts.gate.device)
    if len(covered):
        inter = experts.gate.shape[1]
        gate_up = torch.cat([experts.gate[covered], experts.up[covered]], 1)  # one input, so one Hessian
        codes = quantize_gptq(gate_up, hessians.hidden[covered], group_size).codes
        gate.codes[covered] = codes[:, :inter]
        up.codes[covered] = codes[:, inter:]
        down.codes[covered] = quantize_gptq(experts.down[covered], hessians.inner[covered], group_size).codes
    return QuantizedLayer(gate, up, down, hessians.tokens, hessians.tokens < min_tokens)


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
