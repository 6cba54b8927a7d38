"""Round-to-nearest and GPTQ on matrices alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specter.codecs.int4 import Int4Matrices
from specter.errors import SpecterError
from specter.quantize.gptq import quantize_gptq
from specter.quantize.rtn import fit_grid, group_of, quantize_rtn


def correlated_inputs(num_rows: int, width: int, seed: int) -> Tensor:
    """Inputs [num_rows, width] whose spectrum falls as 1 / i."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(99)))
    strengths = 1 / torch.arange(1, width + 1)
    return torch.randn(num_rows, width, generator=generator) * strengths @ basis


def random_weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def output_error(quantised: Int4Matrices, weights: Tensor, inputs: Tensor) -> float:
    exact = inputs @ weights.mT
    return float((inputs @ quantised.dequantize().mT - exact).norm() / exact.norm())


# -- round to nearest -----------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), width=st.sampled_from([8, 32, 64, 128, 256]), exponent=st.integers(-2, 4))
@settings(max_examples=40, deadline=None)
def test_rtn_is_off_by_half_a_step_at_most(seed: int, width: int, exponent: int) -> None:
    weights = random_weights(3, 16, width, seed=seed) * 10.0**exponent
    quantised = quantize_rtn(weights, 128)
    steps = quantised.scales.float().repeat_interleave(quantised.group, -1)
    # rounding the scale to fp16 may move the outermost level a little further away
    assert ((quantised.dequantize() - weights).abs() <= steps * 0.51).all()
    assert (quantised.zeros == 8).all()


@given(seed=st.integers(0, 10**6), shift=st.floats(-0.3, 0.3))
@settings(max_examples=40, deadline=None)
def test_asymmetric_rtn_covers_its_range(seed: int, shift: float) -> None:
    weights = random_weights(16, 64, seed=seed) + shift
    quantised = quantize_rtn(weights, 64, sym=False)
    steps = quantised.scales.float().repeat_interleave(quantised.group, -1)
    assert ((quantised.dequantize() - weights).abs() <= steps * 1.05).all()  # the zero is rounded as well
    assert int(quantised.zeros.min()) >= 1 and int(quantised.zeros.max()) <= 15


def test_codes_belong_to_the_stored_scales() -> None:
    weights = random_weights(64, 128)
    quantised = quantize_rtn(weights, 128)
    again = (weights / quantised.scales.float() + 8).round().clamp(0, 15).to(torch.uint8)
    assert torch.equal(quantised.codes, again)


def test_the_scale_rule_beats_absmax_rules() -> None:
    weights = random_weights(2000, 64)
    absmax = weights.abs().amax(-1, keepdim=True)

    def error(scales: Tensor) -> float:
        scales = scales.half().float()
        return float(((weights / scales).round().clamp(-8, 7) * scales - weights).norm())

    ours = float((quantize_rtn(weights, 64).dequantize() - weights).norm())
    assert ours < 0.97 * error(absmax / 7.5) < error(absmax / 7)


def test_a_row_of_zeros_stays_zero() -> None:
    quantised = quantize_rtn(torch.zeros(8, 64), 64)
    assert (quantised.scales > 0).all()
    assert (quantised.dequantize() == 0).all()


def test_short_rows_are_one_group() -> None:
    assert group_of(64, 128) == 64
    assert quantize_rtn(random_weights(8, 32), 128).scales.shape == (8, 1)


@pytest.mark.parametrize(("row", "group"), [(200, 128), (64, 48), (64, 0)])
def test_a_group_that_does_not_divide_the_row_is_refused(row: int, group: int) -> None:
    with pytest.raises(SpecterError, match=str(group)):
        quantize_rtn(random_weights(8, row), group)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e6])
def test_weights_beyond_numbers_are_refused(bad: float) -> None:
    weights = random_weights(8, 32)
    weights[3, 4] = bad
    with pytest.raises(SpecterError, match="weights to quantise"):
        fit_grid(weights, 32)


# -- GPTQ --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("out", "width", "group"), [(64, 64, 128), (48, 256, 128), (32, 192, 64)])
def test_gptq_beats_rtn_on_correlated_inputs(out: int, width: int, group: int) -> None:
    weights = random_weights(2, out, width)
    seen, held_out = correlated_inputs(4 * width, width, seed=1), correlated_inputs(1000, width, seed=2)
    gptq = quantize_gptq(weights, (seen.T @ seen).expand(2, -1, -1), group)
    rtn = quantize_rtn(weights, group)
    assert output_error(gptq, weights, held_out) < 0.6 * output_error(rtn, weights, held_out)
    assert torch.equal(gptq.scales, rtn.scales)


def test_gptq_is_rtn_when_inputs_are_independent() -> None:
    weights = random_weights(3, 32, 96)
    diagonal = torch.diag(torch.arange(1, 97).float()).expand(3, -1, -1)
    gptq = quantize_gptq(weights, diagonal, 32)
    assert torch.equal(gptq.codes, quantize_rtn(weights, 32).codes)


def test_gptq_does_not_depend_on_the_block() -> None:
    weights = random_weights(2, 40, 128)
    seen = correlated_inputs(600, 128, seed=1)
    hessians = (seen.T @ seen).expand(2, -1, -1)
    one, many = (quantize_gptq(weights, hessians, 64, block=block) for block in (128, 24))
    assert (one.codes != many.codes).float().mean() < 0.002  # summation order may turn a tie


def test_gptq_solves_for_the_columns_not_yet_rounded() -> None:
    """Against the textbook form: after each column, least squares over the remaining ones."""
    weights = random_weights(6, 8).double()
    seen = correlated_inputs(100, 8, seed=1).double()
    hessian = seen.T @ seen
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(8)
    scale = fit_grid(weights, 8)[0].double()
    current, codes = weights.clone(), torch.zeros(6, 8, dtype=torch.uint8)
    for column in range(8):
        level = (current[:, column : column + 1] / scale).round().clamp(-8, 7)
        codes[:, column] = (level.flatten() + 8).to(torch.uint8)
        error = level * scale - current[:, column : column + 1]
        rest = slice(column + 1, 8)
        current[:, rest] -= error * torch.linalg.solve(hessian[rest, rest], hessian[rest, column])
    assert torch.equal(quantize_gptq(weights, seen.T @ seen, 8).codes, codes)


def test_batched_equals_one_by_one() -> None:
    weights = random_weights(5, 24, 64)
    hessians = torch.stack([x.T @ x for x in (correlated_inputs(200, 64, seed) for seed in range(5))])
    batched = quantize_gptq(weights, hessians, 64)
    single = torch.stack([quantize_gptq(weights[i], hessians[i], 64).codes for i in range(5)])
    assert (batched.codes != single).float().mean() < 0.002
    assert (batched.codes[0] != quantize_gptq(weights[0], hessians[1], 64).codes).float().mean() > 0.01


def test_dead_channels_and_dead_experts_are_rounded_to_nearest() -> None:
    weights = random_weights(2, 32, 64)
    seen = correlated_inputs(400, 64, seed=1)
    seen[:, [3, 40]] = 0
    hessians = torch.stack([seen.T @ seen, torch.zeros(64, 64)])
    gptq, rtn = quantize_gptq(weights, hessians, 64), quantize_rtn(weights, 64)
    assert torch.equal(gptq.codes[0][:, [3, 40]], rtn.codes[0][:, [3, 40]])
    assert not torch.equal(gptq.codes[0], rtn.codes[0])
    assert torch.equal(gptq.codes[1], rtn.codes[1])
