"""The target one layer at a time over whole sequences, in fp32, for calibration and the fidelity study.

Weights are read layer by layer and dropped, so a full-size model needs memory for one layer and the hidden states.
Without fixed tiles and KV cache: equal to the decoder up to rounding, not bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.kernels.reference import gated
from specter.models.elementwise import add_bias, norm
from specter.models.routing import route
from specter.models.weights import LATENT_NORM_EPS, RotaryPairs, TensorSource, load_head, load_layer

SEQUENCES_AT_ONCE = 8  # bounds the memory of attention and of a wide dense layer


class Source(TensorSource, Protocol):
    """A `Checkpoint`, or an `InflatedCheckpoint`."""

    def experts(self, layer: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Heads:
    """Operands of attention; W, V as in `AttentionWeights`."""

    queries: Tensor  # [B, H, T, W]
    keys: Tensor  # [B, Hk, T, W]
    values: Tensor  # [B, Hk, T, V]


@dataclass(frozen=True, slots=True)
class Routed:
    """The input of a MoE layer's routed experts, and the base to which their sum is added."""

    hidden: Tensor  # [B, T, D], after the norm
    base: Tensor  # [B, T, D], residual stream and shared experts
    logits: Tensor  # [B, T, E], the router's
    gains: Tensor  # [B, T, k]
    routing: Tensor  # int64 [B, T, k], in rank order


class TargetLayer:
    """One layer without its routed experts, on `device`, for sequences of at most `length` tokens."""

    def __init__(self, source: Source, index: int, length: int, device: torch.device | str) -> None:
        def place(tensor: Tensor) -> Tensor:
            return tensor.to(device, torch.float32).contiguous()

        self.spec = source.spec
        self.is_dense = index < self.spec.num_dense_layers
        self._weights = load_layer(source, index, place)
        self._turns = RotaryPairs(self.spec, length, torch.float32, device).turns

    def heads(self, x: Tensor) -> Heads:
        """Rotated queries and keys (with the softmax scale) and values of states [B, T, D]."""
        spec, attention = self.spec, self._weights.attention
        wide = add_bias(norm(spec, x) @ attention.into, attention.into_bias)
        num_rotated = (spec.num_heads + spec.num_key_heads) * spec.key_width
        heads = wide[..., :num_rotated].unflatten(-1, (-1, spec.key_width))
        if spec.is_latent:
            latent = heads[:, :, spec.num_heads, : spec.kv_lora]
            latent.copy_(F.rms_norm(latent, (spec.kv_lora,), None, LATENT_NORM_EPS))
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * self._turns[: x.shape[1], None]).flatten(-2).transpose(1, 2)
        queries, keys = turned[:, : spec.num_heads], turned[:, spec.num_heads :]
        if spec.is_latent:
            return Heads(queries, keys, keys[..., : spec.kv_lora])
        return Heads(queries, keys, wide[..., num_rotated:].unflatten(-1, (-1, spec.value_width)).transpose(1, 2))

    def attend(self, x: Tensor, heads: Heads, mask: Tensor | None = None) -> Tensor:
        """x plus attention; causal, or by a boolean mask [T, keys] of visible keys."""
        group = self.spec.num_heads // self.spec.num_key_heads
        value_width, attention = heads.values.shape[-1], self._weights.attention
        keys, values = (part.repeat_interleave(group, dim=1) for part in (heads.keys, heads.values))
        values = F.pad(values, (0, heads.queries.shape[-1] - value_width))  # fast kernels need one head width
        context = F.scaled_dot_product_attention(heads.queries, keys, values, mask, is_causal=mask is None, scale=1.0)
        out = context[..., :value_width].transpose(1, 2).flatten(2) @ attention.out
        return x + add_bias(out, attention.out_bias)

    def dense(self, x: Tensor) -> Tensor:
        """The output [B, T, D] of a dense layer from states x after attention."""
        return x + gated(self._normed(x) @ self._weights.wide) @ self._weights.down

    def route(self, x: Tensor) -> Routed:
        """Router and shared experts of a MoE layer, on states x [B, T, D] after attention."""
        spec = self.spec
        hidden = self._normed(x)
        wide = hidden @ self._weights.wide
        shared = gated(wide[..., spec.num_experts + spec.shared_gate :]) @ self._weights.down
        if spec.shared_gate:
            shared = shared * wide[..., spec.num_experts, None].sigmoid()
        logits = wide[..., : spec.num_experts]
        gains, routing = (part.unflatten(0, logits.shape[:-1]) for part in route(spec, logits.flatten(0, -2)))
        return Routed(hidden, x + shared, logits, gains, routing)

    def _normed(self, x: Tensor) -> Tensor:
        return norm(self.spec, x, self._weights.norm, self._weights.norm_bias)


def embed(source: Source, tokens: Tensor, device: torch.device | str) -> list[Tensor]:
    """Inputs of layer 0: tokens int64 [sequences, T] as batches fp32 [B, T, D]."""
    embedding = source.tensor("model.embed_tokens.weight").to(device)
    return [F.embedding(part, embedding).float() for part in tokens.to(device).split(SEQUENCES_AT_ONCE)]


class TargetHead:
    """The final norm and the head, on `device`."""

    def __init__(self, source: Source, device: torch.device | str) -> None:
        self._spec = source.spec
        head, bias = load_head(source)
        self._head = head.t().to(device, torch.float32).contiguous()
        self._bias = None if bias is None else bias.to(device, torch.float32)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [rows, V] of final states [rows, D]."""
        return add_bias(norm(self._spec, x) @ self._head, self._bias)
