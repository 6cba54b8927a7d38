"""The training network is transformers' DeepSeek-V2, and a step of it learns."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from specter.model.spec import DEEPSEEK_V2_LITE_NARROW
from specter.standin.checkpoint import to_hub
from specter.standin.network import (
    ROUTED,
    Network,
    experts_dense,
    experts_grouped,
    init_weights,
    int4_step,
    noisy_experts,
    round_to_int4,
)
from specter.standin.trainer import CPU_VARIANT, Trainer, TrainSettings, learning_rate, train

TINY = dataclasses.replace(
    DEEPSEEK_V2_LITE_NARROW, num_layers=3, num_experts=8, top_k=3, vocab=200, kv_lora=32, expert_inter=16
)


def test_logits_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    weights = init_weights(TINY, seed=1)
    for name in weights:  # gains other than 1, so that a forgotten norm shows
        if "norm" in name:
            weights[name] = 1 + 0.3 * torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(2))
    reference = transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**TINY.to_config())).float().eval()
    reference.load_state_dict(to_hub(weights, TINY), strict=True)
    tokens = torch.arange(2 * 40).view(2, 40) % TINY.vocab
    with torch.no_grad():
        expected = reference(tokens).logits
        actual, ids = Network(TINY, 40, "cpu").logits(weights, tokens)
    assert ids.shape == (TINY.num_moe_layers, 80, TINY.top_k)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


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


def test_training_lowers_the_loss_in_both_phases() -> None:
    settings = TrainSettings(batch=4, length=32, peak_lr=5e-3, consistency_frac=0.4, expert_clip=1.9)
    trainer = Trainer(TINY, settings, "cpu", CPU_VARIANT)
    pattern = torch.arange(4000, dtype=torch.int32) * 7 % 50
    points, checks = [], []
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
