"""The KV cache of MLA: one latent and one rotated key per position and layer, at a fixed capacity."""

from __future__ import annotations

import torch

from specter.errors import SpecterError
from specter.model.spec import ModelSpec

KEY_BLOCK = 128  # keys are read in blocks of this many; storage is whole blocks


class KVCache:
    """Latents [L, storage, kv_lora + rope_dim]; storage is `capacity` rounded up to whole key blocks.

    Cropping only lowers `length`; what lies beyond is finite, never read unmasked, and overwritten later.
    """

    def __init__(self, spec: ModelSpec, capacity: int, dtype: torch.dtype, device: torch.device | str) -> None:
        if not 1 <= capacity <= spec.max_positions:
            raise SpecterError(
                f"KV capacity {capacity} is outside 1..{spec.max_positions} of {spec.name}",
                f"set a capacity of at most {spec.max_positions} positions",
            )
        self.capacity = capacity
        self.length = 0
        self.kv_lora = spec.kv_lora
        self.width = spec.kv_lora + spec.rope_dim
        self.storage = -(-capacity // KEY_BLOCK) * KEY_BLOCK
        self.latents = torch.zeros(spec.num_layers, self.storage, self.width, dtype=dtype, device=device)
        # Per layer: views of every key block, transposed [W, KEY_BLOCK], and of its values [KEY_BLOCK, kv_lora].
        self.blocks = [
            (layer.t().split(KEY_BLOCK, dim=1), layer[:, : spec.kv_lora].split(KEY_BLOCK)) for layer in self.latents
        ]

    def extend(self, position: int, num_rows: int) -> None:
        """Makes `position`… the end of the cache, rewriting what was there.

        Raises:
            SpecterError: the rows do not fit, or would leave a gap.
        """
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
        self.latents.zero_()
