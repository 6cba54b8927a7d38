"""Differentiable attention over whole sequences, without tiles and KV cache; matrices are [out, in]."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.models.rope import rotate_halves, softmax_scale
from specter.models.spec import ModelSpec
from specter.models.weights import LATENT_NORM_EPS


def gated(h: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A gated MLP: h [..., D] -> [..., D]."""
    return F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def causal_attention(spec: ModelSpec, weights: Mapping[str, Tensor], h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Causal self-attention of normalised states h [B, T, D] -> [B, T, D].

    Args:
        weights: q, o, and kv_a, kv_norm, kv_b (latents) or k, v; optionally q_bias, k_bias, v_bias, o_bias.
        cos: [T, rope_dim / 2], and sin likewise.
    """
    cos, sin = cos[: h.shape[1], None], sin[: h.shape[1], None]
    make = _latent_heads if spec.is_latent else _plain_heads
    q, k, v = (part.transpose(1, 2) for part in make(spec, weights, h, cos, sin))
    # Flash attention needs one head width: v is zero-padded to that of q and k.
    v = F.pad(v, (0, spec.qk_dim - spec.v_dim))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale(spec))
    return F.linear(out[..., : spec.v_dim].transpose(1, 2).flatten(2), weights["o"], weights.get("o_bias"))


def _latent_heads(
    spec: ModelSpec, weights: Mapping[str, Tensor], h: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, T, H, ...] of multi-head latent attention (arXiv 2405.04434, 2.1.2)."""
    q = F.linear(h, weights["q"]).unflatten(-1, (spec.num_heads, spec.qk_dim))
    q_nope, q_rope = q.split((spec.nope_dim, spec.rope_dim), dim=-1)
    latent, k_rope = F.linear(h, weights["kv_a"]).split((spec.kv_lora, spec.rope_dim), dim=-1)
    latent = F.rms_norm(latent.float(), (spec.kv_lora,), weights["kv_norm"], LATENT_NORM_EPS).to(h.dtype)
    kv = F.linear(latent, weights["kv_b"]).unflatten(-1, (spec.num_heads, -1))
    k_nope, v = kv.split((spec.nope_dim, spec.v_dim), dim=-1)
    q_rope = _rotate_pairs(q_rope.float(), cos, sin).to(h.dtype)
    k_rope = _rotate_pairs(k_rope[:, :, None].float(), cos, sin).to(h.dtype).expand(-1, -1, spec.num_heads, -1)
    return torch.cat((q_nope, q_rope), dim=-1), torch.cat((k_nope, k_rope), dim=-1), v


def _plain_heads(
    spec: ModelSpec, weights: Mapping[str, Tensor], h: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, T, H, rope_dim]; keys and values are repeated for the queries that share them."""
    q, k, v = (
        F.linear(h, weights[name], weights.get(f"{name}_bias")).unflatten(-1, (-1, spec.rope_dim)) for name in "qkv"
    )
    q, k = (rotate_halves(part.float(), cos, sin).to(h.dtype) for part in (q, k))
    group = spec.num_heads // spec.num_kv_heads
    return q, k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates interleaved pairs of x [..., rope_dim]; cos and sin broadcast over [..., rope_dim / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
