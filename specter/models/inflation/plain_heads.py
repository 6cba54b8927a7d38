"""Inflation of multi-head and grouped-query attention: more heads, and wider ones.

The frequencies of a narrow head are a subset of the wide head's: theta^(-2i/d) = theta^(-2(iD/d)/D). So its pair i is
the wide pair i * D / d, and the other rows of q and k of the wide head are zero. Values have an isometry per key head.
Wide key head j is narrow j % Hk, and query g of its group is narrow g % G; the columns of o are divided by the copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specter.models.inflation.isometry import Isometry
from specter.models.rope import softmax_scale
from specter.models.spec import ModelSpec


class PlainHeads:
    """From `narrow` to `wide`; `values` are the key heads' isometries."""

    def __init__(self, narrow: ModelSpec, wide: ModelSpec, values: Sequence[Isometry]) -> None:
        self._old, self._new, self._values = narrow, wide, values
        self._group = narrow.num_heads // narrow.num_kv_heads
        self._key_copies = wide.num_kv_heads // narrow.num_kv_heads
        self._group_copies = wide.num_heads // wide.num_kv_heads // self._group

    def rows(self, kind: str, weight: Tensor) -> Tensor:
        """Rows [heads * d, n] of q, k or v (a bias has n = 1) as those of the wide heads."""
        if kind == "v":
            heads = weight.unflatten(0, (self._old.num_kv_heads, -1)).unbind()
            wide = torch.stack([axis.rows(head) for axis, head in zip(self._values, heads, strict=True)])
            return wide.repeat(self._key_copies, 1, 1).flatten(0, 1)
        halves = weight.unflatten(
            0, (self._old.num_kv_heads, -1, 2, self._old.rope_dim // 2)
        )  # [Hk, G or 1, 2, d/2, n]
        stride = self._new.rope_dim // self._old.rope_dim
        spread = halves.new_zeros(*halves.shape[:3], self._new.rope_dim // 2, weight.shape[1])
        spread[..., ::stride, :] = halves
        if kind == "q":
            spread *= softmax_scale(self._old) / softmax_scale(self._new)
            spread = spread.repeat(1, self._group_copies, 1, 1, 1)
        copies: Tensor = spread.repeat(self._key_copies, 1, 1, 1, 1)
        return copies.flatten(0, 3)

    def columns(self, weight: Tensor) -> Tensor:
        """Columns [n, H * d] of o as those of the wide heads, whose copies add up to the narrow head's output."""
        heads = weight.unflatten(1, (self._old.num_kv_heads, self._group, -1))  # [n, Hk, G, d]
        wide = torch.stack(
            [axis.columns(head) * axis.shrink for axis, head in zip(self._values, heads.unbind(1), strict=True)], dim=1
        )
        copies = wide.repeat(1, self._key_copies, self._group_copies, 1)
        return copies.flatten(1) / (self._key_copies * self._group_copies)
