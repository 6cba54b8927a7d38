"""Attention over the KV cache, one form for all families: queries of some heads share a key head.

Multi-head latent attention is absorbed (arXiv 2405.04434, 2.1.2): q·k = (W_uk^T q_nope)·c + q_pe·k_pe and
o = W_o W_uv (sum p c), so W_uk is folded into the query projection, W_uv into the output projection, and the one key
head is the cached latent with its rotary key. Plain heads keep keys and values. Norm gains and biases and the softmax
scale are folded into the projections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.kernels import Product, tiled_product
from specter.model.elementwise import add_bias
from specter.model.kv_cache import KEY_BLOCK, KVCache
from specter.model.rope import interleave_halves, rotary_table, softmax_scale
from specter.model.spec import ModelSpec

LATENT_NORM_EPS = 1e-6  # the published model's, whatever rms_norm_eps says
_MASKED = -1e30  # finite: exp of it is exactly 0, and 0 times a finite key leaves no trace
Get = Callable[[str], Tensor]  # a layer's tensor by its name within the layer


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """W is key_width, Hk the number of key heads, Vw value_width.

    into: H queries and Hk keys of W channels, then Hk values of Vw; with latents, the key is the latent and its rotary
    key, and there are no values.
    """

    into: Tensor  # [D, (H + Hk) * W (+ Hk * Vw)]
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
    """Turns by position of pairs of a head's channels, complex [capacity, W / 2]; a latent's are 1."""

    def __init__(self, spec: ModelSpec, capacity: int, dtype: torch.dtype, device: torch.device | str) -> None:
        cos, sin = rotary_table(spec, capacity)
        turns = torch.ones(capacity, spec.key_width // 2, dtype=torch.complex64)
        turns[:, spec.kv_lora // 2 :] = torch.complex(cos, sin)
        self.turns = turns.to(device=device, dtype=dtype.to_complex())


class Span:
    """Consecutive positions of one pass in whole tiles, and what attention over them needs in every layer.

    Made once per pass. Rows from `num_rows` on are padding: they are computed, and written nowhere.
    """

    def __init__(
        self, rotary: RotaryPairs, cache: KVCache, spec: ModelSpec, position: int, num_rows: int, tile: int
    ) -> None:
        num_tiles = -(-num_rows // tile)
        self.spec = spec
        self.num_rows = num_rows
        self.tile = tile
        self.padded_rows = num_tiles * tile  # R
        self.stored = slice(position, position + num_rows)
        entries = cache.entries
        positions = torch.arange(position, position + self.padded_rows, device=entries.device)
        positions.clamp_(max=cache.capacity - 1)
        self.turns = rotary.turns[positions][:, None]  # complex [R, 1, W / 2]
        hidden = torch.arange(cache.storage, device=entries.device) > positions[:, None]
        masks = hidden.to(entries.dtype).mul_(_MASKED)[:, None]  # [R, 1, storage], added to scores
        # Per tile: its mask, and how many key blocks its real rows can see.
        ends = [min(position + (i + 1) * tile, self.stored.stop) for i in range(num_tiles)]
        self.tiles = [(mask, -(-end // KEY_BLOCK)) for mask, end in zip(masks.split(tile), ends, strict=True)]

        # Scratch of one tile, reused by all; scores of blocks that are left out stay finite, and masked.
        self.group = spec.num_heads // spec.num_key_heads  # G, queries per key head
        self.scores = entries.new_zeros(spec.num_key_heads, tile, self.group, cache.storage)
        self.probs = torch.empty_like(self.scores)
        self.score_blocks = [head.flatten(0, 1).split(KEY_BLOCK, dim=1) for head in self.scores]
        self.prob_blocks = [head.flatten(0, 1).split(KEY_BLOCK, dim=1) for head in self.probs]
        self.part = entries.new_empty(tile * self.group, spec.value_width)


def attend(mm: Product, weights: AttentionWeights, x: Tensor, span: Span, cache: KVCache, layer: int) -> Tensor:
    """Attention of x [R, D] (normalised, without gain) over the cache, to which the real rows are written.

    Products run on whole tiles and on key blocks of one size. A block that no real row sees is left out: it
    would add exact zeros, since the softmax always runs over the whole storage, masked.
    """
    spec, group = span.spec, span.group
    num_keys, width, value_width = spec.num_key_heads, spec.key_width, spec.value_width
    wide = add_bias(tiled_product(mm, x, weights.into, span.tile), weights.into_bias)
    num_rotated = (spec.num_heads + num_keys) * width
    heads = wide[:, :num_rotated].unflatten(1, (-1, width))
    if spec.is_latent:
        latent = heads[:, spec.num_heads, : spec.kv_lora]
        latent.copy_(F.rms_norm(latent, (spec.kv_lora,), None, LATENT_NORM_EPS))
    pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * span.turns).flatten(-2)  # [R, H + Hk, W]
    entries = cache.entries[layer, span.stored]
    entries[:, : num_keys * width] = turned[: span.num_rows, spec.num_heads :].flatten(1)
    entries[:, num_keys * width :] = wide[: span.num_rows, num_rotated:]

    # [tiles, tile, Hk, G, W] -> [tiles, Hk, tile * G, W]: one matrix of queries per tile and key head.
    grouped = turned[:, : spec.num_heads].reshape(-1, span.tile, num_keys, group, width)
    queries = grouped.transpose(1, 2).reshape(-1, num_keys, span.tile * group, width)
    contexts = x.new_empty(len(queries), num_keys, span.tile * group, value_width)
    for tile_queries, tile_out, (mask, num_blocks) in zip(queries, contexts, span.tiles, strict=True):
        for head, (keys, _) in enumerate(cache.blocks[layer]):
            for key, block in zip(keys[:num_blocks], span.score_blocks[head], strict=False):
                mm(tile_queries[head], key, block)
        torch.softmax(span.scores + mask, dim=-1, out=span.probs)
        for head, (_, values) in enumerate(cache.blocks[layer]):
            out = tile_out[head]
            mm(span.prob_blocks[head][0], values[0], out)
            for index in range(1, num_blocks):
                mm(span.prob_blocks[head][index], values[index], span.part)
                out.add_(span.part)
    context = contexts.unflatten(2, (span.tile, group)).transpose(1, 2).reshape(span.padded_rows, -1)
    return add_bias(tiled_product(mm, context, weights.out, span.tile), weights.out_bias)
