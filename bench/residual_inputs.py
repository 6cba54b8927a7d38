"""What `bench.residual` measures on: the experts of a full-size model and their codes, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specter.codecs.int4 import Int4Experts
from specter.codecs.residual.layout import Layout
from specter.codecs.residual.resident import ResidentCodes
from specter.errors import SpecterError
from specter.models.checkpoint import Checkpoint
from specter.models.full_size import FULL_SIZE
from specter.models.inflation.inflated import InflatedCheckpoint
from specter.quantize.gptq_format import read_directory
from specter.quantize.residual.directory import pack_layer
from specter.quantize.rtn import quantize_rtn

CODES = ("gptq", "rtn", "rtn_asym")
GROUP = 128


@dataclass(frozen=True, slots=True)
class LayerData:
    """The experts of one MoE layer on the device."""

    weights: list[Tensor]  # bf16: gate_up [E, 2F, D], down [E, D, F]
    codes: list[ResidentCodes]

    @property
    def num_experts(self) -> int:
        return len(self.weights[0])

    def codes_of(self, expert: int) -> list[ResidentCodes]:
        return [part[expert] for part in self.codes]


class Source:
    """Layers of a full-size model, computed on the device."""

    def __init__(
        self, model: str, checkpoint: Path | None, codes: str, quantized: Path | None, device: torch.device
    ) -> None:
        """Raises SpecterError for a model, codes or directory that is not there."""
        spec = FULL_SIZE.get(model)
        if spec is None:
            raise SpecterError(f"model={model} is unknown", f"use one of: {', '.join(FULL_SIZE)}")
        if codes not in CODES:
            raise SpecterError(f"codes={codes} is unknown", f"use one of: {', '.join(CODES)}")
        self.spec = spec
        self.narrow = Checkpoint.open(checkpoint or Path("data/standins") / model)
        self._wide = InflatedCheckpoint(self.narrow, spec, device=device)
        self._codes = codes
        self._int4: Int4Experts | None = None
        if codes == "gptq":
            directory = quantized or Path("results/quantized") / model / "gptq"
            self._int4 = read_directory(directory, self.narrow.spec)

    def layer(self, layer: int) -> LayerData:
        gate_up, down = self._wide.experts(layer)
        if self._int4 is not None:
            return LayerData([gate_up, down], pack_layer(*self._wide.int4(self._int4, layer)))
        sym = self._codes == "rtn"
        codes = [_rtn_codes(weights, sym) for weights in (gate_up, down)]
        return LayerData([gate_up, down], codes)


def _rtn_codes(weights: Tensor, sym: bool) -> ResidentCodes:
    """Expert by expert: the quantizer works in fp32."""
    parts = [ResidentCodes.pack(quantize_rtn(expert, GROUP, sym=sym)) for expert in weights]
    return ResidentCodes(torch.stack([part.words for part in parts]), torch.stack([part.params for part in parts]))


@dataclass(frozen=True, slots=True)
class Slots:
    """Room for decoded experts, bf16 [n, weights]."""

    memory: Tensor
    layout: Layout

    @classmethod
    def empty(cls, num_slots: int, layout: Layout, device: torch.device) -> Slots:
        return cls(torch.zeros(num_slots, layout.num_weights, dtype=torch.bfloat16, device=device), layout)

    def matrices(self, slot: int) -> list[Tensor]:
        sizes = [matrix.num_weights for matrix in self.layout.matrices]
        parts = zip(self.memory[slot].split(sizes), self.layout.matrices, strict=True)
        return [part.view(matrix.rows, matrix.columns) for part, matrix in parts]

    def equal(self, slot: int, data: LayerData, expert: int) -> bool:
        pairs = zip(self.matrices(slot), data.weights, strict=True)
        return all(torch.equal(one.view(torch.int16), all_[expert].view(torch.int16)) for one, all_ in pairs)
