"""GPTQ for a batch of matrices at once (Frantar et al., arXiv 2210.17323, section 3).

Columns are rounded from left to right. After column j is rounded with the error e_j, the remaining columns compensate
by  w_{>j} -= e_j / U_jj * U_{j,>j},  where H = X^T X is the Hessian of the output error and U the upper Cholesky factor
of its inverse, H^-1 = U^T U. The update is immediate within a block of columns, one matrix product per block beyond.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from specter.codecs.int4 import Int4Matrices
from specter.quantize.layer import Int4Layer, LayerExperts, LayerInputs, collect_hessians
from specter.quantize.rtn import fit_grid, group_of, nearest_codes, rtn_layer

DAMPING = 0.01  # of the mean diagonal, added to the diagonal
BLOCK = 128


def gptq_layer(experts: LayerExperts, inputs: LayerInputs, group: int, min_tokens: int) -> Int4Layer:
    """An expert with fewer than `min_tokens` calibration tokens is rounded to nearest: GPTQ would be worse."""
    layer = rtn_layer(experts, inputs, group)
    fallback = layer.tokens < min_tokens
    covered = (~fallback).nonzero().flatten().to(experts.gate.device)
    if len(covered):
        hessians = collect_hessians(experts, inputs)
        inter = experts.gate.shape[1]
        gate_up = torch.cat([experts.gate[covered], experts.up[covered]], 1)  # one input, so one Hessian
        codes = quantize_gptq(gate_up, hessians.hidden[covered], group).codes
        layer.gate.codes[covered], layer.up.codes[covered] = codes[:, :inter], codes[:, inter:]
        layer.down.codes[covered] = quantize_gptq(experts.down[covered], hessians.inner[covered], group).codes
    return dataclasses.replace(layer, fallback=fallback)


def quantize_gptq(weights: Tensor, hessians: Tensor, group_size: int, block: int = BLOCK) -> Int4Matrices:
    """Quantizes `weights` [..., out, in] for a small output error over the calibration inputs.

    Args:
        weights: any floating type; computed in fp32.
        hessians: sums of x x^T over each matrix' own inputs, [..., in, in]; the scale does not matter. A channel that
            is 0 in all inputs is rounded to nearest.
        group_size: input channels per group, or the whole row where that is shorter.

    Raises SpecterError: the group does not divide `in`, or a weight is not finite.
    """
    group = group_of(weights.shape[-1], group_size)
    scales, zeros = fit_grid(weights, group)
    factor = inverse_factor(hessians)
    remaining = weights.float().mT.contiguous()  # [..., in, out]: a column is contiguous
    codes = torch.empty_like(remaining, dtype=torch.uint8)
    columns = weights.shape[-1]
    for start in range(0, columns, block):
        end = min(start + block, columns)
        errors = torch.empty_like(remaining[..., start:end, :])
        for column in range(start, end):
            scale, zero = scales[..., column // group].float(), zeros[..., column // group].float()
            weight = remaining[..., column, :]
            code = nearest_codes(weight, scale, zero)
            codes[..., column, :] = code.to(torch.uint8)
            error = (weight - scale * (code - zero)) / factor[..., column, column, None]
            errors[..., column - start, :] = error
            below = factor[..., column, column + 1 : end, None]
            remaining[..., column + 1 : end, :].addcmul_(below, error[..., None, :], value=-1)
        remaining[..., end:, :] -= factor[..., start:end, end:].mT @ errors
    return Int4Matrices(codes.mT.contiguous(), scales, zeros, group)


def inverse_factor(hessians: Tensor) -> Tensor:
    """The upper triangular U of each damped inverse Hessian, H^-1 = U^T U; fp32 [..., in, in].

    H = R R^T with R upper triangular is a Cholesky factor from the last channel to the first, and U = R^-1. In fp64:
    with few calibration tokens the undamped Hessian is singular. One matrix at a time: batched solvers are slow for few
    large matrices.
    """
    factors = torch.empty_like(hessians, dtype=torch.float32)
    identity = torch.eye(hessians.shape[-1], dtype=torch.float64, device=hessians.device)
    matrices = hessians.flatten(0, -3) if hessians.dim() > 2 else hessians[None]
    for hessian, factor in zip(matrices, factors.view_as(matrices), strict=True):
        damped = hessian.double()
        mean = damped.diagonal().mean()
        damped = damped + torch.where(mean > 0, mean, 1) * DAMPING * identity
        backwards = torch.linalg.cholesky(damped.flip(0, 1))
        factor.copy_(torch.linalg.solve_triangular(backwards.flip(0, 1), identity, upper=True))
    return factors
