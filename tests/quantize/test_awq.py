"""AWQ: never worse than rounding on its own objective, better where it should be, and stored so that it can run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from specter.codecs.int4 import Int4Experts
from specter.errors import SpecterError
from specter.models.checkpoint import SINGLE_FILE
from specter.models.spec import ModelSpec
from specter.models.weights import DraftExperts
from specter.quantize.awq import awq_layer, channel_scales, rounding_error, search
from specter.quantize.gptq_format import PROJECTIONS, read_directory, stack
from specter.quantize.layer import LayerExperts, LayerInputs, output_error
from specter.quantize.quantizers import build_int4
from specter.quantize.rtn import rtn_layer
from tests.helpers import write_directory

E, D, F = 4, 64, 32


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def outlier_inputs(num: int, seed: int = 0) -> LayerInputs:
    """A few channels carry most of the input."""
    strengths = torch.ones(D)
    strengths[::16] = 30
    routing = torch.rand(num, E, generator=torch.Generator().manual_seed(seed)).topk(2).indices
    return LayerInputs(random(num, D, seed=seed) * strengths, routing)


def layer_experts(seed: int = 5) -> LayerExperts:
    return LayerExperts(*(random(E, *shape, seed=seed + i) * 0.05 for i, shape in enumerate(((F, D), (F, D), (D, F)))))


@given(seed=st.integers(0, 10**6), spread=st.floats(0, 3), shared=st.booleans(), group=st.sampled_from([16, 32, 64]))
@settings(max_examples=25, deadline=None)
def test_never_worse_than_rounding_on_its_own_objective(seed: int, spread: float, shared: bool, group: int) -> None:
    inputs = random(3, 100, D, seed=seed) * (spread * random(D, seed=seed + 1)).exp()
    weights, hessians = random(3, 24, D, seed=seed + 2), inputs.mT @ inputs
    magnitudes = inputs.abs().mean((0, 1) if shared else 1)
    scales = search(weights, hessians, magnitudes, group, shared=shared)
    assert scales.shape == ((D,) if shared else (3, D)) and bool((scales > 0).all())
    mine = rounding_error(weights, hessians, scales.expand(3, D), group)
    nearest = rounding_error(weights, hessians, torch.ones(3, D), group)
    assert (mine.sum() <= nearest.sum()) if shared else (mine <= nearest).all()


def test_scales_follow_magnitudes_and_survive_dead_channels() -> None:
    scales = channel_scales(torch.tensor([4.0, 1.0, 0.25, 0.0]), 0.5)
    assert scales[0] / scales[1] == pytest.approx(2) and scales[1] / scales[2] == pytest.approx(2)
    assert bool(torch.isfinite(scales).all()) and (channel_scales(torch.zeros(5), 0.5) == 1).all()
    assert float(scales.amax() * scales.amin()) == pytest.approx(1, rel=1e-4)


def test_better_than_rounding_where_few_channels_carry_the_input() -> None:
    experts, seen, held_out = layer_experts(), outlier_inputs(600, 1), outlier_inputs(300, 2)
    errors = [
        output_error(experts, build_int4(method, D, 10)(experts, seen).dequantize(), held_out)
        for method in ("awq", "rtn")
    ]
    assert errors[0] < 0.9 * errors[1]


def test_few_tokens_leave_the_inner_channels_alone() -> None:
    experts, inputs = layer_experts(), outlier_inputs(200)
    layer, nearest = awq_layer(experts, inputs, D, 201), rtn_layer(experts, inputs, D)
    assert layer.fallback.all() and torch.equal(layer.down.codes, nearest.down.codes)
    assert not torch.equal(awq_layer(experts, inputs, D, 1).down.codes, nearest.down.codes)


def stored(spec: ModelSpec, directory: Path) -> Int4Experts:
    """AWQ experts of `spec`, written to `directory`."""
    layers = []
    for layer in range(spec.num_moe_layers):
        shapes = ((spec.expert_inter, spec.hidden),) * 2 + ((spec.hidden, spec.expert_inter),)
        experts = LayerExperts(*(random(spec.num_experts, *s, seed=10 * layer + i) for i, s in enumerate(shapes)))
        hidden = random(100, spec.hidden, seed=layer) * torch.arange(1, spec.hidden + 1)
        routing = torch.rand(100, spec.num_experts, generator=torch.Generator().manual_seed(layer)).topk(2).indices
        layers.append(awq_layer(experts, LayerInputs(hidden, routing), 16, 1))

    gate, up, down = (stack([getattr(layer, name) for layer in layers]) for name in PROJECTIONS)
    scales = torch.stack([layer.input_scales for layer in layers if layer.input_scales is not None])
    stored = Int4Experts(gate, up, down, "awq", 0, scales)
    write_directory(directory, stored, spec, 16)
    return stored


def test_directory_round_trip_and_what_a_draft_makes_of_it(spec: ModelSpec, tmp_path: Path) -> None:
    experts = stored(spec, tmp_path)
    read = read_directory(tmp_path, spec)
    assert read.method == "awq" and read.input_scales is not None and experts.input_scales is not None
    assert torch.equal(read.input_scales, experts.input_scales) and torch.equal(read.up.codes, experts.up.codes)
    draft = DraftExperts(read, torch.float32, "cpu")
    gate = experts.gate.dequantize() * experts.input_scales[:, None, None]
    assert torch.equal(draft.gate_up[:, :, : spec.expert_inter], gate)
    assert torch.equal(draft.down_t, experts.down.dequantize().transpose(2, 3))


def test_input_scales_must_be_there_and_positive(spec: ModelSpec, tmp_path: Path) -> None:
    stored(spec, tmp_path)
    name = "model.layers.2.mlp.experts.input_scales"
    tensors = load_file(tmp_path / SINGLE_FILE)
    tensors[name][3] = 0
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(SpecterError, match=name):
        read_directory(tmp_path, spec)
    del tensors[name]
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(SpecterError, match=f"lacks {name}"):
        read_directory(tmp_path, spec)
