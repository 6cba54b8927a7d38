"""The decoder's weights: what target and draft share, folded for speed, and the draft's own experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specter.kernels import gated
from specter.model.attention import AttentionWeights, absorb
from specter.model.checkpoint import Checkpoint
from specter.model.spec import ModelSpec
from specter.quantize.int4 import Int4Experts


class TensorSource(Protocol):
    """A `Checkpoint`, or anything that has its tensors."""

    spec: ModelSpec

    def tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer without its routed experts; matrices are [in, out]. S is the width of its dense or shared MLP."""

    attention: AttentionWeights
    norm: Tensor  # gain [D] before the MLP
    gate_up: Tensor  # [D, 2S], or [D, E + 2S] in MoE layers: the router's columns first
    down: Tensor  # [S, D]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All that target and draft share."""

    embedding: Tensor  # [V, D]
    layers: list[LayerWeights]
    head: Tensor  # [D, V], the final norm's gain folded in

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> DecoderWeights:
        """Reads and folds a checkpoint's weights, layer by layer; `dtype` is float32 or float64."""

        def place(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype).contiguous()

        head = checkpoint.tensor("lm_head.weight") * checkpoint.tensor("model.norm.weight")
        return cls(
            embedding=place(checkpoint.tensor("model.embed_tokens.weight")),
            layers=[load_layer(checkpoint, layer, place) for layer in range(checkpoint.spec.num_layers)],
            head=place(head.t()),
        )


def load_layer(checkpoint: TensorSource, layer: int, place: Callable[[Tensor], Tensor]) -> LayerWeights:
    """One layer's weights, folded; `place` moves each result."""

    def get(name: str) -> Tensor:
        return checkpoint.tensor(f"model.layers.{layer}.{name}.weight")

    attention = absorb(
        checkpoint.spec,
        norm=get("input_layernorm"),
        q=get("self_attn.q_proj"),
        kv_a=get("self_attn.kv_a_proj_with_mqa"),
        kv_norm=get("self_attn.kv_a_layernorm"),
        kv_b=get("self_attn.kv_b_proj"),
        o=get("self_attn.o_proj"),
    )
    is_dense = layer < checkpoint.spec.num_dense_layers
    mlp = "mlp" if is_dense else "mlp.shared_experts"
    router = [] if is_dense else [get("mlp.gate")]
    return LayerWeights(
        attention=AttentionWeights(place(attention.into), place(attention.out)),
        norm=place(get("post_attention_layernorm")),
        gate_up=place(torch.cat([*router, get(f"{mlp}.gate_proj"), get(f"{mlp}.up_proj")]).t()),
        down=place(get(f"{mlp}.down_proj").t()),
    )


class DraftExperts:
    """The draft's routed experts: INT4 values, dequantised once: gate_up [Lm, E, 2F, D], down [Lm, E, D, F]."""

    def __init__(self, quantized: Int4Experts, dtype: torch.dtype, device: torch.device | str) -> None:
        gate, up = quantized.gate.dequantize(dtype), quantized.up.dequantize(dtype)
        if quantized.input_scales is not None:  # AWQ: of the input, so of the columns
            columns = quantized.input_scales.to(dtype)[:, None, None]
            gate, up = gate * columns, up * columns
        self.gate_up = torch.cat((gate, up), dim=2).to(device)
        self.down = quantized.down.dequantize(dtype).to(device)

    def run(self, layer: int, experts: Tensor, x: Tensor) -> Tensor:
        """Experts int64 [k] of MoE layer `layer` on one row x [1, D] -> [k, D]."""
        gate_up = self.gate_up[layer].index_select(0, experts)
        inner = gated(gate_up.flatten(0, 1).mv(x[0]).view(gate_up.shape[0], 1, -1))
        return torch.bmm(inner, self.down[layer].index_select(0, experts).transpose(1, 2))[:, 0]
