"""`python -m tools.crosscheck_optimum`: what optimum's GPTQ quantizer does to these models (see tools/README.md)."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from optimum.gptq import GPTQQuantizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from specter.arguments import run_command
from specter.models.checkpoint import write_checkpoint
from specter.quantize.gptq_format import unpack
from tools.crosscheck_gptqmodel import DEEPSEEK, GROUP, add_tokenizer
from tools.standin.checkpoint import to_hub
from tools.standin.network import init_weights

TEXT = "The ferry left the harbour before dawn, and nobody on the quay had counted the passengers. " * 8


@dataclass(frozen=True)
class Options:
    """Quantizes a small random DeepSeek-V2 model with optimum; exit 1 if the outcome has changed.

    Routed experts, one fused tensor per layer in transformers, must be left alone: optimum cannot make a draft. Layers
    that optimum quantizes must read, by our layout, to the weights to which they dequantize.
    """


def run(options: Options) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch)
        write_checkpoint(checkpoint, DEEPSEEK, to_hub(init_weights(DEEPSEEK, seed=0), DEEPSEEK))
        add_tokenizer(checkpoint)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float16)
        quantizer = GPTQQuantizer(
            bits=4, group_size=GROUP, dataset=[TEXT] * 8, block_name_to_quantize="model.layers", model_seqlen=64
        )
        quantizer.quantize_model(model, AutoTokenizer.from_pretrained(checkpoint))
    modules = dict(model.named_modules())
    quantised = [name for name, module in modules.items() if hasattr(module, "qweight")]
    experts = [name for name in quantised if ".experts." in name]
    offset = 1 if quantizer.format == "gptq" else 0
    worst = 0.0
    for name in quantised:
        module = modules[name]
        # Loaded modules store zeros as gptq_v2 does.
        zero_offset = offset if int(module.qzeros.flatten()[0]) == 0x77777777 else 0
        parts = {part: getattr(module, part) for part in ("qweight", "scales", "qzeros", "g_idx")}
        ours = unpack(parts, GROUP, zero_offset).dequantize(torch.float16)
        worst = max(worst, float((module.dequantize_weight().T.float() - ours.float()).abs().max()))
    num_experts = 3 * DEEPSEEK.num_experts * DEEPSEEK.num_moe_layers
    print(
        f"optimum quantised {len(quantised)} linear layers, {len(experts)} of {num_experts} matrices of routed "
        f"experts; read by our layout, the largest difference is {worst}"
    )
    if not quantised or experts or worst:
        sys.exit(1)


if __name__ == "__main__":
    run_command(run, Options)
