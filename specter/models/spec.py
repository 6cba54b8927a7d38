"""Dimensions, routing and rotary settings of a model, without tensors and without torch.

A `ModelSpec` describes the model whose numerics run, or the full-size model that the virtual clock charges.
`specter.models.hub_config` reads one from config.json.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import NamedTuple


class ExpertId(NamedTuple):
    """One routed expert. `layer` counts MoE layers from 0 (dense layers are not counted)."""

    layer: int
    expert: int


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: plain, YaRN (arXiv 2309.00071) or LongRoPE (arXiv 2402.13753)."""

    theta: float = 10000.0
    factor: float = 1.0  # above 1: YaRN
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    original_max_positions: int = 4096
    short_factors: tuple[float, ...] = ()  # one per rotated pair: LongRoPE (docs/decisions/0010)
    long_factors: tuple[float, ...] = ()
    short_mscale: float = 1.0
    long_mscale: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """Dimensions and architecture of a model (dims as in docs/structure.md).

    Attention is multi-head latent (`kv_lora` above 0: one latent and one rotary key per position, queries of
    `nope_dim` + `rope_dim`), or has `num_kv_heads` keys and values of `rope_dim` = `v_dim` channels, all rotated.
    """

    name: str
    vocab: int  # V
    hidden: int  # D
    num_layers: int  # L, dense layers included
    num_dense_layers: int  # the first layers, without routed experts
    dense_inter: int
    expert_inter: int  # F
    num_experts: int  # E
    top_k: int
    shared_inter: int  # all shared experts together; 0: none
    num_heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    kv_lora: int
    routed_scaling: float = 1.0
    norm_eps: float = 1e-6
    max_positions: int = 4096
    rope: RopeSpec = RopeSpec()
    family: str = "deepseek_v2"  # model_type of the hub
    num_kv_heads: int = 0  # 0: latents
    qkv_bias: bool = False
    o_bias: bool = False
    head_bias: bool = False
    layer_norm: bool = False  # LayerNorm with bias instead of RMSNorm
    shared_gate: bool = False  # the shared expert is weighted by a sigmoid
    norm_top_k: bool = False  # router weights are divided by their sum
    num_groups: int = 1  # experts are chosen from the `top_groups` best groups
    top_groups: int = 1
    router: str = "softmax"  # or "sparsemixer"
    router_jitter: float = 0.0  # sparsemixer masks logits that are twice this below the best, relatively
    tied: bool = False  # lm_head is the embedding

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def is_latent(self) -> bool:
        return self.kv_lora > 0

    @property
    def num_key_heads(self) -> int:
        """Heads of keys in the KV cache; latents are one."""
        return 1 if self.is_latent else self.num_kv_heads

    @property
    def key_width(self) -> int:
        """Channels of a key head; with latents, of the absorbed query."""
        return self.kv_lora + self.rope_dim if self.is_latent else self.rope_dim

    @property
    def value_width(self) -> int:
        return self.kv_lora if self.is_latent else self.v_dim

    @property
    def kv_width(self) -> int:
        """Values in the KV cache per position and layer."""
        return self.key_width if self.is_latent else self.num_kv_heads * (self.key_width + self.value_width)

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert: gate and up [F, D] each, down [D, F]."""
        return 3 * self.hidden * self.expert_inter

    @property
    def attention_params(self) -> int:
        """Weights of one layer's attention (q, kv_a, kv_b, o; or q, k, v, o), biases left out."""
        q = self.num_heads * self.qk_dim * self.hidden
        o = self.hidden * self.num_heads * self.v_dim
        if not self.is_latent:
            return q + self.hidden * self.kv_width + o
        kv_a = (self.kv_lora + self.rope_dim) * self.hidden
        kv_b = self.num_heads * (self.nope_dim + self.v_dim) * self.kv_lora
        return q + kv_a + kv_b + o

    @property
    def num_router_out(self) -> int:
        """Channels of one layer's router, including the shared expert's gate if any."""
        return self.num_experts + self.shared_gate

    @property
    def non_expert_params(self) -> int:
        """Weights shared by draft and target (embedding, attention, dense, shared, router), without vectors."""
        moe = self.num_moe_layers * (3 * self.hidden * self.shared_inter + self.num_router_out * self.hidden)
        dense = self.num_dense_layers * 3 * self.hidden * self.dense_inter
        vocabulary = (1 if self.tied else 2) * self.vocab * self.hidden
        return vocabulary + self.num_layers * self.attention_params + moe + dense

    @property
    def experts_params(self) -> int:
        return self.num_moe_layers * self.num_experts * self.expert_params

    def digest(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)
