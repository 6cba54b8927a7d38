"""Routed experts of the target: rows grouped by expert in tiles of 16, weights read from slots.

    x [T, D] model dtype, arena [num_slots, stride]: a slot is gate_up [2F, D] (gate first), then down [D, F]
    results fp32 [T, k, D]
    bytes per layer = distinct experts * 3 * D * F * itemsize

`route` selects and groups on the device, so a resident pass has no host synchronization. A wave is the same two
launches with a slot table that lists only its experts; other tiles are skipped. One program of one fixed
configuration writes each row of `results`, so the bits do not depend on the composition of the wave.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter.kernels.device import TILE, Launch, pow2, silu, wait_previous
from specter.kernels.routing import Rule, mixer_keys, mixer_weight

_ROUTE_ROWS = 16  # rows per step of `route`; fixed, because it determines the layout of sums


@dataclass(frozen=True, slots=True)
class Routing:
    """Routing of one layer and its tiles; a tile is up to 16 (row, rank) pairs of one expert."""

    chosen: Tensor  # int16 [T, k], rank order
    weights: Tensor  # fp32 [T, k], from `Rule`
    pairs: Tensor  # int32 [tiles, 16]: row * k + rank
    tile_experts: Tensor  # int32 [tiles]
    tile_sizes: Tensor  # int32 [tiles]
    num_tiles: Tensor  # int32 [1]

    @classmethod
    def empty(cls, num_rows: int, top_k: int, num_experts: int, device: torch.device | str) -> Routing:
        tiles = max_tiles(num_rows, top_k, num_experts)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        chosen, weights = (zeros(num_rows, top_k, dtype=dtype) for dtype in (torch.int16, torch.float32))
        return cls(chosen, weights, zeros(tiles, TILE), zeros(tiles), zeros(tiles), zeros(1))


def max_tiles(num_rows: int, top_k: int, num_experts: int) -> int:
    """Upper bound on the number of tiles for `num_rows` rows."""
    pairs = num_rows * top_k
    return min(pairs, num_experts + pairs // TILE)


@triton.jit
def _ranked_keys(probs, experts, BLOCK_E: tl.constexpr):
    """Distinct non-negative int64 keys, ordered as (weight descending, index ascending)."""
    # Bits of non-negative floats order as integers; the reversed index in the low part breaks ties.
    return probs.to(tl.int32, bitcast=True).to(tl.int64) * BLOCK_E + (BLOCK_E - 1 - experts)


@triton.jit(do_not_specialize=["T"])
def _route(
    logits, chosen, weights, pairs, tile_experts, tile_sizes, num_tiles, T, scaling, jitter, E: tl.constexpr,
    STRIDE: tl.constexpr, TOP_K: tl.constexpr, NORMED: tl.constexpr, MIXER: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    TAKEN: tl.constexpr = -4611686018427387904 if MIXER else -1  # below the key of any remaining expert
    experts = tl.arange(0, BLOCK_E)
    lanes = tl.arange(0, BLOCK_T)
    wait_previous(PDL)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for begin in range(0, T, BLOCK_T):
        rows = begin + lanes
        real = rows < T
        at = logits + rows[:, None] * STRIDE + experts[None, :]
        scores = tl.load(at, mask=real[:, None] & (experts < E)[None, :], other=float("-inf"))
        if MIXER:
            keys = mixer_keys(scores, experts[None, :], E, BLOCK_E, TAKEN)
        else:
            peak = tl.max(scores, axis=1)
            probs = tl.exp(scores - tl.where(real, peak, 0.0)[:, None])
            probs = probs / tl.where(real, tl.sum(probs, axis=1), 1.0)[:, None]
            keys = _ranked_keys(probs, experts[None, :], BLOCK_E)
        for rank in range(TOP_K):
            best = tl.max(keys, axis=1)
            if MIXER:
                picked = keys == best[:, None]
                expert = tl.sum(tl.where(picked, experts[None, :], 0), axis=1)
                weight = mixer_weight(scores, keys > TAKEN, picked, jitter) * scaling
            else:
                expert = BLOCK_E - 1 - best % BLOCK_E
                weight = (best // BLOCK_E).to(tl.int32).to(tl.float32, bitcast=True) * scaling
            tl.store(chosen + rows * TOP_K + rank, expert.to(chosen.dtype.element_ty), mask=real)
            tl.store(weights + rows * TOP_K + rank, weight, mask=real)
            counts += tl.sum(((keys == best[:, None]) & real[:, None]).to(tl.int32), axis=0)
            keys = tl.where(keys == best[:, None], TAKEN, keys)
    tl.debug_barrier()  # `chosen` is read back below
    tiles = (counts + TILE - 1) // TILE
    starts = tl.cumsum(tiles, axis=0) - tiles
    tl.store(num_tiles, tl.sum(tiles, axis=0))
    for part in range(tl.max(tiles, axis=0)):
        mine = part < tiles
        tl.store(tile_experts + starts + part, experts, mask=mine)
        tl.store(tile_sizes + starts + part, tl.minimum(counts - part * TILE, TILE), mask=mine)
    filled = starts * TILE
    for begin in range(0, T, BLOCK_T):
        rows = begin + lanes
        if NORMED:
            total = tl.zeros((BLOCK_T,), tl.float32)
            for rank in range(TOP_K):
                total += tl.load(weights + rows * TOP_K + rank, mask=rows < T, other=0.0)
            total = tl.where(rows < T, total, 1.0)
            for rank in range(TOP_K):
                at_rank = weights + rows * TOP_K + rank
                share = tl.load(at_rank, mask=rows < T, other=0.0) / total * scaling
                tl.store(at_rank, share, mask=rows < T)
        ranks = tl.full((BLOCK_T, BLOCK_E), -1, tl.int32)
        for rank in range(TOP_K):
            expert = tl.load(chosen + rows * TOP_K + rank, mask=rows < T, other=-1).to(tl.int32)
            ranks = tl.where(experts[None, :] == expert[:, None], rank, ranks)
        picked = (ranks >= 0).to(tl.int32)
        place = filled[None, :] + tl.cumsum(picked, axis=0) - picked
        tl.store(pairs + place, rows[:, None] * TOP_K + ranks, mask=ranks >= 0)
        filled += tl.sum(picked, axis=0)


def route(logits: Tensor, routing: Routing, rule: Rule, pdl: bool) -> None:
    """Top-k of router logits fp32 [T, E] (rows may be strided; ties: lower index), then the tiles; one program."""
    num_rows, num_experts = logits.shape
    _route[(1,)](
        logits, routing.chosen, routing.weights, routing.pairs, routing.tile_experts, routing.tile_sizes,
        routing.num_tiles, num_rows, rule.scaling, rule.jitter, E=num_experts, STRIDE=logits.stride(0),
        TOP_K=routing.chosen.shape[1], NORMED=rule.is_normed, MIXER=rule.is_mixer, BLOCK_E=pow2(num_experts),
        BLOCK_T=_ROUTE_ROWS, TILE=TILE, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _gate_up(
    x, scales, arena, slots, pairs, tile_experts, tile_sizes, num_tiles, inner, stride, D: tl.constexpr,
    F: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = D % BLOCK_K == 0
    tile = tl.program_id(1)
    wait_previous(PDL)
    if tile < tl.load(num_tiles):
        slot = tl.load(slots + tl.load(tile_experts + tile))
        if slot >= 0:
            lanes = tl.arange(0, BLOCK_M)
            real = lanes < tl.load(tile_sizes + tile)
            pair = tl.load(pairs + tile * BLOCK_M + lanes, mask=real, other=0)
            channels = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
            ks = tl.arange(0, BLOCK_K)
            rows = x + (pair // TOP_K)[:, None] * D
            scale = tl.load(scales + pair // TOP_K)[:, None]
            gate = arena + slot.to(tl.int64) * stride + tl.minimum(channels, F - 1)[:, None] * D
            up = gate + F * D
            acc_gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            acc_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
                at = (k + ks)[None, :]
                if EVEN:
                    values = tl.load(rows + at, mask=real[:, None], other=0.0)
                    gate_w = tl.load(gate + at)
                    up_w = tl.load(up + at)
                else:
                    values = tl.load(rows + at, mask=real[:, None] & (at < D), other=0.0)
                    gate_w = tl.load(gate + at, mask=at < D, other=0.0)
                    up_w = tl.load(up + at, mask=at < D, other=0.0)
                acc_gate = tl.dot(values, tl.trans(gate_w), acc_gate, input_precision="ieee")
                acc_up = tl.dot(values, tl.trans(up_w), acc_up, input_precision="ieee")
            out = inner + pair[:, None] * F + channels[None, :]
            value = silu(acc_gate * scale) * (acc_up * scale)
            tl.store(out, value.to(inner.dtype.element_ty), mask=real[:, None] & (channels < F)[None, :])


@triton.jit
def _down(
    inner, arena, slots, pairs, tile_experts, tile_sizes, num_tiles, results, stride, D: tl.constexpr,
    F: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = F % BLOCK_K == 0
    tile = tl.program_id(1)
    wait_previous(PDL)
    if tile < tl.load(num_tiles):
        slot = tl.load(slots + tl.load(tile_experts + tile))
        if slot >= 0:
            lanes = tl.arange(0, BLOCK_M)
            real = lanes < tl.load(tile_sizes + tile)
            pair = tl.load(pairs + tile * BLOCK_M + lanes, mask=real, other=0)
            channels = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
            ks = tl.arange(0, BLOCK_K)
            rows = inner + pair[:, None] * F
            w = arena + slot.to(tl.int64) * stride + 2 * F * D + tl.minimum(channels, D - 1)[:, None] * F
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in tl.range(0, F, BLOCK_K, num_stages=STAGES):
                at = (k + ks)[None, :]
                if EVEN:
                    values = tl.load(rows + at, mask=real[:, None], other=0.0)
                    weight = tl.load(w + at)
                else:
                    values = tl.load(rows + at, mask=real[:, None] & (at < F), other=0.0)
                    weight = tl.load(w + at, mask=at < F, other=0.0)
                acc = tl.dot(values, tl.trans(weight), acc, input_precision="ieee")
            out = results + pair.to(tl.int64)[:, None] * D + channels[None, :]
            tl.store(out, acc, mask=real[:, None] & (channels < D)[None, :])


def run_experts(
    x: Tensor, scales: Tensor, arena: Tensor, slots: Tensor, routing: Routing, inner: Tensor, results: Tensor,
    launch_up: Launch, launch_down: Launch, pdl: bool,
) -> None:  # fmt: skip
    """Runs the experts listed in `slots` on all their rows.

    Args:
        x: [T, D], multiplied by scales fp32 [T]. arena: [num_slots, stride].
        slots: int32 [E], -1 for an expert outside this wave.
        inner: [T * k, F] scratch. results: fp32 [T, k, D] out; rows of other experts are unchanged.
    """
    num_rows, hidden = x.shape
    top_k, inter = routing.chosen.shape[1], inner.shape[1]
    tiles = max_tiles(num_rows, top_k, slots.shape[0])
    table = (routing.pairs, routing.tile_experts, routing.tile_sizes, routing.num_tiles)
    _gate_up[(triton.cdiv(inter, launch_up.block_n), tiles)](
        x, scales, arena, slots, *table, inner, arena.stride(0), D=hidden, F=inter, TOP_K=top_k, BLOCK_M=TILE,
        BLOCK_N=launch_up.block_n, BLOCK_K=min(launch_up.block_k, pow2(hidden)), STAGES=launch_up.num_stages,
        PDL=pdl, num_warps=launch_up.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    _down[(triton.cdiv(hidden, launch_down.block_n), tiles)](
        inner, arena, slots, *table, results, arena.stride(0), D=hidden, F=inter, BLOCK_M=TILE,
        BLOCK_N=launch_down.block_n, BLOCK_K=min(launch_down.block_k, pow2(inter)), STAGES=launch_down.num_stages,
        PDL=pdl, num_warps=launch_down.num_warps, launch_pdl=pdl,
    )  # fmt: skip
