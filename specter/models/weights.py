"""The decoder's weights: folded ones shared by target and draft, and the draft's experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specter.codecs.int4 import Int4Experts
from specter.kernels import gated
from specter.models.attention import AttentionWeights
from specter.models.checkpoint import Checkpoint
from specter.models.spec import ModelSpec


class TensorSource(Protocol):
    """A `Checkpoint`, or another source of its tensors."""

    spec: ModelSpec

    def tensor(self, name: str) -> Tensor: ...


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
    is_dense = layer < spec.num_dense_layers
    mlp = "mlp" if is_dense else "mlp.shared_experts"
    parts = [] if is_dense else ["mlp.gate", *(["mlp.shared_expert_gate"] if spec.shared_gate else [])]
    has_mlp = is_dense or spec.shared_inter > 0
    parts += [f"{mlp}.gate_proj", f"{mlp}.up_proj"] if has_mlp else []

    def get(name: str) -> Tensor:
        return checkpoint.tensor(f"model.layers.{layer}.{name}")

    norm = get("post_attention_layernorm.weight")
    wide = place(torch.cat([get(f"{part}.weight") for part in parts]).t())
    return LayerWeights(
        attention=AttentionWeights.fold(spec, get, place),
        norm=place(norm),
        norm_bias=place(get("post_attention_layernorm.bias")) if spec.layer_norm else None,
        wide=wide,
        router=wide[:, : 0 if is_dense else spec.num_experts],
        down=place(get(f"{mlp}.down_proj.weight").t() if has_mlp else norm.new_empty(0, spec.hidden)),
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
