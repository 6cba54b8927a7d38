"""The full-size model's non-expert weights on the device, as the kernels read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.model.rope import rotary_table
from specter.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """One layer without routed experts; matrices are [out, in]. S: width of the dense or shared MLP."""

    norm: Tensor  # [D] before attention
    qkv: Tensor  # [H * (nope + rope) + lora + rope, D]: queries, latent, rotary key
    kv_norm: Tensor  # [lora]
    kv_b: Tensor  # [H * (nope + v), lora]
    o: Tensor  # [D, H * v]
    mlp_norm: Tensor  # [D] before the MLP
    wide: Tensor  # [E + 2S, D]: router (MoE layers only), gate, up
    down: Tensor  # [D, S]


@dataclass(frozen=True, slots=True)
class GpuWeights:
    """All that draft and target share.

    Attributes:
        num_tokens: tokens that exist; the rows of embedding and head beyond them pad the vocabulary, have logits all
            the same, and are never chosen, by whom and how ever a token is chosen.
    """

    spec: ModelSpec
    num_tokens: int
    embedding: Tensor  # [V, D]
    layers: list[GpuLayer]
    norm: Tensor  # [D]
    head: Tensor  # [V, D]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def num_bytes(self) -> int:
        parts = [getattr(layer, name) for layer in self.layers for name in GpuLayer.__slots__]
        return sum(part.nbytes for part in (self.embedding, self.norm, self.head, *parts))

    @classmethod
    def load(
        cls, spec: ModelSpec, get: Callable[[str], Tensor], device: torch.device | str, dtype: torch.dtype,
        num_tokens: int | None = None,
    ) -> GpuWeights:  # fmt: skip
        """Asks `get` for every non-expert tensor once, by its hub name, layer by layer; any dtype and device.

        Args:
            num_tokens: the tokenizer's; None if every row of the vocabulary is a token.
        Raises:
            SpecterError: more tokens than the vocabulary has rows, or none.
        """
        if num_tokens is not None and not 0 < num_tokens <= spec.vocab:
            raise SpecterError(
                f"{num_tokens} tokens for the {spec.vocab} rows of the vocabulary of {spec.name}",
                "use the model's own tokenizer",
            )

        def place(*names: str) -> Tensor:
            parts = [get(name).to(device=device, dtype=dtype) for name in names]
            return torch.cat(parts).contiguous()

        def layer(index: int) -> GpuLayer:
            prefix = f"model.layers.{index}"
            attention = f"{prefix}.self_attn"
            is_dense = index < spec.num_dense_layers
            mlp = f"{prefix}.mlp" if is_dense else f"{prefix}.mlp.shared_experts"
            router = [] if is_dense else [f"{prefix}.mlp.gate.weight"]
            return GpuLayer(
                norm=place(f"{prefix}.input_layernorm.weight"),
                qkv=place(f"{attention}.q_proj.weight", f"{attention}.kv_a_proj_with_mqa.weight"),
                kv_norm=place(f"{attention}.kv_a_layernorm.weight"),
                kv_b=place(f"{attention}.kv_b_proj.weight"),
                o=place(f"{attention}.o_proj.weight"),
                mlp_norm=place(f"{prefix}.post_attention_layernorm.weight"),
                wide=place(*router, f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"),
                down=place(f"{mlp}.down_proj.weight"),
            )

        return cls(
            spec=spec,
            num_tokens=spec.vocab if num_tokens is None else num_tokens,
            layers=[layer(index) for index in range(spec.num_layers)],
            embedding=place("model.embed_tokens.weight"),
            norm=place("model.norm.weight"),
            head=place("lm_head.weight"),
        )


class GpuKVCache:
    """Latents [L, capacity, lora + rope] in the model's dtype, and the rotary tables that go with the positions."""

    def __init__(self, spec: ModelSpec, capacity: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.capacity = capacity
        self.latents = torch.zeros(spec.num_layers, capacity, spec.kv_lora + spec.rope_dim, dtype=dtype, device=device)
        cos, sin = rotary_table(spec, capacity)
        self.rotary = cos.to(device), sin.to(device)
