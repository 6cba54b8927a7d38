"""The decoder's weights: folded ones shared by target and draft, and the draft's experts.

Attention has one form for all families: groups of query heads share a key head. Multi-head latent attention is absorbed
(arXiv 2405.04434, 2.1.2): q·k = (W_uk^T q_nope)·c + q_pe·k_pe and o = W_o W_uv (sum p c), so W_uk is folded into the
query projection, W_uv into the output projection, and the single key head is the cached latent with its rotary key.
Norm gains, biases and the softmax scale are folded into the projections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specter.codecs.int4 import Int4Experts
from specter.kernels.reference import gated
from specter.models.checkpoint import Checkpoint
from specter.models.names import mlp_names
from specter.models.rope import interleave_halves, rotary_table, softmax_scale
from specter.models.spec import ModelSpec

LATENT_NORM_EPS = 1e-6  # of the published model, which ignores rms_norm_eps
Get = Callable[[str], Tensor]  # a layer's tensor by its name within the layer


class TensorSource(Protocol):
    """A `Checkpoint`, or another source of its tensors."""

    spec: ModelSpec

    def tensor(self, name: str) -> Tensor: ...


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


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer without its routed experts; matrices are [in, out]. S is the width of its dense or shared MLP."""

    attention: AttentionWeights
    norm: Tensor  # gain [D] before the MLP
    norm_bias: Tensor | None
    wide: Tensor  # [D, 2S], or [D, E (+ 1) + 2S] in MoE layers: router, gate of the shared expert, gate, up
    router: Tensor  # of `wide`: [D, E], or [D, 0]
    down: Tensor  # [S, D]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights shared by target and draft."""

    embedding: Tensor  # [V, D]
    layers: list[LayerWeights]
    head: Tensor  # [D, V], the final norm's gain folded in
    head_bias: Tensor | None  # [V], the final norm's bias folded in

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> DecoderWeights:
        """Reads and folds a checkpoint's weights, layer by layer; `dtype` is float32 or float64."""

        def place(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype).contiguous()

        head, bias = load_head(checkpoint)
        return cls(
            embedding=place(checkpoint.tensor("model.embed_tokens.weight")),
            layers=[load_layer(checkpoint, layer, place) for layer in range(checkpoint.spec.num_layers)],
            head=place(head.t()),
            head_bias=None if bias is None else place(bias),
        )


def load_head(checkpoint: TensorSource) -> tuple[Tensor, Tensor | None]:
    """The head [V, D] with the final norm's gain folded in, and its bias [V] with the norm's, if any."""
    spec = checkpoint.spec
    head = checkpoint.tensor("model.embed_tokens.weight" if spec.tied else "lm_head.weight")
    bias = checkpoint.tensor("lm_head.bias") if spec.head_bias else None
    if spec.layer_norm:
        shift = head @ checkpoint.tensor("model.norm.bias")
        bias = shift if bias is None else bias + shift
    return head * checkpoint.tensor("model.norm.weight"), bias


def load_layer(checkpoint: TensorSource, layer: int, place: Callable[[Tensor], Tensor]) -> LayerWeights:
    """One layer's weights, folded; `place` moves each result."""
    spec = checkpoint.spec
    parts, down = mlp_names(spec, layer)

    def get(name: str) -> Tensor:
        return checkpoint.tensor(f"model.layers.{layer}.{name}")

    norm = get("post_attention_layernorm.weight")
    wide = place(torch.cat([get(part) for part in parts]).t())
    return LayerWeights(
        attention=AttentionWeights.fold(spec, get, place),
        norm=place(norm),
        norm_bias=place(get("post_attention_layernorm.bias")) if spec.layer_norm else None,
        wide=wide,
        router=wide[:, : 0 if layer < spec.num_dense_layers else spec.num_experts],
        down=place(get(down).t() if down else norm.new_empty(0, spec.hidden)),
    )


class DraftExperts:
    """The draft's routed experts, dequantized once: gate_up [Lm, E, 2F, D], down_t [Lm, E, F, D]."""

    def __init__(self, quantized: Int4Experts, dtype: torch.dtype, device: torch.device | str) -> None:
        gate, up = quantized.gate.dequantize(dtype), quantized.up.dequantize(dtype)
        if quantized.input_scales is not None:  # AWQ: factors of the input, so of the columns
            columns = quantized.input_scales.to(dtype)[:, None, None]
            gate, up = gate * columns, up * columns
        self.gate_up = torch.cat((gate, up), dim=2).to(device)
        self.down_t = quantized.down.dequantize(dtype).transpose(2, 3).contiguous().to(device)
        self._layers = list(zip(self.gate_up, self.down_t, strict=True))

    def add(self, base: Tensor, layer: int, experts: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        """base [1, D] plus the sum, by weights [1, k], of experts int64 [k] of MoE layer `layer` on x [1, D]."""
        gate_up, down = self._layers[layer]
        wide = gate_up.index_select(0, experts).view(-1, x.shape[1]).mv(x.view(-1))
        inner = gated(wide.view(len(experts), -1)).mul_(weights.view(-1, 1))
        return torch.addmm(base, inner.view(1, -1), down.index_select(0, experts).view(-1, x.shape[1]))
