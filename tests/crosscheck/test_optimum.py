"""optimum's GPTQ quantizer cannot make a draft: it leaves routed experts alone, without a message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specter.quantize.gptq_format import unpack
from tests.crosscheck.models import DEEPSEEK, GROUP, write_model

optimum = pytest.importorskip("optimum.gptq", reason="optimum is not installed (tests/crosscheck/README.md)")

TEXT = "The ferry left the harbour before dawn, and nobody on the quay had counted the passengers. " * 8


def test_routed_experts_are_left_alone_and_other_layers_read_by_our_layout(tmp_path: Path) -> None:
    """In transformers the routed experts of a layer are one fused tensor."""
    write_model(tmp_path, DEEPSEEK)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    quantizer = optimum.GPTQQuantizer(
        bits=4, group_size=GROUP, dataset=[TEXT] * 8, block_name_to_quantize="model.layers", model_seqlen=64
    )
    quantizer.quantize_model(model, AutoTokenizer.from_pretrained(tmp_path))
    quantized = {name: module for name, module in model.named_modules() if hasattr(module, "qweight")}
    assert quantized and not [name for name in quantized if ".experts." in name]
    offset = 1 if quantizer.format == "gptq" else 0
    for name, module in quantized.items():
        # Loaded modules store zeros as gptq_v2 does.
        zero_offset = offset if int(module.qzeros.flatten()[0]) == 0x77777777 else 0
        parts = {part: getattr(module, part) for part in ("qweight", "scales", "qzeros", "g_idx")}
        ours = unpack(parts, GROUP, zero_offset).dequantize(torch.float16)
        assert float((module.dequantize_weight().T.float() - ours.float()).abs().max()) == 0, name
