"""All INT4 backends of the bench compute the same thing, in Triton's interpreter or on the device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench import int4
from bench.int4 import Backends, Rows, chosen_codes, int4_expert_bytes, reference_prefill
from specter.experts.store import RawCodec
from specter.kernels.device import Launch
from specter.kernels.int4_moe import PackedExperts
from specter.models.cuda.arena import DeviceArena
from specter.models.spec import ModelSpec
from specter.quantize.rtn import quantize_rtn
from tests.helpers import TINY, TINY_QWEN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC: ModelSpec = dataclasses.replace(
    TINY, hidden=64, expert_inter=32, num_layers=3, num_experts=4, top_k=2, routed_scaling=1.0
)


# Few large blocks: the interpreter pays per program.
LARGE = dataclasses.replace(int4.DRAFT, gate_up=Launch(32, 64), down=Launch(64, 64))


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    if DEVICE == "cpu":
        monkeypatch.setattr(int4, "DRAFT", LARGE)
    generator = torch.Generator().manual_seed(0)
    layers, experts = SPEC.num_moe_layers, SPEC.num_experts
    gate, up = (torch.randn(layers, experts, 32, 64, generator=generator) / 8 for _ in range(2))
    down = torch.randn(layers, experts, 64, 32, generator=generator) / 6
    gate, up, down = gate.to(DEVICE), up.to(DEVICE), down.to(DEVICE)
    codes = [tuple(quantize_rtn(part[layer], 32) for part in (gate, up, down)) for layer in range(layers)]
    packed = PackedExperts.empty(SPEC, 32, DEVICE)
    codec = RawCodec(torch.float32, 32, 64)
    arena = DeviceArena(layers * experts, codec, DEVICE)
    for layer, parts in enumerate(codes):
        packed.set_layer(layer, *parts)
        g, u, d = (part.dequantize() for part in parts)  # so that BF16 backends have the same weights
        arena.write_run(layer * experts, codec.pack(torch.cat((g, u), 1), d))
    table = torch.arange(layers * experts, dtype=torch.int32).view(layers, -1).to(DEVICE)
    rows = Rows.random(SPEC, torch.float32, DEVICE)
    backends = Backends(SPEC, rows, packed, arena, table)
    chosen = [chosen_codes(parts, rows.chosen[layer]) for layer, parts in enumerate(codes)]  # type: ignore[arg-type]
    results = {}
    for name, run in backends.all(chosen).items():
        backends.out.fill_(torch.nan)
        run()
        results[name] = backends.out.clone()
    assert int4_expert_bytes(packed) == SPEC.expert_params * (0.5 + 4 / 32)
    return results


def test_backends_agree(outputs: dict[str, torch.Tensor]) -> None:
    reference = outputs["INT4 reference (torch: dequantise, multiply)"]
    assert reference.abs().max() > 0.1
    for name, result in outputs.items():
        torch.testing.assert_close(result, reference, atol=1e-3, rtol=1e-3, msg=name)


def test_prefill_by_experts_is_prefill_by_rows() -> None:
    spec = dataclasses.replace(TINY_QWEN, hidden=64, expert_inter=32)
    torch.manual_seed(0)
    shapes = ((32, 64), (32, 64), (64, 32))
    gate, up, down = (quantize_rtn(torch.randn(spec.num_experts, *shape) / 8, 32) for shape in shapes)
    drawn = int4.Rows.random(spec, torch.bfloat16, "cpu")
    parts = (part.split(1) for part in (drawn.x, drawn.logits, drawn.chosen, drawn.weights))
    rows = [int4.Rows(*row) for row in zip(*parts, strict=True)]
    out = torch.empty(len(rows), spec.hidden)
    assert reference_prefill(0, rows, (gate, up, down), out) == len(drawn.chosen.unique())
    gates, ups, downs = (part.dequantize(torch.float32) for part in (gate, up, down))
    for row, result in zip(rows, out, strict=True):
        x = row.x[0].float()
        expected = sum(
            weight * (downs[e] @ (torch.nn.functional.silu(gates[e] @ x) * (ups[e] @ x)))
            for e, weight in zip(row.chosen[0].tolist(), row.weights[0], strict=True)
        )
        assert (result - expected).norm() < 2e-2 * expected.norm()
