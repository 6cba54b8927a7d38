"""Attention weights, one form for all families: groups of query heads share a key head.

Multi-head latent attention is absorbed (arXiv 2405.04434, 2.1.2): q·k = (W_uk^T q_nope)·c + q_pe·k_pe and
o = W_o W_uv (sum p c), so W_uk is folded into the query projection, W_uv into the output projection, and the single key
head is the cached latent with its rotary key. Norm gains, biases and the softmax scale are folded into the projections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specter.models.rope import interleave_halves, rotary_table, softmax_scale
from specter.models.spec import ModelSpec

LATENT_NORM_EPS = 1e-6  # of the published model, which ignores rms_norm_eps
Get = Callable[[str], Tensor]  # a layer's tensor by its name within the layer


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Folded projections; W is key_width, Hk the number of key heads, Vw value_width."""

    # [D, (H + Hk) * W (+ Hk * Vw)]: queries, keys, values. A latent's key is the latent and its rotary key; no values.
    into: Tensor
    into_bias: Tensor | None
    out: Tensor  # [H * Vw, D]
    out_bias: Tensor | None

    @classmethod
    def fold(cls, spec: ModelSpec, get: Get, place: Callable[[Tensor], Tensor]) -> AttentionWeights:
        """Folds a layer's matrices (each [out, in], hub layout) in fp64; `place` moves the results."""

        def wide(name: str) -> Tensor:
            return get(name).double()

        if spec.is_latent:
            rows, out = _absorb(spec, wide)
            bias = None
        else:
            rows, out, bias = _stack(spec, wide)
        if spec.layer_norm:
            shift = rows @ wide("input_layernorm.bias")
            bias = shift if bias is None else bias + shift
        return cls(
            into=place((rows * wide("input_layernorm.weight")).t()),
            into_bias=None if bias is None else place(bias),
            out=place(out),
            out_bias=place(wide("self_attn.o_proj.bias")) if spec.o_bias else None,
        )


def _absorb(spec: ModelSpec, get: Get) -> tuple[Tensor, Tensor]:
    heads, lora = spec.num_heads, spec.kv_lora
    q, kv_a, kv_b, o = (get(f"self_attn.{n}.weight") for n in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
    kv_norm = get("self_attn.kv_a_layernorm.weight")
    q_nope, q_pe = q.view(heads, spec.qk_dim, -1).split((spec.nope_dim, spec.rope_dim), dim=1)
    up_k, up_v = kv_b.view(heads, -1, lora).mul(kv_norm).split((spec.nope_dim, spec.v_dim), dim=1)
    queries = torch.cat((up_k.transpose(1, 2) @ q_nope, q_pe), dim=1).flatten(0, 1) * softmax_scale(spec)
    out = o.view(-1, heads, spec.v_dim).transpose(0, 1) @ up_v  # [H, D, kv_lora]
    return torch.cat((queries, kv_a)), out.transpose(1, 2).reshape(heads * lora, -1)


def _stack(spec: ModelSpec, get: Get) -> tuple[Tensor, Tensor, Tensor | None]:
    def rows(part: str) -> Tensor:
        q, k, v = (get(f"self_attn.{name}_proj.{part}") for name in "qkv")
        q = interleave_halves(q, spec.rope_dim) * softmax_scale(spec)
        return torch.cat((q, interleave_halves(k, spec.rope_dim), v))

    return rows("weight"), get("self_attn.o_proj.weight").t(), rows("bias") if spec.qkv_bias else None


class RotaryPairs:
    """Rotations of channel pairs by position, complex [capacity, W / 2]; 1 for a latent's channels."""

    def __init__(self, spec: ModelSpec, capacity: int, dtype: torch.dtype, device: torch.device | str) -> None:
        cos, sin = rotary_table(spec, capacity)
        turns = torch.ones(capacity, spec.key_width // 2, dtype=torch.complex64)
        turns[:, spec.kv_lora // 2 :] = torch.complex(cos, sin)
        self.turns = turns.to(device=device, dtype=dtype.to_complex())
