"""The KV cache, the preallocated buffers of the decoder's products, and their views.

On narrow rows, creating a view costs as much as a small product, so views are made once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.models.spec import ModelSpec

ATTENTION_ROWS = 4  # per product of attention, if they divide a tile: less padding than whole tiles
KEY_BLOCK = 128  # keys are read in blocks of this many; storage is whole blocks


class KVCache:
    """Entries [L, storage, kv_width]; storage is `capacity` rounded up to whole key blocks.

    An entry is a latent and its rotary key (the whole is the key, the latent the value), or the rotated keys and then
    the values of all key heads. Entries beyond `length` are finite and masked.
    """

    def __init__(self, spec: ModelSpec, capacity: int, dtype: torch.dtype, device: torch.device | str) -> None:
        if not 1 <= capacity <= spec.max_positions:
            raise SpecterError(
                f"KV capacity {capacity} is outside 1..{spec.max_positions} of {spec.name}",
                f"set a capacity of at most {spec.max_positions} positions",
            )
        self.capacity = capacity
        self.length = 0
        self.storage = -(-capacity // KEY_BLOCK) * KEY_BLOCK
        self.entries = torch.zeros(spec.num_layers, self.storage, spec.kv_width, dtype=dtype, device=device)
        first_value = 0 if spec.is_latent else spec.num_key_heads * spec.key_width
        # Per layer and key head: views of every key block, transposed [W, KEY_BLOCK], and its values [KEY_BLOCK, V].
        self.blocks = [
            [
                (
                    _columns(layer, head * spec.key_width, spec.key_width).t().split(KEY_BLOCK, dim=1),
                    _columns(layer, first_value + head * spec.value_width, spec.value_width).split(KEY_BLOCK),
                )
                for head in range(spec.num_key_heads)
            ]
            for layer in self.entries
        ]

    def extend(self, position: int, num_rows: int) -> None:
        """Makes `num_rows` positions from `position` on the end of the cache.
        Raises SpecterError: the rows do not fit, or would leave a gap."""
        if position > self.length:
            raise SpecterError(
                f"position {position} lies beyond the {self.length} cached ones", "process positions in order"
            )
        if position + num_rows > self.capacity:
            raise SpecterError(
                f"{position + num_rows} positions do not fit the KV cache of {self.capacity}",
                "shorten the prompt, generate fewer tokens or raise the KV capacity",
            )
        self.length = position + num_rows

    def crop(self, length: int) -> None:
        """Keeps the first `length` positions."""
        self.length = min(self.length, length)

    def reset(self) -> None:
        self.length = 0
        self.entries.zero_()


def _columns(entries: Tensor, begin: int, width: int) -> Tensor:
    return entries[:, begin : begin + width]


class MlpScratch:
    """Buffers of R rows for a layer without routed experts; see `LayerWeights.wide` (E, g and S may be 0)."""

    def __init__(self, like: Tensor, num_rows: int, num_router: int, num_gates: int, inter: int) -> None:
        self.wide = like.new_empty(num_rows, num_router + num_gates + 2 * inter)
        # [R, E], [R, g], [R, S], [R, S]
        self.router, self.shared_gate, self.gate, self.up = self.wide.split((num_router, num_gates, inter, inter), 1)


class Scratch:
    """Buffers of a pass over `num_tiles` tiles, reused by all layers and passes."""

    def __init__(self, spec: ModelSpec, num_tiles: int, tile: int, cache: KVCache) -> None:
        heads, num_keys, width, value_width = spec.num_heads, spec.num_key_heads, spec.key_width, spec.value_width
        group = heads // num_keys  # G, queries per key head
        like, num_rows = cache.entries, num_tiles * tile
        self.tile = tile
        # Queries, then the cache entries; see `AttentionWeights.into`.
        self.wide = like.new_empty(num_rows, heads * width + spec.kv_width)
        self.entries = self.wide[:, heads * width :]
        rotated = self.wide[:, : (heads + num_keys) * width].unflatten(1, (-1, width))
        self.latent = rotated[:, heads, : spec.kv_lora]
        self.pairs = torch.view_as_complex(rotated.unflatten(-1, (-1, 2)))
        # [parts, Hk, r, G, W]: a matrix of queries per part of a tile and key head.
        self.part_rows = rows = ATTENTION_ROWS if tile % ATTENTION_ROWS == 0 else tile  # r
        self.by_row = rotated[:, :heads].view(-1, rows, num_keys, group, width).transpose(1, 2)
        self.queries = like.new_empty(self.by_row.shape)
        contexts = like.new_zeros(num_rows // rows, num_keys, rows, group, value_width)
        self.contexts = contexts.transpose(1, 2)  # [parts, r, Hk, G, Vw]
        self.parts = [
            [(query.flatten(0, 1), context.flatten(0, 1)) for query, context in zip(*part, strict=True)]
            for part in zip(self.queries, contexts, strict=True)
        ]
        # Shared by all parts; scores of skipped blocks stay finite and masked.
        self.scores = like.new_empty(num_keys, rows, group, cache.storage)
        self.probs = torch.empty_like(self.scores)
        self.blocks = [
            (scores.flatten(0, 1).split(KEY_BLOCK, dim=1), probs.flatten(0, 1).split(KEY_BLOCK, dim=1))
            for scores, probs in zip(self.scores, self.probs, strict=True)
        ]
        self.addend = like.new_empty(rows * group, value_width)
        self.dense = MlpScratch(like, num_rows, 0, 0, spec.dense_inter if spec.num_dense_layers else 0)
        self.moe = MlpScratch(like, num_rows, spec.num_experts, int(spec.shared_gate), spec.shared_inter)


class ExpertScratch:
    """Buffers of a wave of at most `num_tiles` tiles: inputs, gate and up, results."""

    def __init__(self, spec: ModelSpec, num_tiles: int, tile: int, like: Tensor) -> None:
        self.num_tiles = num_tiles
        self._x = like.new_empty(num_tiles * tile, spec.hidden)
        wide = like.new_empty(num_tiles * tile, 2 * spec.expert_inter)
        self._gate, self._up = wide.chunk(2, dim=1)
        self._results = torch.empty_like(self._x)
        # Per tile: [tile, D], [tile, 2F], [tile, F], [tile, D]
        parts = (buffer.split(tile) for buffer in (self._x, wide, self._gate, self._results))
        self.tiles = list(zip(*parts, strict=True))
        self._rows: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def rows(self, num: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The first `num` rows of inputs, gate, up and results."""
        if num not in self._rows:
            self._rows[num] = (self._x[:num], self._gate[:num], self._up[:num], self._results[:num])
        return self._rows[num]
