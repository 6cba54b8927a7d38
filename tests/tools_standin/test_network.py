"""The training network is transformers' model of every family, and a step of it learns."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.fx

from specter.models.names import canonical
from specter.models.routing import route
from specter.models.spec import ModelSpec
from tests.parity.oracle import build_oracle
from tools.standin.checkpoint import to_hub
from tools.standin.network import (
    ROUTED,
    Network,
    experts_dense,
    experts_grouped,
    init_weights,
    int4_step,
    near_tie_loss,
    noisy_experts,
    round_to_int4,
    train_route,
)
from tools.standin.specs import NARROW as SHIPPED
from tools.standin.trainer import CPU_VARIANT, Trainer, TrainSettings, learning_rate, train

TINY = dataclasses.replace(
    SHIPPED["deepseek_v2_lite"], num_layers=3, num_experts=8, top_k=3, vocab=200, kv_lora=32, expert_inter=16
)


NARROW = {
    "deepseek": TINY,
    "qwen": dataclasses.replace(SHIPPED["qwen1_5_moe"], num_layers=2, num_experts=8, vocab=200, expert_inter=16),
    "phi": dataclasses.replace(SHIPPED["phi3_5_moe"], num_layers=2, num_experts=8, vocab=200, expert_inter=16),
}
every_family = pytest.mark.parametrize("spec", NARROW.values(), ids=NARROW.keys())


@every_family
def test_logits_equal_transformers(spec: ModelSpec) -> None:
    weights = init_weights(spec, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name in weights:  # gains other than 1 and biases other than 0, so that a forgotten one shows
        if "norm" in name or name.endswith("bias"):
            weights[name] = weights[name] + 0.3 * torch.randn(weights[name].shape, generator=generator)
    reference = build_oracle(spec)
    named = to_hub(weights, spec)
    state = {name: named[canonical(spec.family, name)] for name in reference.state_dict()}
    reference.load_state_dict(state, strict=True)
    tokens = torch.arange(2 * 40).view(2, 40) % spec.vocab
    with torch.no_grad():
        expected = reference(tokens).logits
        actual, ids = Network(spec, 40, "cpu").logits(weights, tokens)
    assert ids.shape == (spec.num_moe_layers, 80, spec.top_k)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@every_family
def test_training_routes_like_decoding(spec: ModelSpec) -> None:
    logits = torch.randn(200, spec.num_experts, generator=torch.Generator().manual_seed(4))
    for expected, actual in zip(route(spec, logits), train_route(spec, logits), strict=True):
        torch.testing.assert_close(actual, expected)


def test_the_router_of_sparsemixer_learns_from_the_softmaxes_without_the_mask() -> None:
    """Its own gradient is 0 wherever one expert is alone within the mask."""
    spec = dataclasses.replace(NARROW["phi"], num_experts=4)
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0]], requires_grad=True)
    assert torch.equal(route(spec, logits)[0], torch.ones(1, 2))
    goal = torch.tensor([[1.0, -0.5]])
    (train_route(spec, logits)[0] * goal).sum().backward()
    plain = logits.detach().clone().requires_grad_()
    first, second = plain.softmax(-1)[0, 0], plain[:, 1:].softmax(-1)[0, 0]
    (first - 0.5 * second).backward()
    torch.testing.assert_close(logits.grad, plain.grad)
    assert logits.grad is not None and bool(logits.grad.ne(0).all())


def test_a_near_tie_of_sparsemixer_costs_its_missing_lead() -> None:
    """Leads of 10 % of 2.0 and of 0.0: half and all of the 20 % are missing; a lead of 20 % is free."""
    logits = torch.tensor([[2.0, 1.8, 1.8, 0.0], [2.0, 1.0, 0.5, 0.0]], requires_grad=True)
    loss = near_tie_loss(dataclasses.replace(NARROW["phi"], num_experts=4), logits)
    torch.testing.assert_close(loss, torch.tensor((0.5 + 1.0) / 4))
    loss.backward()
    assert logits.grad is not None and bool(logits.grad[1].eq(0).all())
    assert logits.grad[0, 0] < 0 < logits.grad[0, 1:3].max()
    assert near_tie_loss(TINY, logits) == 0


def test_training_continues_from_given_weights() -> None:
    spec = dataclasses.replace(NARROW["phi"], num_layers=1)
    first = init_weights(spec, seed=3)
    trainer = Trainer(spec, TrainSettings(batch=2, length=16), "cpu", CPU_VARIANT, first)
    assert all(torch.equal(trainer.weights[name], weight) for name, weight in first.items())
    trainer.lr.fill_(1e-3)
    trainer.step(torch.arange(2 * 17).view(2, 17))
    assert not torch.equal(trainer.weights["head"], first["head"]) and not first["head"].requires_grad


@every_family
def test_a_layer_is_one_graph_that_serves_all_layers(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in it breaks torch.compile, as a captured training step needs."""
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(1)
        return graph

    compile_as_is = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_as_is(function, backend=backend, fullgraph=True))
    torch._dynamo.reset()
    spec = dataclasses.replace(spec, num_layers=spec.num_dense_layers + 3)
    weights = init_weights(spec, seed=1)
    tokens = torch.arange(2 * 40).view(2, 40) % spec.vocab
    expected, _ = Network(spec, 40, "cpu").logits(weights, tokens)
    actual, _ = Network(spec, 40, "cpu", compiled=True).logits(weights, tokens)
    torch.testing.assert_close(actual, expected)
    assert len(compiled) == 1 + bool(spec.num_dense_layers)


def test_grouped_experts_equal_dense_ones_with_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50, 16, generator=generator)
    gains = torch.rand(50, 3, generator=generator)
    ids = torch.stack([torch.randperm(7, generator=generator)[:3] for _ in gains])  # expert 7 stays without a row
    gate_up = 0.2 * torch.randn(8, 24, 16, generator=generator)
    down = 0.2 * torch.randn(8, 16, 12, generator=generator)
    results = []
    for experts in (experts_dense, experts_grouped):
        inputs = [tensor.clone().requires_grad_() for tensor in (rows, gains, gate_up, down)]
        out = experts(inputs[0], inputs[1], ids, inputs[2], inputs[3])
        out.square().sum().backward()
        results.append([out.detach(), *(tensor.grad for tensor in inputs)])
    for dense, grouped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, dense, rtol=1e-4, atol=1e-4)


@every_family
def test_training_lowers_the_loss_in_both_phases(spec: ModelSpec) -> None:
    settings = TrainSettings(batch=4, length=32, peak_lr=5e-3, consistency_frac=0.4, expert_clip=1.9)
    trainer = Trainer(spec, settings, "cpu", CPU_VARIANT)
    pattern = torch.arange(4000, dtype=torch.int32) * 7 % 50
    points: list[Any] = []
    checks: list[Any] = []
    steps = train(trainer, pattern, lambda _, p: checks.append(p), points.append, max_steps=30, report_every=10)
    assert steps == 30
    assert points[-1].loss < points[0].loss - 0.5
    assert points[0].consistency == 0.0 < _consistency(trainer, pattern)
    assert len(checks) == 10
    for name in ROUTED:
        weight = trainer.weights[name]
        assert (weight.abs().amax(-1) <= 2.0 * weight.square().mean(-1).sqrt()).all()


def _consistency(trainer: Trainer, tokens: torch.Tensor) -> float:
    trainer.step(tokens[: 4 * 33].view(4, 33).long(), consistent=True)
    return trainer.read_losses(1)[2]


def test_learning_rate_rises_then_falls_to_its_final_value() -> None:
    settings = TrainSettings()
    rates = [learning_rate(settings, progress / 100) for progress in range(101)]
    assert 0 < rates[0] < max(rates) <= settings.peak_lr
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(settings.final_lr)


def test_rounding_and_noise_stay_within_half_a_step() -> None:
    weights = init_weights(TINY, seed=3)
    noisy = noisy_experts(weights, torch.float32)
    for name in ROUTED:
        step = int4_step(weights[name])
        levels = round_to_int4(weights[name]) / step
        assert torch.equal(levels.round().clamp(-8, 7), levels.round())
        assert ((round_to_int4(weights[name]) - weights[name]).abs() <= 0.5001 * step).all()
        difference = (noisy[name] - weights[name]).abs()
        assert (difference <= 0.5001 * step).all() and (difference > 0.25 * step).any()
