"""Attention of all families on the device: reads rows of qkv, appends to the cache, writes rows of values.

Each form has its own scratch buffers and two methods. Both take qkv [T, …] of layer `index` and the position of row 0,
int32 [1], complete before the pass's first kernel starts, and write out [T, H * v]. `rows` gives a row the same bits in
every pass; `row` takes the one row of a draft step and can be faster.
"""

from __future__ import annotations

from torch import Tensor

from specter.kernels import gqa, mla
from specter.kernels.partials import merge
from specter.kernels.routing import Rule
from specter.models.cuda.weights import GpuKVCache, GpuWeights
from specter.models.rope import softmax_scale
from specter.models.spec import ModelSpec

MAX_ROWS = 64  # rows whose partial sums are kept at a time


class LatentAttention:
    """Multi-head latent attention (`specter.kernels.mla`)."""

    def __init__(self, weights: GpuWeights, cache: GpuKVCache, num_rows: int, pdl: bool) -> None:
        spec = weights.spec
        self._cache, self._pdl = cache, pdl
        self._kv = [(layer.kv_b, layer.kv_norm) for layer in weights.layers]
        self._heads = mla.Heads.of(spec, softmax_scale(spec))
        self._partials = self._heads.partials(num_rows, cache.capacity, weights.device)
        self._queries = weights.embedding.new_zeros(num_rows, spec.num_heads, spec.kv_lora + spec.rope_dim)
        self._latents = weights.embedding.new_zeros(num_rows, spec.num_heads, spec.kv_lora)

    def rows(self, index: int, qkv: Tensor, position: Tensor, out: Tensor) -> None:
        kv_b, latents = self._attend(index, qkv, position), self._latents[: qkv.shape[0]]
        mla.merge_and_project(self._heads, self._partials, kv_b, position, latents, out, self._pdl)

    def row(self, index: int, qkv: Tensor, position: Tensor, out: Tensor) -> None:
        kv_b = self._attend(index, qkv, position)
        mla.values(self._heads, self._partials, kv_b, position, out[0], self._pdl)

    def _attend(self, index: int, qkv: Tensor, position: Tensor) -> Tensor:
        """Computes the partial sums; returns the layer's kv_b."""
        heads, cache, queries = self._heads, self._cache.entries[index], self._queries[: qkv.shape[0]]
        kv_b, kv_norm = self._kv[index]
        assert kv_b is not None and kv_norm is not None
        mla.absorb(heads, qkv, kv_b, kv_norm, self._cache.rotary, position, queries, cache, self._pdl)
        mla.attend(heads, queries, cache, position, self._partials, self._pdl)
        return kv_b


class PlainAttention:
    """Multi-head or grouped-query attention (`specter.kernels.gqa`)."""

    def __init__(self, weights: GpuWeights, cache: GpuKVCache, num_rows: int, pdl: bool) -> None:
        self._cache, self._pdl = cache, pdl
        self._heads = gqa.Heads.of(weights.spec, softmax_scale(weights.spec))
        self._partials = self._heads.partials(num_rows, cache.capacity, weights.device)

    def rows(self, index: int, qkv: Tensor, position: Tensor, out: Tensor) -> None:
        cache = self._cache.entries[index]
        gqa.turn(self._heads, qkv, self._cache.rotary, position, cache, self._pdl)
        gqa.attend(self._heads, qkv, cache, position, self._partials, self._pdl)
        merge(self._partials, position, out, self._heads.split, self._pdl)

    row = rows


Attention = LatentAttention | PlainAttention


def check_served(spec: ModelSpec) -> None:
    """Raises SpecterError, with a remedy, for heads or a router that the kernels do not support."""
    Rule.of(spec)
    if not spec.is_latent:
        gqa.Heads.of(spec, softmax_scale(spec))


def build_attention(weights: GpuWeights, cache: GpuKVCache, num_rows: int, pdl: bool) -> Attention:
    """The attention of the weights' family, for up to `num_rows` rows at a time.
    Raises SpecterError: heads that the kernels do not support."""
    kind = LatentAttention if weights.spec.is_latent else PlainAttention
    return kind(weights, cache, num_rows, pdl)
