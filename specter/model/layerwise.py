"""The target one layer at a time, over whole sequences at once: for calibration and for the fidelity study.

Weights are read from the checkpoint layer by layer and dropped again, so a full-size model needs the room of one layer
plus the hidden states. fp32, without fixed tiles and KV cache: numbers, not bits, are those of the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.kernels import gated
from specter.model.attention import LATENT_NORM_EPS, RotaryPairs
from specter.model.routing import top_k
from specter.model.weights import TensorSource, load_layer

SEQUENCES_AT_ONCE = 8  # bounds the memory of attention and of a wide dense layer


class Source(TensorSource, Protocol):
    """A `Checkpoint`, or an `InflatedCheckpoint`."""

    def experts(self, layer: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention's operands of some sequences; W, V as in `AttentionWeights`."""

    queries: Tensor  # [B, H, T, W]
    keys: Tensor  # [B, Hk, T, W]
    values: Tensor  # [B, Hk, T, V]


@dataclass(frozen=True, slots=True)
class Mixed:
    """What an MoE layer's experts read, and what their sum is added to."""

    hidden: Tensor  # [B, T, D], behind the norm
    base: Tensor  # [B, T, D], the residual stream and the shared experts
    logits: Tensor  # [B, T, E], the router's
    gains: Tensor  # [B, T, k]
    routing: Tensor  # int64 [B, T, k], in rank order


class TargetLayer:
    """One layer without its routed experts, on `device`; sequences have `length` tokens at most."""

    def __init__(self, source: Source, index: int, length: int, device: torch.device | str) -> None:
        def place(tensor: Tensor) -> Tensor:
            return tensor.to(device, torch.float32).contiguous()

        self.spec = source.spec
        self.is_dense = index < self.spec.num_dense_layers
        self._weights = load_layer(source, index, place)
        self._turns = RotaryPairs(self.spec, length, torch.float32, device).turns

    def heads(self, x: Tensor) -> Heads:
        """Of states [B, T, D]: rotated queries and keys (with the softmax scale), and values."""
        spec = self.spec
        width = spec.kv_lora + spec.rope_dim
        wide = F.rms_norm(x, (spec.hidden,), None, spec.norm_eps) @ self._weights.attention.into
        heads = wide.unflatten(-1, (-1, width))
        latent = heads[:, :, spec.num_heads, : spec.kv_lora]
        latent.copy_(F.rms_norm(latent, (spec.kv_lora,), None, LATENT_NORM_EPS))
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * self._turns[: x.shape[1], None]).flatten(-2).transpose(1, 2)
        keys = turned[:, spec.num_heads :]
        return Heads(turned[:, : spec.num_heads], keys, keys[..., : spec.kv_lora])

    def attend(self, x: Tensor, heads: Heads, mask: Tensor | None = None) -> Tensor:
        """x plus attention; causal, or by a boolean mask [T, keys] that says what is seen."""
        num_heads, value_width = heads.queries.shape[1], heads.values.shape[-1]
        keys, values = (part.expand(-1, num_heads, -1, -1) for part in (heads.keys, heads.values))
        values = F.pad(values, (0, heads.queries.shape[-1] - value_width))  # the fast kernels want one head width
        context = F.scaled_dot_product_attention(heads.queries, keys, values, mask, is_causal=mask is None, scale=1.0)
        return x + context[..., :value_width].transpose(1, 2).flatten(2) @ self._weights.attention.out

    def dense(self, x: Tensor) -> Tensor:
        """The output [B, T, D] of a dense layer, whose states behind attention are x."""
        return x + gated(self._normed(x) @ self._weights.gate_up) @ self._weights.down

    def mix(self, x: Tensor) -> Mixed:
        """What an MoE layer makes of states x [B, T, D] behind attention, up to its routed experts."""
        spec = self.spec
        hidden = self._normed(x)
        wide = hidden @ self._weights.gate_up
        base = x + gated(wide[..., spec.num_experts :]) @ self._weights.down
        logits = wide[..., : spec.num_experts]
        gains, routing = top_k(logits, spec.top_k)
        return Mixed(hidden, base, logits, gains * spec.routed_scaling, routing)

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.spec.hidden,), self._weights.norm, self.spec.norm_eps)


def embed(source: Source, tokens: Tensor, device: torch.device | str) -> list[Tensor]:
    """States that enter layer 0: tokens int64 [sequences, T] as batches fp32 [B, T, D]."""
    embedding = source.tensor("model.embed_tokens.weight").to(device)
    return [F.embedding(part, embedding).float() for part in tokens.to(device).split(SEQUENCES_AT_ONCE)]


class TargetHead:
    """The final norm and the head, on `device`."""

    def __init__(self, source: Source, device: torch.device | str) -> None:
        self._spec = source.spec
        self._head = (source.tensor("lm_head.weight").float() * source.tensor("model.norm.weight")).to(device)

    def logits(self, x: Tensor) -> Tensor:
        """Of final states [rows, D]: [rows, V]."""
        return F.rms_norm(x, (self._spec.hidden,), None, self._spec.norm_eps) @ self._head.T
