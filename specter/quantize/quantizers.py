"""INT4 quantizers of a draft's experts: the experts of a layer and their inputs to a quantized layer.

| method | what runs | calibration |
|---|---|---|
| gptq, rtn | INT4 codes and scales: a draft on CPU and GPU | gptq: Hessians; rtn: none |
| awq | the same with one vector per layer for the experts' input: a draft on the CPU | Hessians and magnitudes |

The fidelity study also has q8_0, q4_k and q2_k (`block_matrices`), of which only dequantized values run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specter.codecs.int4 import Int4Matrices
from specter.errors import SpecterError
from specter.models.spec import ModelSpec
from specter.quantize.awq import Awq
from specter.quantize.block_matrices import FORMATS
from specter.quantize.gptq import quantize_gptq
from specter.quantize.layer import Int4Layer, LayerExperts, LayerInputs, check_finite, collect_hessians
from specter.quantize.rtn import quantize_rtn


@dataclass(frozen=True, slots=True)
class Rtn:
    group: int

    def __call__(self, experts: LayerExperts, inputs: LayerInputs) -> Int4Layer:
        """Raises SpecterError: weights or activations that are not finite, a group that does not divide a row."""
        check_finite(inputs)
        num_experts = len(experts.gate)
        tokens = torch.bincount(inputs.routing.flatten(), minlength=num_experts).cpu()
        return Int4Layer(*_nearest(experts, self.group), tokens, torch.zeros(num_experts, dtype=torch.bool))


@dataclass(frozen=True, slots=True)
class Gptq:
    """An expert with fewer than `min_tokens` calibration tokens is rounded to nearest: GPTQ would be worse."""

    group: int
    min_tokens: int

    def __call__(self, experts: LayerExperts, inputs: LayerInputs) -> Int4Layer:
        gate, up, down = _nearest(experts, self.group)
        hessians = collect_hessians(experts, inputs)
        covered = (hessians.tokens >= self.min_tokens).nonzero().flatten().to(experts.gate.device)
        if len(covered):
            inter = experts.gate.shape[1]
            gate_up = torch.cat([experts.gate[covered], experts.up[covered]], 1)  # one input, so one Hessian
            codes = quantize_gptq(gate_up, hessians.hidden[covered], self.group).codes
            gate.codes[covered] = codes[:, :inter]
            up.codes[covered] = codes[:, inter:]
            down.codes[covered] = quantize_gptq(experts.down[covered], hessians.inner[covered], self.group).codes
        return Int4Layer(gate, up, down, hessians.tokens, hessians.tokens < self.min_tokens)


def build_int4(method: str, group: int, min_tokens: int) -> Rtn | Gptq | Awq:
    """The quantizer of a method whose result a draft can run. Raises SpecterError for any other."""
    match method:
        case "gptq":
            return Gptq(group, min_tokens)
        case "awq":
            return Awq(group, min_tokens)
        case "rtn":
            return Rtn(group)
    known = "method=gptq or method=awq or method=rtn"
    if method in FORMATS:
        raise SpecterError(
            f"method={method} makes no draft: its blocks are for the fidelity study only",
            f"use {known}, or python -m harness.jobs.fidelity for the study",
        )
    raise SpecterError(f"method={method} is unknown", f"use {known}")


def default_min_tokens(spec: ModelSpec) -> int:
    """Tokens per expert from which GPTQ beats rounding on held-out text: two per input channel.

    Measured on the DeepSeek stand-in (D = 64, layers 0, 8, 16 and 25), relative output error of rounding 0.086 /
    0.101 / 0.150 / 0.129; of GPTQ from 64 tokens 0.093 / 0.120 / 0.181 / 0.151, from 128 tokens 0.081 / 0.100 / 0.149
    / 0.126, from 2000 tokens 0.072 / 0.088 / 0.133 / 0.113.
    """
    return 2 * spec.hidden


def _nearest(experts: LayerExperts, group: int) -> tuple[Int4Matrices, Int4Matrices, Int4Matrices]:
    return quantize_rtn(experts.gate, group), quantize_rtn(experts.up, group), quantize_rtn(experts.down, group)
