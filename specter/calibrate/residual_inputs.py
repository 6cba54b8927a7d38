"""What the residual codec is measured on: the experts of a full-size model and their codes, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specter.codecs.int4 import Int4Experts
from specter.codecs.residual.encode import Encoded
from specter.codecs.residual.resident import ResidentCodes
from specter.codecs.residual.windows import Windows
from specter.errors import SpecterError
from specter.kernels.residual import SlotMemory, WaveDecoder, wave_row
from specter.models.checkpoint import Checkpoint
from specter.models.cuda.graph import Graph
from specter.models.full_size import FULL_SIZE
from specter.models.inflation.inflated import InflatedCheckpoint
from specter.quantize.gptq_format import read_directory
from specter.quantize.residual.directory import pack_layer
from specter.quantize.rtn import quantize_rtn
from specter.sample import Sample, device_ms

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
class Timed:
    """Experts of one or more layers as if they were one layer's, with blobs in slots of their own."""

    decoder: WaveDecoder
    windows: Windows
    blobs: list[Tensor]  # uint8
    slots: Tensor  # uint8 [n, bytes]
    places: Tensor  # bf16 [n, weights]: staging area
    originals: list[list[Tensor]]  # by expert

    @classmethod
    def of(cls, layers: Sequence[tuple[LayerData, Encoded]], num_experts: int) -> Timed:
        """The first `num_experts` of these layers, whose windows are alike."""
        blobs = [blob.view(torch.uint8) for _, encoded in layers for blob in encoded.blobs][:num_experts]
        first, device = layers[0][0].codes, blobs[0].device
        codes = [
            ResidentCodes(
                torch.cat([data.codes[index].words for data, _ in layers]),
                torch.cat([data.codes[index].params for data, _ in layers]),
                first[index].scale_dtype,
            )
            for index in range(len(first))
        ]
        decoder, windows = WaveDecoder(codes), layers[0][1].windows
        slots = torch.zeros(len(blobs), max(map(len, blobs)), dtype=torch.uint8, device=device)
        for slot, blob in zip(slots, blobs, strict=True):
            slot[: len(blob)] = blob
        places = torch.zeros(len(blobs), decoder.layout.num_weights, dtype=torch.bfloat16, device=device)
        originals = [
            [part[expert] for part in data.weights] for data, _ in layers for expert in range(data.num_experts)
        ]
        return cls(decoder, windows, blobs, slots, places, originals[: len(blobs)])

    @property
    def num_experts(self) -> int:
        return len(self.blobs)

    def wave(self, experts: Sequence[int], slots: Sequence[int], first_place: int) -> Tensor:
        row = wave_row(self.windows, first_place, experts, slots, len(experts))
        return torch.tensor(row, dtype=torch.int32, device=self.slots.device)

    def launch(self, decoder: WaveDecoder, wave: Tensor, slots: Tensor) -> None:
        num_experts = (len(wave) - 3) // 2
        memory = SlotMemory.whole(slots, self.num_experts)
        decoder.launch(wave, memory, self.places, two_sided=self.windows.two_sided, num_experts=num_experts)

    def decode_us(self, decoder: WaveDecoder, count: int) -> Sample:
        """us per expert where `count` are decoded a launch."""
        parts = [range(first, min(first + count, self.num_experts)) for first in range(0, self.num_experts, count)]
        waves = [self.wave(part, part, part.start) for part in parts]

        def launch_all() -> None:
            for wave in waves:
                self.launch(decoder, wave, self.slots)

        graph = Graph(launch_all)
        sample = device_ms(lambda _: graph.replay(), repeats=7, per_repeat=5)
        return sample.scaled(1e3 / self.num_experts)

    def is_equal(self) -> bool:
        """Whether the places hold the originals, bit for bit."""
        return all(
            torch.equal(place.view(torch.int16), torch.cat([part.reshape(-1) for part in parts]).view(torch.int16))
            for place, parts in zip(self.places, self.originals, strict=True)
        )
