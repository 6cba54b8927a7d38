"""The AutoGPTQ v1 directory: how INT4 experts lie on disk.

Per linear, W [out, in], groups of g input channels, 4 bits:

    qweight  int32 [in / 8, out]      nibble i of row r = code of input channel 8 r + i, lowest nibble first
    scales   fp16  [in / g, out]
    qzeros   int32 [in / g, out / 8]  nibble j of column c = zero - 1 of output channel 8 c + j
    g_idx    int32 [in]               group of each input channel, here always i // g

named model.layers.N.mlp.experts.M.{gate,up,down}_proj.{qweight,scales,qzeros,g_idx}; N counts dense layers.
A directory written here holds the routed experts and nothing else: all other weights are the target's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specter.errors import SpecterError
from specter.model.spec import ModelSpec
from specter.quantize.int4 import Int4Experts, Int4Matrices
from specter.quantize.rtn import SYMMETRIC_ZERO, group_of

PROJECTIONS = ("gate", "up", "down")
PARTS = ("qweight", "scales", "qzeros", "g_idx")
CODES_PER_WORD = 8  # 4-bit codes in an int32
MAX_SHARD_BYTES = 4 * 2**30
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
REMEDY = "quantise again: python -m specter.quantize checkpoint=DIR out=DIR method=gptq group=128"


# -- bits ------------------------------------------------------------------------------------


def pack_words(values: Tensor) -> Tensor:
    """Packs uint8 [..., n, m] of values 0..15 along n into int32 [..., n / 8, m], lowest nibble first.

    Raises:
        SpecterError: n is not a multiple of 8.
    """
    if values.shape[-2] % CODES_PER_WORD:
        raise SpecterError(
            f"{values.shape[-2]} channels cannot be packed eight to a word",
            "use a model whose hidden and expert sizes are multiples of 8",
        )
    shape = (*values.shape[:-2], values.shape[-2] // CODES_PER_WORD, values.shape[-1])
    words = torch.zeros(shape, dtype=torch.int32, device=values.device)
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


def unpack(parts: dict[str, Tensor], group: int) -> Int4Matrices:
    """Inverse of `pack`; `g_idx` is not looked at."""
    return Int4Matrices(
        codes=unpack_words(parts["qweight"]).mT.contiguous(),
        scales=parts["scales"].mT.contiguous(),
        zeros=unpack_words(parts["qzeros"].mT) + 1,
        group=group,
    )


# -- writing -----------------------------------------------------------------------------------


def write_directory(
    directory: Path, experts: Int4Experts, spec: ModelSpec, group_size: int, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes config.json and the tensors into `directory`, which must exist and hold no other model."""
    for projection in PROJECTIONS:
        matrices: Int4Matrices = getattr(experts, projection)
        if bool((matrices.zeros < 1).any()):
            raise SpecterError(f"{projection}: a zero point is 0", "quantise with zeros in 1..15; v1 stores zero - 1")
    config = spec.to_config() | {"quantization_config": _quantization_config(experts, spec, group_size)}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    layer_bytes = sum(_packed_bytes(getattr(experts, projection)) for projection in PROJECTIONS)
    layers_per_shard = max(1, max_shard_bytes // layer_bytes)
    starts = range(0, spec.num_moe_layers, layers_per_shard)
    if len(starts) == 1:
        save_file(_named_tensors(experts, spec, range(spec.num_moe_layers)), directory / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, start in enumerate(starts, 1):
        layers = range(start, min(start + layers_per_shard, spec.num_moe_layers))
        tensors = _named_tensors(experts, spec, layers)
        file = f"model-{number:05d}-of-{len(starts):05d}.safetensors"
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    total_bytes = layer_bytes * spec.num_moe_layers
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")


def _quantization_config(experts: Int4Experts, spec: ModelSpec, group_size: int) -> dict[str, Any]:
    modules = [f"mlp.experts.{expert}.{name}_proj" for expert in range(spec.num_experts) for name in PROJECTIONS]
    sym = all(bool((getattr(experts, name).zeros == SYMMETRIC_ZERO).all()) for name in PROJECTIONS)
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size,
        "desc_act": False,
        "sym": sym,
        "checkpoint_format": "gptq",
        "modules_in_block_to_quantize": [modules],
        "meta": {"quantizer": "specter", "method": experts.method, "num_fallback": experts.num_fallback},
    }


def _packed_bytes(matrices: Int4Matrices) -> int:
    """Bytes of one layer's packed linears."""
    _, num_experts, out, columns = matrices.codes.shape
    groups = columns // matrices.group
    return num_experts * (out * columns // 2 + 2 * out * groups + out * groups // 2 + 4 * columns)


def _named_tensors(experts: Int4Experts, spec: ModelSpec, layers: range) -> dict[str, Tensor]:
    tensors = {}
    for layer in layers:
        for projection in PROJECTIONS:
            matrices: Int4Matrices = getattr(experts, projection)
            parts = pack(
                Int4Matrices(matrices.codes[layer], matrices.scales[layer], matrices.zeros[layer], matrices.group)
            )
            for part, batch in parts.items():
                for expert, tensor in enumerate(batch):
                    tensors[tensor_name(spec, layer, expert, projection, part)] = tensor
    return tensors


def tensor_name(spec: ModelSpec, layer: int, expert: int, projection: str, part: str) -> str:
    """`layer` counts MoE layers from 0; the name on disk counts dense layers too."""
    return f"model.layers.{layer + spec.num_dense_layers}.mlp.experts.{expert}.{projection}_proj.{part}"


# -- reading -----------------------------------------------------------------------------------


def read_directory(directory: Path, spec: ModelSpec) -> Int4Experts:
    """Reads all routed experts of `spec` from an AutoGPTQ v1 directory, whoever wrote it.

    Tensors that are not quantised (embedding, attention, norms, ...) are left alone: the draft shares the
    target's. `method` and `num_fallback` come from the directory's own note; without one (another program's
    directory) they read "gptq" and 0.

    Raises:
        SpecterError: another format or width, act-order, a missing, unexpected, doubled, truncated or
            misshapen tensor, or any module quantised besides the routed experts.
    """
    config = _read_json(directory / "config.json")
    quantization = _check_quantization(directory, config)
    files = _tensor_files(directory)
    _check_names(directory, spec, set(files))
    group_size = quantization["group_size"]
    read = _Reader(directory, files)
    projections = {}
    for projection, out, columns in (
        ("gate", spec.expert_inter, spec.hidden),
        ("up", spec.expert_inter, spec.hidden),
        ("down", spec.hidden, spec.expert_inter),
    ):
        group = columns if group_size == -1 else group_of(columns, group_size)
        groups = columns // group
        layers = []
        for layer in range(spec.num_moe_layers):
            names = {
                part: [tensor_name(spec, layer, expert, projection, part) for expert in range(spec.num_experts)]
                for part in PARTS
            }
            parts = {
                "qweight": read.batch(names["qweight"], (columns // CODES_PER_WORD, out), torch.int32),
                "scales": read.batch(names["scales"], (groups, out), torch.float16),
                "qzeros": read.batch(names["qzeros"], (groups, out // CODES_PER_WORD), torch.int32),
                "g_idx": read.batch(names["g_idx"], (columns,), torch.int32),
            }
            matrices = unpack(parts, group)
            expected_index = torch.arange(columns) // group
            _check_each(parts["g_idx"] == expected_index, names["g_idx"], "is not i // group_size (act-order)")
            good_scales = torch.isfinite(parts["scales"]) & (parts["scales"] > 0)
            _check_each(good_scales, names["scales"], "holds a scale that is not a positive number")
            good_zeros = matrices.zeros == SYMMETRIC_ZERO if quantization["sym"] else matrices.zeros < 16
            _check_each(good_zeros, names["qzeros"], f"holds a zero point that sym={quantization['sym']} rules out")
            layers.append(matrices)
        projections[projection] = stack(layers)
    meta = quantization.get("meta") or {}
    return Int4Experts(**projections, method=meta.get("method", "gptq"), num_fallback=int(meta.get("num_fallback", 0)))


def stack(layers: list[Int4Matrices]) -> Int4Matrices:
    """Layers of [E, out, in] as one batch [layers, E, out, in]."""
    return Int4Matrices(
        torch.stack([layer.codes for layer in layers]),
        torch.stack([layer.scales for layer in layers]),
        torch.stack([layer.zeros for layer in layers]),
        layers[0].group,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise SpecterError(f"no {path.name} in {path.parent}", REMEDY) from None
    except ValueError as error:
        raise SpecterError(f"{path} is not JSON: {error}", REMEDY) from None
    if not isinstance(content, dict):
        raise SpecterError(f"{path} holds a {type(content).__name__}, not an object", REMEDY)
    return content


def _check_quantization(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        raise SpecterError(f"{directory}/config.json has no quantization_config", REMEDY)
    allowed: dict[str, tuple[Any, ...]] = {
        "quant_method": ("gptq",),
        "bits": (4,),
        "desc_act": (False,),
        "checkpoint_format": ("gptq",),  # gptq_v2 stores zero, not zero - 1
        "sym": (True, False),
    }
    found = {"desc_act": False, "checkpoint_format": "gptq", "sym": True} | quantization  # the format's defaults
    for key, values in allowed.items():
        if found.get(key) not in values:
            wanted = " or ".join(repr(value) for value in values)
            raise SpecterError(f"{directory}: {key} is {found.get(key)!r}, only {wanted} can be read", REMEDY)
    group_size = found.get("group_size")
    if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
        raise SpecterError(f"{directory}: group_size is {group_size!r}, not a number of channels", REMEDY)
    return found


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Which file holds each tensor."""
    paths = sorted(directory.glob("*.safetensors"))
    if (directory / INDEX_FILE).exists():
        weight_map = _read_json(directory / INDEX_FILE).get("weight_map", {})
        paths = [directory / file for file in sorted(set(weight_map.values()))]
    if not paths:
        raise SpecterError(f"no safetensors file in {directory}", REMEDY)
    files: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as tensors:
                names = list(tensors.keys())
        except (SafetensorError, OSError) as error:
            raise SpecterError(f"{path} is missing or truncated ({error})", REMEDY) from None
        for name in names:
            if name in files:
                raise SpecterError(f"{name} is twice in {directory}: {files[name].name} and {path.name}", REMEDY)
            files[name] = path
    return files


def _check_names(directory: Path, spec: ModelSpec, names: set[str]) -> None:
    expected = set(_expected_names(spec))
    missing = sorted(expected - names)
    if missing:
        raise SpecterError(f"{directory} lacks {missing[0]} ({len(missing)} tensors missing in all)", REMEDY)
    quantised = {name for name in names - expected if name.endswith(PARTS) or ".mlp.experts." in name}
    if quantised:
        raise SpecterError(
            f"{directory} holds {min(quantised)}, which is not part of a routed expert of {spec.name} "
            f"({len(quantised)} such tensors)",
            f"only routed experts may be quantised; {REMEDY}",
        )


def _expected_names(spec: ModelSpec) -> Iterator[str]:
    for layer in range(spec.num_moe_layers):
        for expert in range(spec.num_experts):
            for projection in PROJECTIONS:
                for part in PARTS:
                    yield tensor_name(spec, layer, expert, projection, part)


class _Reader:
    """Reads tensors by name from files that stay open (mapped, not read) meanwhile."""

    def __init__(self, directory: Path, files: dict[str, Path]) -> None:
        self._directory = directory
        self._files = files
        self._open = {path: safe_open(path, framework="pt") for path in set(files.values())}

    def batch(self, names: list[str], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The named tensors as one, [len(names), *shape]; each is checked."""
        tensors = []
        for name in names:
            tensor = self._open[self._files[name]].get_tensor(name)
            if tensor.shape != shape or tensor.dtype != dtype:
                raise SpecterError(
                    f"{self._directory}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}",
                    REMEDY,
                )
            tensors.append(tensor)
        return torch.stack(tensors)


def _check_each(good: Tensor, names: list[str], fault: str) -> None:
    """Names the first of `names` whose row of `good` [len(names), ...] is not all true."""
    bad = (~good.flatten(1).all(1)).nonzero().flatten()
    if len(bad):
        raise SpecterError(f"{names[int(bad[0])]} {fault}", REMEDY)
