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

LATENT_NORM_EPS = 1e-6  # the published model's, whatever rms_norm_eps says
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


class Span:
    """Consecutive positions of one pass in whole tiles, and what attention over them needs in every layer.

    Made once per pass. Rows from `num_rows` on are padding: they are computed, and written nowhere.
    """

    def __init__(
        self, rotary: RotaryPairs, cache: KVCache, num_heads: int, position: int, num_rows: int, tile: int
    ) -> None:
        num_tiles = -(-num_rows // tile)
        self.num_rows = num_rows
        self.tile = tile
        self.padded_rows = num_tiles * tile  # R
        self.stored = slice(position, position + num_rows)
        latents = cache.latents
        positions = torch.arange(position, position + self.padded_rows, device=latents.device)
        positions.clamp_(max=cache.capacity - 1)
        self.turns = rotary.turns[positions][:, None]  # complex [R, 1, W / 2]
        hidden = torch.arange(cache.storage, device=latents.device) > positions[:, None]
        masks = hidden.to(latents.dtype).mul_(_MASKED)[:, None]  # [R, 1, storage], added to scores
        # Per tile: its mask, and how many key blocks its real rows can see.
        ends = [min(position + (i + 1) * tile, self.stored.stop) for i in range(num_tiles)]
        self.tiles = [(mask, -(-end // KEY_BLOCK)) for mask, end in zip(masks.split(tile), ends, strict=True)]

        # Scratch of one tile, reused by all; scores of blocks that are left out stay finite, and masked.
        self.scores = latents.new_zeros(tile, num_heads, cache.storage)
        self.probs = torch.empty_like(self.scores)
        self.score_blocks = self.scores.flatten(0, 1).split(KEY_BLOCK, dim=1)
        self.prob_blocks = self.probs.flatten(0, 1).split(KEY_BLOCK, dim=1)
        self.part = latents.new_empty(tile * num_heads, cache.kv_lora)


def attend(mm: Product, weights: AttentionWeights, x: Tensor, span: Span, cache: KVCache, layer: int) -> Tensor:
    """Attention of x [R, D] (normalised, without gain) over the cache, to which the real rows are written.

    Products run on whole tiles and on key blocks of one size. A block that no real row sees is left out: it
    would add exact zeros, since the softmax always runs over the whole storage, masked.
    """
    lora, width = cache.kv_lora, cache.width
    heads = tiled_product(mm, x, weights.into, span.tile).view(span.padded_rows, -1, width)
    num_heads = heads.shape[1] - 1
    latent = heads[:, num_heads, :lora]
    latent.copy_(F.rms_norm(latent, (lora,), None, LATENT_NORM_EPS))
    pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
    turned = torch.view_as_real(pairs * span.turns).flatten(-2)  # [R, H + 1, W]
    cache.latents[layer, span.stored] = turned[: span.num_rows, num_heads]

    queries = turned[:, :num_heads].reshape(-1, span.tile * num_heads, width).unbind(0)
    context = x.new_empty(span.padded_rows, num_heads * lora)
    contexts = context.view(-1, span.tile * num_heads, lora).unbind(0)
    keys, values = cache.blocks[layer]
    for query, out, (mask, num_blocks) in zip(queries, contexts, span.tiles, strict=True):
        for key, block in zip(keys[:num_blocks], span.score_blocks, strict=False):
            mm(query, key, block)
        torch.softmax(span.scores + mask, dim=-1, out=span.probs)
        mm(span.prob_blocks[0], values[0], out)
        for index in range(1, num_blocks):
            mm(span.prob_blocks[index], values[index], span.part)
            out.add_(span.part)
    return tiled_product(mm, context, weights.out, span.tile)
