"""AWQ for the routed experts of one layer (Lin et al., arXiv 2306.00978, section 3.2).

Channels with large inputs get finer steps: W' = W diag(s) is rounded and reads x / s, with s_i = a_i^alpha for the
mean magnitude a_i of channel i. A grid search picks alpha by the output error |(Q(W') / s - W) X|^2 = tr(D H D^T),
H = X X^T. alpha = 0 is round-to-nearest, so the result is never worse.

1 / s (docs/decisions/0011) is folded into the rows of `up` for `down`, whose input is gate times up, so codes and
scales stay plain. For `gate` and `up` it is one vector per layer: their input is a norm's output that the router, the
shared experts and the target read too. Scales are not clipped, unlike in the published code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specter.quantize.layer import Int4Layer, LayerExperts, LayerInputs, collect_hessians
from specter.quantize.rtn import quantize_rtn

ALPHAS = tuple(step / 20 for step in range(20))


def channel_scales(magnitudes: Tensor, alpha: float) -> Tensor:
    """s of each channel, [..., in] of mean magnitudes [..., in]; sqrt(max * min) is 1. Dead channels get a floor."""
    floor = magnitudes.amax(-1, keepdim=True).mul(1e-4).clamp(min=1e-20)
    scales = magnitudes.maximum(floor).pow(alpha)
    return scales / (scales.amax(-1, keepdim=True) * scales.amin(-1, keepdim=True)).sqrt()


def rounding_error(weights: Tensor, hessians: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """tr(D H D^T), D = Q(W diag(s)) diag(1 / s) - W: [..., out, in], [..., in, in], [..., in] -> [...]."""
    scaled = weights * scales[..., None, :]
    error = quantize_rtn(scaled, group_size).dequantize() / scales[..., None, :] - weights
    return ((error @ hessians) * error).sum((-2, -1))


def search(weights: Tensor, hessians: Tensor, magnitudes: Tensor, group_size: int, *, shared: bool) -> Tensor:
    """The best s of each matrix of `weights` fp32 [E, out, in], [E, in]; `shared`: one for all of them, [in].

    Args:
        hessians: sums of x x^T over each matrix' inputs, [E, in, in].
        magnitudes: mean |x| of each channel, [E, in], or [in] if `shared`.
    """
    best = channel_scales(magnitudes, 0.0)
    least = torch.full(weights.shape[:1], torch.inf, device=weights.device)
    for alpha in ALPHAS:
        scales = channel_scales(magnitudes, alpha)
        error = rounding_error(weights, hessians, scales.expand(len(weights), -1), group_size)
        error = error.sum().expand_as(least) if shared else error
        better = error < least
        best = torch.where(better[0] if shared else better[:, None], scales, best)
        least = torch.where(better, error, least)
    return best


def awq_layer(experts: LayerExperts, inputs: LayerInputs, group: int, min_tokens: int) -> Int4Layer:
    """The channels of `down` of an expert with fewer than `min_tokens` calibration tokens are not scaled."""
    tokens, hessians = inputs.counts(len(experts.gate)), collect_hessians(experts, inputs)
    fallback = tokens < min_tokens
    magnitudes = hessians.inner_magnitudes.clone()
    magnitudes[fallback.to(magnitudes.device)] = 1
    gate_up, down = torch.cat([experts.gate, experts.up], 1).float(), experts.down.float()
    inner = search(down, hessians.inner, magnitudes, group, shared=False)
    outer = search(gate_up, hessians.hidden, inputs.hidden.float().abs().mean(0), group, shared=True)
    gate, up = (gate_up * outer).chunk(2, dim=1)
    return Int4Layer(
        quantize_rtn(gate, group),
        quantize_rtn(up / inner[..., None], group),  # a factor of a row changes only its scales
        quantize_rtn(down * inner[:, None, :], group),
        tokens,
        fallback,
        1 / outer,
    )
