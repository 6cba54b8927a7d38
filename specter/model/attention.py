"""Multi-head latent attention, absorbed: queries and outputs live in the latent space (arXiv 2405.04434, 2.1.2).

q·k = (W_uk^T q_nope)·c + q_pe·k_pe and o = W_o W_uv (sum p c), so W_uk is folded into the query projection,
W_uv into the output projection, and the cache holds c and k_pe only. Norm gains and the softmax scale are
folded into the same matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.kernels import Product, tiled_product
from specter.model.kv_cache import KEY_BLOCK, KVCache
from specter.model.rope import rotary_table, softmax_scale
from specter.model.spec import ModelSpec

_LATENT_NORM_EPS = 1e-6  # the published model's, whatever rms_norm_eps says
_MASKED = -1e30  # finite: exp of it is exactly 0, and 0 times a finite key leaves no trace


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """W is kv_lora + rope_dim."""

    into: Tensor  # [D, (H + 1) * W]: H queries, then the latent and its rotary key
    out: Tensor  # [H * kv_lora, D]


def absorb(
    spec: ModelSpec, norm: Tensor, q: Tensor, kv_a: Tensor, kv_norm: Tensor, kv_b: Tensor, o: Tensor
) -> AttentionWeights:
    """Folds the checkpoint's matrices (each [out, in], hub layout) in fp64; the result is fp64."""
    norm, q, kv_a, kv_norm, kv_b, o = (t.double() for t in (norm, q, kv_a, kv_norm, kv_b, o))
    heads, lora = spec.num_heads, spec.kv_lora
    q_nope, q_pe = q.view(heads, spec.qk_dim, -1).split((spec.nope_dim, spec.rope_dim), dim=1)
    up_k, up_v = kv_b.view(heads, -1, lora).mul(kv_norm).split((spec.nope_dim, spec.v_dim), dim=1)
    queries = torch.cat((up_k.transpose(1, 2) @ q_nope, q_pe), dim=1).flatten(0, 1) * softmax_scale(spec)
    into = torch.cat((queries, kv_a)) * norm
    out = o.view(-1, heads, spec.v_dim).transpose(0, 1) @ up_v  # [H, D, kv_lora]
    return AttentionWeights(into.t(), out.transpose(1, 2).reshape(heads * lora, -1))


class RotaryPairs:
    """Turns by position of (latent, rotary) pairs, complex [capacity, W / 2]; the latent's are 1."""

    def __init__(self, spec: ModelSpec, capacity: int, dtype: torch.dtype, device: torch.device | str) -> None:
        cos, sin = rotary_table(spec, capacity)
        turns = torch.ones(capacity, (spec.kv_lora + spec.rope_dim) // 2, dtype=torch.complex64)
        turns[:, spec.kv_lora // 2 :] = torch.complex(cos, sin)
        self.turns = turns.to(device=device, dtype=dtype.to_complex())


@dataclass(slots=True)
class Span:
    """Consecutive positions of one pass in whole tiles; rows from `num_rows` on are padding.

    Everything here depends on positions only, and is made once per pass for all layers.
    """

    position: int
    num_rows: int
    tile: int
    turns: Tensor  # complex [R, 1, W / 2]
    masks: Tensor  # [R, 1, storage], added to scores
    num_key_blocks: list[int]  # per tile: the blocks that its real rows can see


def make_span(rotary: RotaryPairs, cache: KVCache, position: int, num_rows: int, tile: int) -> Span:
    """Lays `num_rows` rows from `position` on into tiles of `tile` rows."""
    num_tiles = -(-num_rows // tile)
    device = cache.latents.device
    positions = torch.arange(position, position + num_tiles * tile, device=device).clamp_(max=cache.capacity - 1)
    hidden = torch.arange(cache.storage, device=device) > positions[:, None]
    ends = [min(position + (i + 1) * tile, position + num_rows) for i in range(num_tiles)]
    return Span(
        position=position,
        num_rows=num_rows,
        tile=tile,
        turns=rotary.turns[positions][:, None],
        masks=(hidden.to(cache.latents.dtype) * _MASKED)[:, None],
        num_key_blocks=[-(-end // KEY_BLOCK) for end in ends],
    )


def attend(mm: Product, weights: AttentionWeights, x: Tensor, span: Span, cache: KVCache, layer: int) -> Tensor:
    """Attention of x [R, D] (normalised, without gain) over the cache, to which the real rows are written.

    Products run on whole tiles and on key blocks of one size. A block that no real row sees is left out: it
    would add exact zeros, since the softmax always runs over the whole storage, masked.
    """
    num_rows, tile, lora, width = x.shape[0], span.tile, cache.kv_lora, cache.width
    heads = tiled_product(mm, x, weights.into, tile).view(num_rows, -1, width)
    num_heads = heads.shape[1] - 1
    latent = heads[:, num_heads, :lora]
    latent.copy_(F.rms_norm(latent, (lora,), None, _LATENT_NORM_EPS))
    pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
    begin, end = span.position, span.position + span.num_rows
    torch.mul(pairs[: span.num_rows, num_heads], span.turns[: span.num_rows, 0], out=cache.pairs[layer, begin:end])
    queries = torch.view_as_real(pairs[:, :num_heads] * span.turns).view(-1, tile * num_heads, width)

    keys = cache.latents[layer]
    scores = x.new_zeros(tile * num_heads, cache.storage)
    context = x.new_empty(queries.shape[0], tile * num_heads, lora)
    part = torch.empty_like(context[0])
    for index, num_blocks in enumerate(span.num_key_blocks):
        blocks = [slice(i * KEY_BLOCK, (i + 1) * KEY_BLOCK) for i in range(num_blocks)]
        for block in blocks:
            mm(queries[index], keys[block].t(), scores[:, block])
        mask = span.masks[index * tile : (index + 1) * tile]
        probs = torch.softmax(scores.view(tile, num_heads, -1) + mask, dim=-1).view_as(scores)
        mm(probs[:, blocks[0]], keys[blocks[0], :lora], context[index])
        for block in blocks[1:]:
            mm(probs[:, block], keys[block, :lora], part)
            context[index].add_(part)
    return tiled_product(mm, context.view(num_rows, -1), weights.out, tile)
