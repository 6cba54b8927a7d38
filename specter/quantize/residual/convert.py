"""Whole models: checkpoint and INT4 directory to residual directory, and back to the routed experts.

What "original" means: a checkpoint whose routed experts are stored as BF16 comes back bit for bit. Stand-ins are stored
as int8 codes; their original is the BF16 rounding of the decoded values, which is what a device loads. F32 and F16
checkpoints are refused: rounding them to BF16 would be a loss.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from specter.codecs.residual.decode import decode
from specter.codecs.residual.encode import Encoded, encode_layer
from specter.codecs.residual.layout import Header, Kind, Layout
from specter.codecs.residual.resident import ResidentCodes, layout_of
from specter.codecs.residual.sizes import GUARD_WORDS, HEADER_WORDS
from specter.errors import SpecterError
from specter.files import replacing_directory, write_json, write_whole
from specter.models.checkpoint import Checkpoint
from specter.models.hub_config import config_of, read_spec
from specter.models.names import PARTS, on_hub
from specter.models.spec import ExpertId, ModelSpec
from specter.progress import make_progress
from specter.quantize.gptq_format import check_draft_origin, read_directory
from specter.quantize.gptq_writer import shard_name, write_index
from specter.quantize.residual.directory import (
    FORMAT,
    METADATA_KEY,
    REPORT_FILE,
    ResidualDirectory,
    expert_name,
    experts_sha256,
    file_name,
    int4_digest,
    layer_codes,
    shape_of,
    tensor_names,
)
from specter.quantize.workspace import Workspace
from specter.sources import code_digest


class ResidualWorkspace(Workspace):
    """The finished layers of a residual directory; a killed run resumes after the last one."""

    def keep(self, file: str, tensors: dict[str, Tensor], metadata: dict[str, Any], report: dict[str, Any]) -> None:
        """Adds one layer. Its report is written last: where it exists, the file is whole."""
        save_file(tensors, self.directory / file, metadata={METADATA_KEY: json.dumps(metadata)})
        write_whole(self._report(len(self.layers)), json.dumps(report))
        self.layers.append(report)


def check_lossless(checkpoint: Checkpoint) -> str:
    """How the routed experts' originals come from the checkpoint. Raises SpecterError where that would be a loss."""
    dtypes = checkpoint.expert_dtypes
    if dtypes == {"BF16"}:
        return "bf16"
    if dtypes == {"I8"}:
        return "int8 codes, rounded to bf16"
    raise SpecterError(
        f"{checkpoint.directory} stores routed experts as {' and '.join(sorted(dtypes))}; the residual codec is "
        "lossless for BF16 only",
        "convert the checkpoint to BF16 first, or run it with codec=bf16",
    )


def encode_model(
    checkpoint: Checkpoint, quantized: Path, out: Path, device: torch.device | str, console: Console
) -> dict[str, Any]:
    """Writes the residual directory `out`, layer by layer, and returns its report.

    Raises:
        SpecterError: weights that are not BF16, INT4 codes of another model or of AWQ, or `out` in use.
    """
    start, spec = time.perf_counter(), checkpoint.spec
    source = check_lossless(checkpoint)
    check_draft_origin(quantized, checkpoint)
    experts = read_directory(quantized, spec)
    experts.check_plain()
    origins = {"checkpoint_sha256": checkpoint.digest(), "int4_sha256": int4_digest(quantized)}
    work = ResidualWorkspace(out, json.dumps(origins | {"device": str(device), "code": code_digest(__name__)}))
    num_resumed = len(work.layers)
    try:
        with make_progress(console) as progress:
            task = progress.add_task(f"residual {spec.name}", total=spec.num_moe_layers, completed=num_resumed)
            for layer in range(num_resumed, spec.num_moe_layers):
                begin = time.perf_counter()
                weights = read_bf16(checkpoint, layer, device)
                codes = layer_codes(experts, layer, device)
                encoded = encode_layer(weights, codes)
                report = layer_report(encoded, layout_of(codes)) | {"original_sha256": experts_sha256(weights)}
                report["seconds"] = round(time.perf_counter() - begin, 3)
                metadata = {"format": FORMAT, "layer": layer, "original_sha256": report["original_sha256"]}
                tensors = layer_tensors(spec, layer, encoded)
                work.keep(file_name(layer, spec.num_moe_layers), tensors, metadata | origins, report)
                progress.advance(task)
    finally:
        work.discard_if_empty()
    report = {
        "format": FORMAT,
        "model": spec.name,
        "shape": shape_of(spec),
        "method": experts.method,
        "original": source,
        **origins,
        **summary(work.layers),
        "num_resumed_layers": num_resumed,
        "seconds": round(time.perf_counter() - start, 2),
        "layers": work.layers,
    }
    write_json(work.directory / REPORT_FILE, report)
    write_json(work.directory / "config.json", config_of(spec))
    work.publish()
    return report


def read_bf16(checkpoint: Checkpoint, layer: int, device: torch.device | str) -> list[Tensor]:
    """gate_up [E, 2F, D] and down [E, D, F] of one MoE layer as bf16."""
    spec = checkpoint.spec
    gate_up = torch.empty(spec.num_experts, 2 * spec.expert_inter, spec.hidden, dtype=torch.bfloat16)
    down = torch.empty(spec.num_experts, spec.hidden, spec.expert_inter, dtype=torch.bfloat16)
    checkpoint.read_experts(layer, gate_up, down)
    return [gate_up.to(device), down.to(device)]


def layer_tensors(spec: ModelSpec, layer: int, encoded: Encoded) -> dict[str, Tensor]:
    """The tensors of a layer's file, on the CPU."""
    words, offsets = tensor_names(spec, layer)
    ends = torch.tensor([0, *(len(blob) for blob in encoded.blobs)]).cumsum(0)
    return {words: torch.cat(encoded.blobs).cpu(), offsets: ends}


def layer_report(encoded: Encoded, layout: Layout) -> dict[str, Any]:
    num_weights = layout.num_weights * len(encoded.blobs)
    return {
        "windows": asdict(encoded.windows),
        "bits_per_weight": encoded.bits_per_weight,
        "num_bytes": sum(blob.nbytes for blob in encoded.blobs),
        "largest_blob_bytes": max(blob.nbytes for blob in encoded.blobs),
        "num_weights": num_weights,
        "num_patches": sum(encoded.num_patches),
        "num_raw": sum(encoded.is_raw),
        "experts": [blob_parts(blob, layout) for blob in encoded.blobs],
    }


def blob_parts(blob: Tensor, layout: Layout) -> tuple[int, int] | None:
    """What decides a blob's size beside its shapes: words of its streams, and patches; None if it is raw."""
    header = Header.unpack(blob[:HEADER_WORDS].cpu(), "a new blob")
    return (
        None
        if header.kind is Kind.RAW
        else (header.patch_offset - GUARD_WORDS - layout.stream_offset, header.num_patches)
    )


def summary(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over the layers' reports."""
    total = {name: sum(layer[name] for layer in layers) for name in ("num_bytes", "num_weights")}
    return total | {
        "bits_per_weight": 8 * total["num_bytes"] / total["num_weights"],
        "patches_per_weight": sum(layer["num_patches"] for layer in layers) / total["num_weights"],
        "num_raw": sum(layer["num_raw"] for layer in layers),
        "largest_blob_bytes": max(layer["largest_blob_bytes"] for layer in layers),
    }


def rebuild_layer(
    residual: ResidualDirectory, layer: int, codes: Sequence[ResidentCodes], device: torch.device | str
) -> list[Tensor]:
    """The original gate_up [E, 2F, D] and down [E, D, F] of one MoE layer, on `device`.

    Args:
        codes: of the layer, on `device`.

    Raises:
        SpecterError: naming the expert whose blob or codes are damaged, or the layer that differs from its original.
    """
    blobs = residual.layer(layer)
    experts = [
        decode(blobs.blob(expert).to(device), [part[expert] for part in codes], expert_name(ExpertId(layer, expert)))
        for expert in range(residual.spec.num_experts)
    ]
    matrices = [torch.stack(parts) for parts in zip(*experts, strict=True)]
    if experts_sha256(matrices) != blobs.original_sha256:
        raise SpecterError(
            f"MoE layer {layer}: the rebuilt experts differ from their original", "encode the residual directory again"
        )
    return matrices


def rebuild_model(
    quantized: Path, residual: Path, out: Path, device: torch.device | str, console: Console
) -> dict[str, Any]:
    """Writes the original routed experts to `out`, a file per MoE layer, under their publisher's names.

    Raises:
        SpecterError: damage or a mix-up of directories, named; or `out` in use. `out` is then not made.
    """
    spec = read_spec(residual)
    opened = ResidualDirectory.open(residual, spec, quantized)
    experts = read_directory(quantized, spec)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    with replacing_directory(out) as directory, make_progress(console) as progress:
        task = progress.add_task(f"rebuild {spec.name}", total=spec.num_moe_layers)
        for layer in range(spec.num_moe_layers):
            matrices = rebuild_layer(opened, layer, layer_codes(experts, layer, device), device)
            tensors = _hub_tensors(spec, layer, *matrices)
            file = shard_name(layer, spec.num_moe_layers)
            save_file(tensors, directory / file)
            weight_map |= dict.fromkeys(tensors, file)
            num_bytes += sum(tensor.nbytes for tensor in tensors.values())
            progress.advance(task)
        write_json(directory / "config.json", config_of(spec))
        write_index(directory, weight_map, num_bytes)
    return {"num_layers": spec.num_moe_layers, "num_bytes": num_bytes, "original": opened.report["original"]}


def _hub_tensors(spec: ModelSpec, layer: int, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    gate, up = gate_up.chunk(2, dim=1)
    prefix = f"model.layers.{layer + spec.num_dense_layers}.mlp.experts"
    return {
        on_hub(spec.family, f"{prefix}.{expert}.{part}.weight"): batch[expert].cpu().contiguous()
        for part, batch in zip(PARTS, (gate, up, down), strict=True)
        for expert in range(spec.num_experts)
    }
