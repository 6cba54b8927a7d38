"""Non-expert weights and KV cache on the device, in the layout that the kernels read."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.kernels.device import Stream
from specter.kernels.layer_norm import layer_norm
from specter.kernels.octets import Octets
from specter.models.cuda.memory import DeviceBudget
from specter.models.names import mlp_names
from specter.models.rope import rotary_table
from specter.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm, or LayerNorm where there is a bias."""

    gain: Tensor  # [D]
    bias: Tensor | None  # [D]

    def finish(self, stream: Stream, eps: float, pdl: bool, octets: Octets | None = None) -> None:
        """LayerNorm's pass over a stream that was just written (see `layer_norm`); RMSNorm needs none."""
        if self.bias is not None:
            layer_norm(stream, self.gain, self.bias, octets, eps, pdl)


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """One layer without routed experts; matrices are [out, in]. S: width of the dense or shared MLP, 0 without one."""

    norm: Norm  # before attention
    qkv: Tensor  # [H * (nope + rope) + lora + rope, D]: queries, latent, rotary key; or [(H + 2 Hk) * W, D]: q, k, v
    qkv_bias: Tensor | None
    kv_norm: Tensor | None  # [lora], of latents
    kv_b: Tensor | None  # [H * (nope + v), lora], of latents
    o: Tensor  # [D, H * v]
    o_bias: Tensor | None  # [D]
    mlp_norm: Norm
    wide: Tensor  # [E (+ 1) + 2S, D]: router and gate of the shared expert (MoE layers only), gate, up
    down: Tensor  # [D, S]


@dataclass(frozen=True, slots=True)
class GpuWeights:
    """The weights that draft and target share."""

    spec: ModelSpec
    num_tokens: int  # of the tokenizer; rows of embedding and head after them are padding, never chosen
    embedding: Tensor  # [V, D]
    layers: list[GpuLayer]
    norm: Norm
    head: Tensor  # [V, D]; the embedding itself if they are tied
    head_bias: Tensor | None  # [V]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.tensors())

    def tensors(self) -> list[Tensor]:
        """All tensors, each once."""
        return list({id(part): part for part in tensors_in(self)}.values())

    @classmethod
    def load(
        cls, spec: ModelSpec, get: Callable[[str], Tensor], device: torch.device | str, dtype: torch.dtype,
        num_tokens: int | None = None,
    ) -> GpuWeights:  # fmt: skip
        """Reads every non-expert tensor once through `get`, which returns any dtype on any device, by its hub name.

        Args:
            num_tokens: of the tokenizer; None if every row of the vocabulary is a token.
        Raises SpecterError: no tokens, or more than the vocabulary has rows.
        """
        if num_tokens is not None and not 0 < num_tokens <= spec.vocab:
            raise SpecterError(
                f"{num_tokens} tokens for the {spec.vocab} rows of the vocabulary of {spec.name}",
                "use the model's own tokenizer",
            )

        def place(*names: str) -> Tensor:
            parts = [get(name).to(device=device, dtype=dtype) for name in names]
            return torch.cat(parts).contiguous()

        def norm(name: str) -> Norm:
            return Norm(place(f"{name}.weight"), place(f"{name}.bias") if spec.layer_norm else None)

        def layer(index: int) -> GpuLayer:
            prefix = f"model.layers.{index}"
            attention = f"{prefix}.self_attn"
            projections = ("q_proj", "kv_a_proj_with_mqa") if spec.is_latent else ("q_proj", "k_proj", "v_proj")
            wide, down = mlp_names(spec, index)
            return GpuLayer(
                norm=norm(f"{prefix}.input_layernorm"),
                qkv=place(*(f"{attention}.{name}.weight" for name in projections)),
                qkv_bias=place(*(f"{attention}.{name}.bias" for name in projections)) if spec.qkv_bias else None,
                kv_norm=place(f"{attention}.kv_a_layernorm.weight") if spec.is_latent else None,
                kv_b=place(f"{attention}.kv_b_proj.weight") if spec.is_latent else None,
                o=place(f"{attention}.o_proj.weight"),
                o_bias=place(f"{attention}.o_proj.bias") if spec.o_bias else None,
                mlp_norm=norm(f"{prefix}.post_attention_layernorm"),
                wide=place(*(f"{prefix}.{name}" for name in wide)),
                down=place(f"{prefix}.{down}") if down else torch.empty(spec.hidden, 0, device=device, dtype=dtype),
            )

        embedding = place("model.embed_tokens.weight")
        return cls(
            spec=spec,
            num_tokens=spec.vocab if num_tokens is None else num_tokens,
            layers=[layer(index) for index in range(spec.num_layers)],
            embedding=embedding,
            norm=norm("model.norm"),
            head=embedding if spec.tied else place("lm_head.weight"),
            head_bias=place("lm_head.bias") if spec.head_bias else None,
        )


def tensors_in(part: object) -> Iterator[Tensor]:
    """All tensors in a dataclass, its lists and its nested dataclasses."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list):
        for member in part:
            yield from tensors_in(member)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from tensors_in(getattr(part, field.name))


class GpuKVCache:
    """Entries [L, capacity, kv_width] in the model's dtype, and the rotary tables of the positions.

    An entry is a latent and its rotated key, or the rotated keys of all key heads and then their values.
    """

    def __init__(self, spec: ModelSpec, capacity: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.capacity = capacity
        self.entries = torch.zeros(spec.num_layers, capacity, spec.kv_width, dtype=dtype, device=device)
        cos, sin = rotary_table(spec, capacity)
        self.rotary = cos.to(device), sin.to(device)


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """The memory of a draft that shares only the experts: a copy of the non-expert weights, and a KV cache."""

    weights: GpuWeights
    cache: GpuKVCache

    @classmethod
    def allocate(cls, weights: GpuWeights, kv_capacity: int, budget: DeviceBudget) -> OwnMemory:
        """Copies `weights`. Raises SpecterError if the copy and its KV do not fit the budget."""
        spec = weights.spec
        num_bytes = weights.num_bytes + spec.num_layers * kv_capacity * spec.kv_width * weights.dtype.itemsize
        budget.check(num_bytes, "the draft's own weights and KV cache")
        return cls(copy.deepcopy(weights), GpuKVCache(spec, kv_capacity, weights.dtype, weights.device))

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """Bytes by part, named as in `specter.memory.PARTS`."""
        return {"draft_shared": self.weights.num_bytes, "draft_kv": self.cache.entries.nbytes}
