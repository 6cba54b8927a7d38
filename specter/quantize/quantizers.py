"""INT4 quantizers of a draft's experts: the experts of a layer and their inputs to a quantized layer.

| method | what runs | calibration |
|---|---|---|
| gptq, rtn | INT4 codes and scales: a draft on CPU and GPU | gptq: Hessians; rtn: none |
| awq | the same with one vector per layer for the experts' input: a draft on the CPU | Hessians and magnitudes |

The fidelity study also has q8_0, q4_k and q2_k (`ggml_blocks`), of which only dequantized values run.
"""

from __future__ import annotations

from collections.abc import Callable

from specter.errors import SpecterError
from specter.models.spec import ModelSpec
from specter.quantize.awq import awq_layer
from specter.quantize.ggml_blocks import FORMATS
from specter.quantize.gptq import gptq_layer
from specter.quantize.layer import Int4Layer, LayerExperts, LayerInputs
from specter.quantize.rtn import rtn_layer

METHODS: dict[str, Callable[[LayerExperts, LayerInputs, int, int], Int4Layer]] = {
    "gptq": gptq_layer,
    "awq": awq_layer,
    "rtn": rtn_layer,
}


def build_int4(method: str, group: int, min_tokens: int) -> Callable[[LayerExperts, LayerInputs], Int4Layer]:
    """The quantizer of a method whose result a draft can run. Raises SpecterError for any other."""
    if (quantize := METHODS.get(method)) is not None:
        return lambda experts, inputs: quantize(experts, inputs, group, min_tokens)
    known = " or ".join(f"method={name}" for name in METHODS)
    if method in FORMATS:
        raise SpecterError(
            f"method={method} makes no draft: its blocks are for the fidelity study only",
            f"use {known}, or python -m harness.jobs.fidelity for the study",
        )
    raise SpecterError(f"method={method} is unknown", f"use {known}")


def default_min_tokens(spec: ModelSpec) -> int:
    """Tokens per expert from which GPTQ beats rounding on held-out text: two per input channel.

    Measured on the DeepSeek stand-in (D = 64, layers 0 and 25), relative output error of rounding 0.086 and 0.129; of
    GPTQ from 64 tokens 0.093 and 0.151, from 128 tokens 0.081 and 0.126, from 2000 tokens 0.072 and 0.113.
    """
    return 2 * spec.hidden
