"""Attention of a pass over the KV cache on the CPU, in products of fixed shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from specter.kernels.reference import Product, tiled_product
from specter.models.cpu.buffers import KEY_BLOCK, KVCache, Scratch
from specter.models.elementwise import add_bias, inverse_rms
from specter.models.weights import LATENT_NORM_EPS, AttentionWeights, RotaryPairs

_MASKED = -1e30  # finite: its exp is exactly 0, and 0 times a finite key is 0


class Span:
    """Consecutive positions of one pass in whole tiles, with the masks and views that every layer's attention uses.

    Rows from `num_rows` on are padding: computed, but not stored.
    """

    def __init__(self, rotary: RotaryPairs, cache: KVCache, scratch: Scratch, position: int, num_rows: int) -> None:
        self.num_rows = num_rows
        self.padded_rows = len(scratch.wide)  # R
        self.tile = scratch.tile
        self.scratch = scratch
        end = position + num_rows
        entries = cache.entries
        positions = torch.arange(position, position + self.padded_rows, device=entries.device)
        positions.clamp_(max=cache.capacity - 1)
        self.turns = rotary.turns[positions][:, None]  # complex [R, 1, W / 2]
        hidden = torch.arange(cache.storage, device=entries.device) > positions[:, None]
        # Per part of a tile with a real row: its mask [r, 1, storage], added to scores, and the number of key blocks
        # visible to its real rows.
        masks = hidden.to(entries.dtype).mul_(_MASKED)[:, None].split(scratch.part_rows)
        ends = range(position + scratch.part_rows, end + scratch.part_rows, scratch.part_rows)
        self.parts = [(mask, -(-min(e, end) // KEY_BLOCK)) for mask, e in zip(masks, ends, strict=False)]
        self.new = scratch.entries[:num_rows]
        self.stored = entries[:, position:end].unbind(0)  # by layer: the destination of `new`
        scratch.scores.zero_()  # an earlier pass may have left NaN


def attend(mm: Product, weights: AttentionWeights, x: Tensor, span: Span, cache: KVCache, layer: int) -> Tensor:
    """Attention of x [R, D] (normalised, without gain) over the cache, to which the real rows are written.

    Products have fixed shapes: whole tiles or equal parts of them, and equal key blocks. Blocks that no real row sees
    are skipped: they would add exact zeros, since the softmax runs over the whole masked storage.
    """
    scratch, blocks = span.scratch, cache.blocks[layer]
    tiled_product(mm, x, weights.into, span.tile, out=scratch.wide)
    if weights.into_bias is not None:
        scratch.wide.add_(weights.into_bias)
    if scratch.latent.shape[1]:
        scratch.latent.mul_(inverse_rms(scratch.latent, LATENT_NORM_EPS))
    scratch.pairs.mul_(span.turns)
    span.stored[layer].copy_(span.new)
    scratch.queries.copy_(scratch.by_row)
    for heads, (mask, num_blocks) in zip(scratch.parts, span.parts, strict=False):
        for (query, _), (keys, _), (scores, _) in zip(heads, blocks, scratch.blocks, strict=True):
            for index in range(num_blocks):
                mm(query, keys[index], scores[index])
        torch.softmax(scratch.scores.add_(mask), dim=-1, out=scratch.probs)
        for (_, context), (_, values), (_, probs) in zip(heads, blocks, scratch.blocks, strict=True):
            mm(probs[0], values[0], context)
            for index in range(1, num_blocks):
                mm(probs[index], values[index], scratch.addend)
                context.add_(scratch.addend)
    context = scratch.contexts.reshape(span.padded_rows, -1)
    return add_bias(tiled_product(mm, context, weights.out, span.tile), weights.out_bias)
