"""The store: the host's read-only copy of every routed expert, one flat payload of bytes each.

Only the codec reads a payload, so that another codec can use the same store, slots and link.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specter.models.spec import ExpertId, ModelSpec


@dataclass(frozen=True, slots=True)
class RawCodec:
    """An expert without compression: gate_up [2F, D] (gate rows first), then down [D, F], in `dtype`."""

    dtype: torch.dtype
    expert_inter: int  # F
    hidden: int  # D

    @property
    def payload_bytes(self) -> int:
        return 3 * self.expert_inter * self.hidden * self.dtype.itemsize

    def pack(self, gate_up: Tensor, down: Tensor) -> Tensor:
        """Payloads, uint8 [..., payload_bytes], of experts gate_up [..., 2F, D] and down [..., D, F]."""
        flat = torch.cat((gate_up.flatten(-2), down.flatten(-2)), dim=-1)
        return flat.to(self.dtype).view(torch.uint8)

    def views(self, payloads: Tensor) -> tuple[Tensor, Tensor]:
        """gate_up [..., 2F, D] and down [..., D, F], views into payloads uint8 [..., >= payload_bytes]."""
        flat = payloads.view(self.dtype)
        split = 2 * self.expert_inter * self.hidden
        gate_up = flat[..., :split].unflatten(-1, (2 * self.expert_inter, self.hidden))
        down = flat[..., split : split + split // 2].unflatten(-1, (self.hidden, self.expert_inter))
        return gate_up, down


class ExpertReader(Protocol):
    """A source of experts: a `Checkpoint`."""

    spec: ModelSpec

    def read_experts(self, layer: int, gate_up: Tensor, down: Tensor) -> None:
        """Fills gate_up [E, 2F, D] and down [E, D, F] of MoE layer `layer`."""


class ExpertStore:
    """All payloads, one arena uint8 [E, payload_bytes] per MoE layer. Nothing writes to it after it is built."""

    def __init__(self, codec: RawCodec, layers: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Packs layer by layer; `layers` yields gate_up [E, 2F, D] and down [E, D, F] of every MoE layer."""
        self.codec = codec
        self._arenas = [codec.pack(gate_up, down) for gate_up, down in layers]

    @classmethod
    def read(cls, codec: RawCodec, source: ExpertReader, layers: Iterable[int]) -> ExpertStore:
        """Fills the store expert by expert: host memory peaks at the store and one expert. `layers`: all, in order."""
        store = cls(codec, ())
        for layer in layers:
            arena = torch.empty(source.spec.num_experts, codec.payload_bytes, dtype=torch.uint8)
            source.read_experts(layer, *codec.views(arena))
            store._arenas.append(arena)
        return store

    def payload(self, expert: ExpertId) -> Tensor:
        """The payload of one expert, uint8 [payload_bytes]; a view, not to be written."""
        return self._arenas[expert.layer][expert.expert]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2F, D] and down [E, D, F] of one MoE layer; views, not to be written."""
        return self.codec.views(self._arenas[layer])
