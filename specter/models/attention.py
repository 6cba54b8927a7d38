"""Attention over the KV cache, one form for all families: groups of query heads share a key head.

Multi-head latent attention is absorbed (arXiv 2405.04434, 2.1.2): q·k = (W_uk^T q_nope)·c + q_pe·k_pe and
o = W_o W_uv (sum p c), so W_uk is folded into the query projection, W_uv into the output projection, and the single key
head is the cached latent with its rotary key. Norm gains, biases and the softmax scale are folded into the projections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specter.kernels import Product, tiled_product
from specter.models.cpu.kv_cache import KEY_BLOCK, KVCache
from specter.models.cpu.scratch import Scratch
from specter.models.elementwise import add_bias, inverse_rms
from specter.models.rope import interleave_halves, rotary_table, softmax_scale
from specter.models.spec import ModelSpec

LATENT_NORM_EPS = 1e-6  # of the published model, which ignores rms_norm_eps
_MASKED = -1e30  # finite: its exp is exactly 0, and 0 times a finite key is 0
Get = Callable[[str], Tensor]  # a layer's tensor by its name within the layer


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Folded projections; W is key_width, Hk the number of key heads, Vw value_width."""

    # [D, (H + Hk) * W (+ Hk * Vw)]: queries, keys, values. A latent's key is the latent and its rotary key; no values.
    into: Tensor
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
    """Rotations of channel pairs by position, complex [capacity, W / 2]; 1 for a latent's channels."""

    def __init__(self, spec: ModelSpec, capacity: int, dtype: torch.dtype, device: torch.device | str) -> None:
        cos, sin = rotary_table(spec, capacity)
        turns = torch.ones(capacity, spec.key_width // 2, dtype=torch.complex64)
        turns[:, spec.kv_lora // 2 :] = torch.complex(cos, sin)
        self.turns = turns.to(device=device, dtype=dtype.to_complex())


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
