"""Checks that a row's bits do not depend on the rows beside it, which is a property of this machine's BLAS.

Losslessness depends on it: a verification pass must give every row the bits of plain decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.models.cpu.buffers import KEY_BLOCK
from specter.models.cpu.decoder import Decoder

_MAX_SLOTS = 8
_SEED = 0
_log = logging.getLogger(__name__)


def invariance_check(decoder: Decoder) -> list[str]:
    """Compares rows bit by bit at other places in the tile, among other neighbours and in other waves.

    Runs the dense layers and one MoE layer at the decoder's shapes and thread count, with random experts in its first
    slots. Clears KV cache and slots: call it before loading anything. Switches the decoder to `rowwise` if the tiled
    path fails. Returns the comparisons of the tiled path that differ.

    Raises SpecterError: the row-wise path differs too.
    """
    num_rows = min(2 * decoder.tile + 1, decoder.cache.capacity)
    decoder.rowwise = False
    failures = _differences(decoder, num_rows)
    if failures:
        decoder.rowwise = True
        _log.warning("rows are not bit-invariant on this machine (%s): every row runs alone", ", ".join(failures))
        if rowwise_failures := _differences(decoder, num_rows):
            raise SpecterError(
                f"results differ from run to run even row by row: {', '.join(rowwise_failures)}",
                "use another torch build, or another device; lossless decoding is not possible on this one",
            )
    return failures


def _differences(decoder: Decoder, num_rows: int) -> list[str]:
    cache, arena = decoder.cache, decoder.arena
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(0, decoder.spec.vocab, (num_rows,), generator=generator).tolist()
    # Rows on both sides of a key block's end, if the cache has several.
    start = max(0, min(KEY_BLOCK - num_rows // 2, cache.capacity - num_rows))
    cache.reset()
    cache.entries[:, :start] = torch.randn(cache.entries[:, :start].shape, generator=generator).to(cache.entries)
    cache.length = start
    slots = list(range(min(arena.num_slots, _MAX_SLOTS)))
    payload = _random_payload(decoder, generator)
    for slot in slots:
        arena.write(slot, payload)
    try:
        together = _run(decoder, tokens, start, slots)
        shift = min(decoder.tile // 2 + 1, num_rows - 1)
        shifted = _run(decoder, tokens[shift:], start + shift, slots)
        # From the end: a pass crops the cache at its last row.
        places = {0, 1, decoder.tile // 2, decoder.tile - 1, decoder.tile, num_rows - 1} & set(range(num_rows))
        alone = [
            torch.equal(_run(decoder, [tokens[i]], start + i, slots), together[i : i + 1])
            for i in sorted(places, reverse=True)
        ]
        one_by_one = _run(decoder, tokens, start, slots[-1:])
    finally:
        for slot in slots:
            arena.poison(slot)
        cache.reset()
    outcomes = {
        "a row alone": all(alone),
        "another place in the tile": torch.equal(shifted, together[shift:]),
        "waves of one expert, another slot": torch.equal(one_by_one, together),
    }
    return [name for name, is_equal in outcomes.items() if not is_equal]


def _random_payload(decoder: Decoder, generator: torch.Generator) -> Tensor:
    codec = decoder.arena.codec
    gate_up = torch.randn(2 * codec.expert_inter, codec.hidden, generator=generator) * codec.hidden**-0.5
    down = torch.randn(codec.hidden, codec.expert_inter, generator=generator) * codec.expert_inter**-0.5
    return codec.pack(gate_up, down)


def _run(decoder: Decoder, tokens: Sequence[int], position: int, slots: Sequence[int]) -> Tensor:
    """One pass in which every slot holds the same expert: logits and KV of every row, [rows, V + layers * kv_width]."""
    num_layers = min(decoder.num_dense_layers + 1, decoder.num_layers)
    target = decoder.target_pass(tokens, position, len(tokens))
    for layer in range(num_layers):
        routing = target.attend_and_route(layer)
        if routing is None:
            continue
        experts = np.unique(routing).tolist()
        for begin in range(0, len(experts), len(slots)):
            wave = experts[begin : begin + len(slots)]
            target.run_experts(layer, wave, slots[: len(wave)])
        target.combine(layer)
    entries = decoder.cache.entries[:num_layers, position : position + len(tokens)]
    return torch.cat((torch.stack(target.outputs()), entries.transpose(0, 1).flatten(1)), dim=1)
