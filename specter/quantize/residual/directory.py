"""The residual directory: the routed experts of a model as blobs, to be used with the INT4 directory they belong to.

    residual.json                        the report: origins, bits per weight, windows and counts of every layer
    residual-00001-of-00026.safetensors  one file per MoE layer
        model.layers.N.mlp.experts.residual          int32, all blobs of the layer one after the other
        model.layers.N.mlp.experts.residual_offsets  int64 [E + 1], first word of each blob, and the end
        metadata "specter": JSON of format, layer, and the SHA-256 of the layer's original bf16 experts, of the INT4
        directory and of the checkpoint (one entry: safetensors writes several in random order)

A layer is one tensor, so that it is read, kept and page-locked as one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specter.codecs.int4 import Int4Experts, Int4Matrices
from specter.codecs.residual.resident import ResidentCodes, stack_rows
from specter.codecs.residual.sizes import ALIGN_WORDS
from specter.errors import SpecterError
from specter.files import files_digest
from specter.models.spec import ExpertId, ModelSpec

FORMAT = "specter-residual-v1"
METADATA_KEY = "specter"
REPORT_FILE = "residual.json"
REMEDY = "encode again: python -m specter.quantize.residual encode checkpoint=DIR quantized=DIR out=DIR"


@dataclass(frozen=True, slots=True)
class LayerBlobs:
    """The blobs of one MoE layer."""

    words: Tensor  # int32
    offsets: tuple[int, ...]  # E + 1
    original_sha256: str  # of the bf16 experts, see `experts_sha256`

    def blob(self, expert: int) -> Tensor:
        """A view of one expert's blob."""
        return self.words[self.offsets[expert] : self.offsets[expert + 1]]


class ResidualDirectory:
    """A checked directory; layers are read one at a time.

    Attributes:
        report: what `residual.json` holds.
    """

    def __init__(self, directory: Path, spec: ModelSpec, report: dict[str, Any]) -> None:
        """Use `ResidualDirectory.open`."""
        self.directory = directory
        self.spec = spec
        self.report = report

    @classmethod
    def open(cls, directory: Path, spec: ModelSpec, quantized: Path | None = None) -> ResidualDirectory:
        """
        Args:
            quantized: the INT4 directory to be used with it; None skips the comparison of its digest.

        Raises:
            SpecterError: no report, another format or model, or encoded with another INT4 directory.
        """
        path = directory / REPORT_FILE
        try:
            report = json.loads(path.read_text())
        except FileNotFoundError:
            raise SpecterError(f"no {REPORT_FILE} in {directory}", REMEDY) from None
        except ValueError as error:
            raise SpecterError(f"{path} is not JSON: {error}", REMEDY) from None
        if not isinstance(report, dict) or report.get("format") != FORMAT:
            found = report.get("format") if isinstance(report, dict) else report
            raise SpecterError(f"{path} has format {found!r}, this code reads {FORMAT}", REMEDY)
        if report["shape"] != shape_of(spec):
            raise SpecterError(f"{directory} is of a model of {report['shape']}, not of {shape_of(spec)}", REMEDY)
        if quantized is not None and report["int4_sha256"] != int4_digest(quantized):
            raise SpecterError(
                f"{directory} was encoded with another INT4 directory than {quantized}",
                "give that directory, or encode again: codes and residual belong together",
            )
        return cls(directory, spec, report)

    def layer(self, layer: int) -> LayerBlobs:
        """The blobs of MoE layer `layer`, on the CPU; each is still to be checked (`check_layer`).

        Raises:
            SpecterError: the file is missing, truncated or of another format or layer.
        """
        path = self.directory / file_name(layer, self.spec.num_moe_layers)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = json.loads((file.metadata() or {}).get(METADATA_KEY, "{}"))
                words, offsets = (file.get_tensor(name) for name in tensor_names(self.spec, layer))
        except (SafetensorError, OSError, ValueError) as error:
            raise SpecterError(f"{path} is missing or damaged ({error})", REMEDY) from None
        if metadata.get("format") != FORMAT or metadata.get("layer") != layer:
            raise SpecterError(f"{path} is not layer {layer} in format {FORMAT}", REMEDY)
        _check_offsets(path, words, offsets, self.spec.num_experts)
        return LayerBlobs(words, tuple(offsets.tolist()), metadata["original_sha256"])


def _check_offsets(path: Path, words: Tensor, offsets: Tensor, num_experts: int) -> None:
    is_good = (
        words.dtype == torch.int32
        and words.dim() == 1
        and offsets.shape == (num_experts + 1,)
        and offsets.dtype == torch.int64
        and int(offsets[0]) == 0
        and int(offsets[-1]) == len(words)
        and bool((offsets.diff() > 0).all())
        and not bool((offsets % ALIGN_WORDS).any())
    )
    if not is_good:
        raise SpecterError(f"{path} has offsets that do not fit its {num_experts} blobs", REMEDY)


def shape_of(spec: ModelSpec) -> dict[str, int]:
    """What a residual directory and its model must share."""
    return {name: getattr(spec, name) for name in ("num_moe_layers", "num_experts", "hidden", "expert_inter")}


def expert_name(expert: ExpertId) -> str:
    """Names an expert in messages."""
    return f"MoE layer {expert.layer}, expert {expert.expert}"


def file_name(layer: int, num_layers: int) -> str:
    return f"residual-{layer + 1:05d}-of-{num_layers:05d}.safetensors"


def tensor_names(spec: ModelSpec, layer: int) -> tuple[str, str]:
    prefix = f"model.layers.{layer + spec.num_dense_layers}.mlp.experts"
    return f"{prefix}.residual", f"{prefix}.residual_offsets"


def int4_digest(quantized: Path) -> str:
    return files_digest(quantized, "*.safetensors", "config.json")


def layer_codes(experts: Int4Experts, layer: int, device: torch.device | str = "cpu") -> list[ResidentCodes]:
    """gate_up and down of one MoE layer as they lie on the device, leading dim E."""
    gate, up, down = (part.layer(layer).to(device) for part in (experts.gate, experts.up, experts.down))
    return pack_layer(gate, up, down)


def pack_layer(gate: Int4Matrices, up: Int4Matrices, down: Int4Matrices) -> list[ResidentCodes]:
    """gate_up [E, 2F, D] and down [E, D, F] of a layer."""
    return [stack_rows([ResidentCodes.pack(gate), ResidentCodes.pack(up)]), ResidentCodes.pack(down)]


def experts_sha256(matrices: Sequence[Tensor]) -> str:
    """SHA-256 of bf16 matrices [E, rows, columns]: expert by expert, matrices in order, row by row."""
    total = hashlib.sha256()
    for parts in zip(*(matrix.cpu() for matrix in matrices), strict=True):
        for part in parts:
            total.update(part.contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()
