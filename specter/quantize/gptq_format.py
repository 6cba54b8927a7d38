"""The AutoGPTQ directory: the layout of INT4 experts on disk, and its strict reader (`gptq_writer` writes).

Per linear, W [out, in], groups of g input channels, 4 bits:

    qweight  int32 [in / 8, out]      nibble i of row r = code of input channel 8 r + i, lowest nibble first
    scales   fp16  [in / g, out]
    qzeros   int32 [in / g, out / 8]  nibble j of column c = zero - 1 of output channel 8 c + j
    g_idx    int32 [in]               group of each input channel, here always i // g

named model.layers.N.mlp.experts.M.{gate,up,down}_proj.{qweight,scales,qzeros,g_idx}; N counts dense layers.
A publisher's names are read too (Phi: block_sparse_moe.experts.M.w1 …). `checkpoint_format` is "gptq"; "gptq_v2", which
stores zero instead of zero - 1, is read too. AWQ adds one fp32 [D] per layer, model.layers.N.mlp.experts.input_scales,
under a `checkpoint_format` of its own, so that other programs refuse it.

Directories written here hold only the routed experts; all other weights are the target's. In a directory of another
program, quantized attention and shared experts are counted and ignored.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specter.codecs.int4 import Int4Experts, Int4Matrices
from specter.errors import SpecterError
from specter.files import read_object
from specter.models.checkpoint import Checkpoint, StoredTensor, indexed_files, read_headers
from specter.models.spec import ModelSpec
from specter.quantize.rtn import SYMMETRIC_ZERO, group_of

PROJECTIONS = ("gate", "up", "down")
PARTS = ("qweight", "scales", "qzeros", "g_idx")
CODES_PER_WORD = 8  # 4-bit codes in an int32
V1, V2, V1_WITH_INPUT_SCALES = "gptq", "gptq_v2", "gptq_with_input_scales"
OLD_CONFIG_FILE = "quantize_config.json"
REPORT_FILE = "quantization.json"
REMEDY = "quantise again: python -m specter.quantize checkpoint=DIR out=DIR method=gptq group=128"


# -- bits ---


def pack_words(values: Tensor) -> Tensor:
    """Packs uint8 [..., n, m] of values 0..15 along n into int32 [..., n / 8, m], lowest nibble first.

    Raises SpecterError: n is not a multiple of 8.
    """
    if values.shape[-2] % CODES_PER_WORD:
        raise SpecterError(
            f"{values.shape[-2]} channels cannot be packed eight to a word",
            "use a model whose hidden and expert sizes are multiples of 8",
        )
    words = torch.zeros_like(values[..., ::CODES_PER_WORD, :], dtype=torch.int32, memory_format=torch.contiguous_format)
    for nibble in range(CODES_PER_WORD):
        words |= values[..., nibble::CODES_PER_WORD, :].int() << 4 * nibble
    return words


def unpack_words(words: Tensor) -> Tensor:
    """Inverse of `pack_words`: int32 [..., n / 8, m] -> uint8 [..., n, m]."""
    nibbles = [(words >> 4 * nibble).bitwise_and_(15).to(torch.uint8) for nibble in range(CODES_PER_WORD)]
    return torch.stack(nibbles, -2).flatten(-3, -2)


def pack(matrices: Int4Matrices) -> dict[str, Tensor]:
    """The four parts of a batch of linears, each with the batch's leading dims."""
    codes = matrices.codes
    group_index = torch.arange(codes.shape[-1], dtype=torch.int32, device=codes.device) // matrices.group
    return {
        "qweight": pack_words(codes.mT),
        "scales": matrices.scales.mT.contiguous(),
        "qzeros": pack_words(matrices.zeros - 1).mT.contiguous(),
        "g_idx": group_index.expand(*codes.shape[:-2], -1).contiguous(),
    }


def unpack(parts: dict[str, Tensor], group: int, zero_offset: int = 1) -> Int4Matrices:
    """Inverse of `pack`; `g_idx` is ignored. The format stores zeros less `zero_offset`."""
    return Int4Matrices(
        codes=unpack_words(parts["qweight"]).mT.contiguous(),
        scales=parts["scales"].mT.contiguous(),
        zeros=unpack_words(parts["qzeros"].mT) + zero_offset,
        group=group,
    )


# -- names ---


def tensor_name(spec: ModelSpec, layer: int, expert: int, projection: str, part: str) -> str:
    """The name within Specter (see `specter.models.names`); `layer` counts MoE layers from 0."""
    return f"{_experts(spec, layer)}.{expert}.{projection}_proj.{part}"


def scales_name(spec: ModelSpec, layer: int) -> str:
    """Name of the factors of the routed experts' input in MoE layer `layer`."""
    return f"{_experts(spec, layer)}.input_scales"


def _experts(spec: ModelSpec, layer: int) -> str:
    return f"model.layers.{layer + spec.num_dense_layers}.mlp.experts"


# -- reading ---


def read_directory(directory: Path, spec: ModelSpec) -> Int4Experts:
    """Reads all routed experts of `spec` from an AutoGPTQ directory of any program.

    Other tensors are ignored: the draft shares the target's. `method` and `num_fallback` come from the directory's
    `meta`; without one (another program's directory) they are "gptq" and 0.

    Raises SpecterError: another format or width, channels of a group that are not adjacent (act-order), or a missing,
    unexpected, duplicate, truncated or misshapen tensor.
    """
    quantization = _check_quantization(directory, _read_quantization(directory))
    paths = indexed_files(directory) or sorted(directory.glob("*.safetensors"))
    if not paths:
        raise SpecterError(f"no safetensors file in {directory}", REMEDY)
    files = read_headers(paths, spec.family)
    has_input_scales = quantization["checkpoint_format"] == V1_WITH_INPUT_SCALES
    num_ignored = _check_names(directory, spec, set(files), has_input_scales)
    read = _Reader(directory, files)
    layers = range(spec.num_moe_layers)
    projections = {
        projection: stack([_read_layer(read, spec, layer, projection, quantization) for layer in layers])
        for projection in PROJECTIONS
    }
    input_scales = None
    if has_input_scales:
        names = [scales_name(spec, layer) for layer in layers]
        input_scales = read.batch(names, (spec.hidden,), torch.float32)
        _check_each(torch.isfinite(input_scales) & (input_scales > 0), names, "holds a scale that is not positive")
    meta = quantization.get("meta") or {}
    return Int4Experts(
        **projections,
        method=meta.get("method", "gptq"),
        num_fallback=int(meta.get("num_fallback", 0)),
        input_scales=input_scales,
        num_ignored=num_ignored,
    )


def _read_layer(
    read: _Reader, spec: ModelSpec, layer: int, projection: str, quantization: dict[str, Any]
) -> Int4Matrices:
    """One projection of all experts of a MoE layer."""
    narrow, wide = spec.expert_inter, spec.hidden
    out, columns = (wide, narrow) if projection == "down" else (narrow, wide)
    group_size = quantization["group_size"]
    group = columns if group_size == -1 else group_of(columns, group_size)
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "qweight": ((columns // CODES_PER_WORD, out), torch.int32),
        "scales": ((columns // group, out), torch.float16),
        "qzeros": ((columns // group, out // CODES_PER_WORD), torch.int32),
        "g_idx": ((columns,), torch.int32),
    }
    experts = range(spec.num_experts)
    names = {part: [tensor_name(spec, layer, expert, projection, part) for expert in experts] for part in PARTS}
    parts = {part: read.batch(names[part], *layout[part]) for part in PARTS}
    matrices = unpack(parts, group, zero_offset=int(quantization["checkpoint_format"] != V2))
    _check_each(
        parts["g_idx"] == torch.arange(columns) // group,
        names["g_idx"],
        "scatters the channels of a group (desc_act without static groups), which no kernel here reads",
        "quantise with desc_act=False, or with static groups",
    )
    good_scales = torch.isfinite(parts["scales"]) & (parts["scales"] > 0)
    _check_each(good_scales, names["scales"], "holds a scale that is not a positive number")
    good_zeros = matrices.zeros == SYMMETRIC_ZERO if quantization["sym"] else matrices.zeros < 16
    _check_each(good_zeros, names["qzeros"], f"holds a zero point that sym={quantization['sym']} rules out")
    return matrices


def check_draft_origin(directory: Path, checkpoint: Checkpoint) -> str:
    """The origin in the draft's report: "this checkpoint", or "unknown" without a report.

    Raises SpecterError: the draft was made from another checkpoint.
    """
    report = directory / REPORT_FILE
    if not report.is_file():
        return "unknown"
    if json.loads(report.read_text())["checkpoint"]["sha256"] != checkpoint.digest():
        raise SpecterError(
            f"the draft in {directory} was made from another checkpoint than {checkpoint.directory}",
            f"make it again: python -m specter.quantize checkpoint={checkpoint.directory} out={directory}",
        )
    return "this checkpoint"


def stack(layers: list[Int4Matrices]) -> Int4Matrices:
    """Layers of [E, out, in] as one batch [layers, E, out, in]."""
    codes, scales, zeros = (
        torch.stack([getattr(layer, part) for layer in layers]) for part in ("codes", "scales", "zeros")
    )
    return Int4Matrices(codes, scales, zeros, layers[0].group)


def _read_quantization(directory: Path) -> dict[str, Any]:
    """`quantization_config` of config.json; older directories keep it in a separate file."""
    quantization = read_object(directory / "config.json", REMEDY).get("quantization_config")
    if quantization is None and (directory / OLD_CONFIG_FILE).is_file():
        quantization = {"quant_method": "gptq"} | read_object(directory / OLD_CONFIG_FILE, REMEDY)
    if not isinstance(quantization, dict):
        raise SpecterError(f"{directory}/config.json has no quantization_config", REMEDY)
    return quantization


def _check_quantization(directory: Path, quantization: dict[str, Any]) -> dict[str, Any]:
    allowed: dict[str, tuple[Any, ...]] = {
        "quant_method": ("gptq",),
        "bits": (4,),
        "desc_act": (True, False),  # g_idx decides
        "checkpoint_format": (V1, V2, V1_WITH_INPUT_SCALES),
        "sym": (True, False),
    }
    found = {"desc_act": False, "checkpoint_format": V1, "sym": True} | quantization  # the format's defaults
    for key, values in allowed.items():
        if found.get(key) not in values:
            wanted = " or ".join(repr(value) for value in values)
            raise SpecterError(f"{directory}: {key} is {found.get(key)!r}, only {wanted} can be read", REMEDY)
    group_size = found.get("group_size")
    if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
        raise SpecterError(f"{directory}: group_size is {group_size!r}, not a number of channels", REMEDY)
    return found


def _check_names(directory: Path, spec: ModelSpec, names: set[str], has_input_scales: bool) -> int:
    """Checks the routed experts' tensors. Returns the number of other quantized modules."""
    places = itertools.product(range(spec.num_moe_layers), range(spec.num_experts), PROJECTIONS, PARTS)
    expected = {tensor_name(spec, *place) for place in places}
    if has_input_scales:
        expected |= {scales_name(spec, layer) for layer in range(spec.num_moe_layers)}
    missing = sorted(expected - names)
    if missing:
        raise SpecterError(f"{directory} lacks {missing[0]} ({len(missing)} tensors missing in all)", REMEDY)
    unexpected = {name for name in names - expected if ".experts." in name}
    if unexpected:
        raise SpecterError(
            f"{directory} holds {min(unexpected)}, which is not part of a quantised expert of {spec.name} "
            f"({len(unexpected)} such tensors)",
            f"give the directory of this very model; {REMEDY}",
        )
    return sum(name.endswith(".qweight") for name in names - expected)


class _Reader:
    """Reads tensors by name from files that stay open (mapped, not read)."""

    def __init__(self, directory: Path, files: dict[str, StoredTensor]) -> None:
        self._directory = directory
        self._files = files
        self._open = {path: safe_open(path, framework="pt") for path in {file.path for file in files.values()}}

    def batch(self, names: list[str], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The named tensors as one, [len(names), *shape]; each is checked."""
        tensors = []
        for name in names:
            entry = self._files[name]
            tensor = self._open[entry.path].get_tensor(entry.name)
            if tensor.shape != shape or tensor.dtype != dtype:
                raise SpecterError(
                    f"{self._directory}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}",
                    REMEDY,
                )
            tensors.append(tensor)
        return torch.stack(tensors)


def _check_each(good: Tensor, names: list[str], fault: str, remedy: str = REMEDY) -> None:
    """Names the first of `names` whose row of `good` [len(names), ...] is not all true."""
    bad = (~good.flatten(1).all(1)).nonzero().flatten()
    if len(bad):
        raise SpecterError(f"{names[int(bad[0])]} {fault}", remedy)
