"""Residual experts on the CPU: blobs in store and slots, decoded by the reference decoder into a staging arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from specter.codecs.int4 import Int4Experts
from specter.codecs.residual.decode import check_layer, decode
from specter.codecs.residual.resident import ResidentCodes
from specter.experts.slots import SlotArena
from specter.models.spec import ExpertId, ModelSpec
from specter.quantize.residual.directory import LayerBlobs, ResidualDirectory, expert_name, layer_codes


@dataclass(frozen=True, slots=True)
class BlobStore:
    """The host's blobs of every expert, and the codes that they are decoded with."""

    layers: list[LayerBlobs]
    codes: list[list[ResidentCodes]]  # gate_up and down by MoE layer, leading dim E

    @classmethod
    def open(cls, directory: Path, quantized: Path, spec: ModelSpec, int4: Int4Experts) -> BlobStore:
        """Reads and checks all blobs. Raises SpecterError naming the expert whose blob or codes are damaged."""
        residual = ResidualDirectory.open(directory, spec, quantized)
        layers, codes = [], []
        for layer in range(spec.num_moe_layers):
            layers.append(residual.layer(layer))
            codes.append(layer_codes(int4, layer))
            blobs = [layers[-1].blob(expert) for expert in range(spec.num_experts)]
            names = [expert_name(ExpertId(layer, expert)) for expert in range(spec.num_experts)]
            check_layer(blobs, codes[-1], names)
        return cls(layers, codes)


class BlobSlots:
    """Slots of one blob each; an empty one cannot be decoded, so that a residency bug shows.

    Args:
        staging: the decoded experts of a wave, in places 0, 1, …
    """

    def __init__(self, num_slots: int, store: BlobStore, staging: SlotArena) -> None:
        self._slots: list[Tensor | None] = [None] * num_slots
        self._store, self._staging = store, staging

    def move(self, expert: ExpertId, slot: int) -> None:
        """A `Mover`."""
        self._slots[slot] = self._store.layers[expert.layer].blob(expert.expert).clone()

    def decode(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Decodes experts of MoE layer `layer` into the staging arena. Raises SpecterError for a slot that holds
        another expert's blob: its codes have another checksum."""
        codes, codec = self._store.codes[layer], self._staging.codec
        for place, (expert, slot) in enumerate(zip(experts, slots, strict=True)):
            blob = self._slots[slot]
            assert blob is not None, f"slot {slot} is empty"
            matrices = decode(blob, [part[expert] for part in codes], expert_name(ExpertId(layer, expert)))
            self._staging.write(place, codec.pack(*matrices))
