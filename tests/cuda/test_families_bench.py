"""What the families bench needs no device for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from bench import int4
from bench.__main__ import main
from bench.cells import Cell
from bench.int4_prefill import reference_prefill
from specter.quantize.rtn import quantize_rtn
from specter.resolve import resolve
from tests.helpers import TINY_QWEN


@pytest.mark.parametrize(("model", "slots"), [("qwen1_5_moe", 15 * 24), ("phi3_5_moe", 2 * 32)])
def test_a_cell_is_of_its_model(model: str, slots: int) -> None:
    config = Cell("lru", "high", "greedy", 0, model=model).config()
    assert resolve(config).num_slots == slots


def test_an_unknown_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", "model=nothing", f"quantized={tmp_path}", f"out={tmp_path / 'out.json'}"]) == 2
    assert "nothing.yaml does not exist" in capsys.readouterr().err


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
