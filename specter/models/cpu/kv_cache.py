"""The KV cache at a fixed capacity: per position and layer a latent and a rotated key, or keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.models.spec import ModelSpec

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
