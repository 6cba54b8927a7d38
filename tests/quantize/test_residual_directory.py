"""`python -m specter.quantize.residual encode` and `rebuild`, from checkpoint to checkpoint."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specter.codecs.int4 import Int4Experts
from specter.codecs.residual.decode import check_blob
from specter.codecs.residual.encode import encode_layer
from specter.errors import SpecterError
from specter.models.checkpoint import Checkpoint, write_checkpoint
from specter.models.names import on_hub
from specter.models.spec import ModelSpec
from specter.quantize.gptq_format import read_directory
from specter.quantize.residual import convert
from specter.quantize.residual.__main__ import main
from specter.quantize.residual.directory import METADATA_KEY, REPORT_FILE, ResidualDirectory, file_name, layer_codes
from specter.quantize.rtn import quantize_rtn
from tests.helpers import FAMILIES, random_tensors, write_directory

GROUP = 8


def write_models(directory: Path, spec: ModelSpec, dtype: torch.dtype | None = torch.bfloat16) -> tuple[Path, Path]:
    """A checkpoint (None: int8-coded) and its INT4 directory."""
    weights = random_tensors(spec, seed=0)
    if dtype is not None:
        weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    checkpoint, quantized = directory / "checkpoint", directory / "int4"
    write_checkpoint(checkpoint, spec, weights, int8=dtype is None)
    opened = Checkpoint.open(checkpoint)
    layers = [opened.experts(layer) for layer in range(spec.num_moe_layers)]
    gate_up, down = (torch.stack(parts) for parts in zip(*layers, strict=True))
    gate, up, narrow = (quantize_rtn(part, GROUP) for part in (*gate_up.chunk(2, dim=2), down))
    quantized.mkdir()
    write_directory(quantized, Int4Experts(gate, up, narrow, method="rtn", num_fallback=0), spec, GROUP)
    return checkpoint, quantized


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, Path, Path]:
    spec = FAMILIES[request.param]
    return spec, *write_models(tmp_path_factory.mktemp("models"), spec)


@pytest.fixture
def deepseek(tmp_path: Path) -> tuple[ModelSpec, Path, Path]:
    spec = FAMILIES["deepseek"]
    return spec, *write_models(tmp_path, spec)


def encode(checkpoint: Path, quantized: Path, out: Path) -> None:
    main(["encode", f"checkpoint={checkpoint}", f"quantized={quantized}", f"out={out}"])


def rebuild(quantized: Path, residual: Path, out: Path) -> None:
    main(["rebuild", f"quantized={quantized}", f"residual={residual}", f"out={out}"])


def tensors(directory: Path) -> dict[str, Tensor]:
    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


def test_experts_come_back_bit_for_bit(models: tuple[ModelSpec, Path, Path], tmp_path: Path) -> None:
    spec, checkpoint, quantized = models
    encode(checkpoint, quantized, tmp_path / "residual")
    rebuild(quantized, tmp_path / "residual", tmp_path / "back")
    original, back = tensors(checkpoint), tensors(tmp_path / "back")
    expected = {on_hub(spec.family, name) for name in back} | set(back)
    assert len(back) == 3 * spec.num_moe_layers * spec.num_experts and expected <= set(original)
    for name, value in back.items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, original[name])
    report = json.loads((tmp_path / "residual" / REPORT_FILE).read_text())
    assert report["original"] == "bf16" and report["num_raw"] == 0 and report["bits_per_weight"] < 9
    assert len(report["layers"]) == spec.num_moe_layers
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "residual"]  # no partial directory


def test_files_are_read_as_blobs(deepseek: tuple[ModelSpec, Path, Path], tmp_path: Path) -> None:
    spec, checkpoint, quantized = deepseek
    encode(checkpoint, quantized, tmp_path / "residual")
    opened = ResidualDirectory.open(tmp_path / "residual", spec, quantized)
    codes = layer_codes(read_directory(quantized, spec), 1)
    blobs = opened.layer(1)
    again = encode_layer(convert.read_bf16(Checkpoint.open(checkpoint), 1, "cpu"), codes)
    for expert in range(spec.num_experts):
        assert torch.equal(blobs.blob(expert), again.blobs[expert])
        check_blob(blobs.blob(expert), [part[expert] for part in codes], "expert")
    assert opened.report["largest_blob_bytes"] >= max(4 * len(blob) for blob in again.blobs)


def test_stand_ins_are_their_bf16_rounding(tmp_path: Path) -> None:
    spec = FAMILIES["deepseek"]
    checkpoint, quantized = write_models(tmp_path, spec, dtype=None)
    encode(checkpoint, quantized, tmp_path / "residual")
    rebuild(quantized, tmp_path / "residual", tmp_path / "back")
    _, down = Checkpoint.open(checkpoint).experts(0)
    back = tensors(tmp_path / "back")
    prefix = f"model.layers.{spec.num_dense_layers}.mlp.experts"
    for expert in range(spec.num_experts):
        assert torch.equal(back[f"{prefix}.{expert}.down_proj.weight"], down[expert].bfloat16())
    assert "int8" in json.loads((tmp_path / "residual" / REPORT_FILE).read_text())["original"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype) -> None:
    checkpoint, quantized = write_models(tmp_path, FAMILIES["deepseek"], dtype)
    refused(capsys, lambda: encode(checkpoint, quantized, tmp_path / "out"), "lossless for BF16 only")
    assert not (tmp_path / "out").exists()


def refused(capsys: pytest.CaptureFixture[str], run: Any, *faults: str) -> None:
    with pytest.raises(SystemExit) as caught:
        run()
    message = capsys.readouterr().err
    assert caught.value.code == 2 and "->" in message and "Traceback" not in message
    assert all(fault in message for fault in faults), message


def test_awq_is_refused(
    deepseek: tuple[ModelSpec, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, checkpoint, quantized = deepseek
    experts = read_directory(quantized, spec)
    scales = torch.ones(spec.num_moe_layers, spec.hidden)
    scaled = dataclasses.replace(experts, method="awq", input_scales=scales)
    (tmp_path / "awq").mkdir()
    write_directory(tmp_path / "awq", scaled, spec, GROUP)
    refused(capsys, lambda: encode(checkpoint, tmp_path / "awq", tmp_path / "out"), "AWQ")


def test_a_killed_run_resumes(
    deepseek: tuple[ModelSpec, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, checkpoint, quantized = deepseek
    encode(checkpoint, quantized, tmp_path / "whole")
    calls: list[int] = []

    def counting(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return encode_layer(*arguments)

    monkeypatch.setattr(convert, "encode_layer", counting)
    with pytest.raises(SystemExit):
        encode(checkpoint, quantized, tmp_path / "out")
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.partial").exists()
    encode(checkpoint, quantized, tmp_path / "out")
    assert len(calls) == 2 + spec.num_moe_layers - 1
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    assert json.loads((tmp_path / "out" / REPORT_FILE).read_text())["num_resumed_layers"] == 1
    assert not (tmp_path / ".out.partial").exists()


# -- damage and mix-ups --------------------------------------------------------------------------


@pytest.fixture
def encoded(deepseek: tuple[ModelSpec, Path, Path], tmp_path: Path) -> tuple[ModelSpec, Path, Path]:
    """Spec, INT4 and residual directory."""
    spec, checkpoint, quantized = deepseek
    encode(checkpoint, quantized, tmp_path / "residual")
    return spec, quantized, tmp_path / "residual"


def rewrite(path: Path, change: Any, **metadata: str | int) -> None:
    """Changes the tensors of a layer's file in place."""
    content = load_file(path)
    with safe_open(path, framework="pt") as file:
        kept = json.loads(file.metadata()[METADATA_KEY]) | metadata
    change(content)
    save_file(content, path, metadata={METADATA_KEY: json.dumps(kept)})


def test_a_damaged_blob_is_named(
    encoded: tuple[ModelSpec, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, quantized, residual = encoded
    opened = ResidualDirectory.open(residual, spec)
    at = opened.layer(1).offsets[2] + 100

    def change(content: dict[str, Tensor]) -> None:
        next(value for name, value in content.items() if name.endswith(".residual"))[at] ^= 4

    rewrite(residual / file_name(1, spec.num_moe_layers), change)
    refused(capsys, lambda: rebuild(quantized, residual, tmp_path / "back"), "MoE layer 1, expert 2", "checksum")
    assert not (tmp_path / "back").exists()


def test_damaged_codes_are_named(
    encoded: tuple[ModelSpec, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the INT4 directory's digest made to fit, the blob's own checksum of its codes still refuses."""
    spec, quantized, residual = encoded
    path = next(quantized.glob("*.safetensors"))
    content = load_file(path)
    name = f"model.layers.{spec.num_dense_layers}.mlp.experts.3.up_proj.qweight"
    content[name][0, 0] ^= 1
    save_file(content, path)
    refused(capsys, lambda: rebuild(quantized, residual, tmp_path / "back"), "another INT4 directory")
    report = json.loads((residual / REPORT_FILE).read_text())
    report["int4_sha256"] = convert.int4_digest(quantized)
    (residual / REPORT_FILE).write_text(json.dumps(report))
    refused(capsys, lambda: rebuild(quantized, residual, tmp_path / "back"), "MoE layer 0, expert 3", "INT4 codes")


def test_another_original_is_refused(
    encoded: tuple[ModelSpec, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, quantized, residual = encoded
    rewrite(residual / file_name(0, spec.num_moe_layers), lambda content: None, original_sha256="0" * 64)
    refused(capsys, lambda: rebuild(quantized, residual, tmp_path / "back"), "MoE layer 0", "differ")


def shifted(index: int | slice, words: int) -> Any:
    """Moves offsets of a layer's blobs."""

    def change(content: dict[str, Tensor]) -> None:
        next(value for name, value in content.items() if name.endswith("_offsets"))[index] += words

    return change


@pytest.mark.parametrize(
    ("change", "metadata", "fault"),
    [
        (lambda content: None, {"format": "specter-residual-v2"}, "is not layer 0 in format"),
        (lambda content: None, {"layer": 1}, "is not layer 0"),
        (shifted(slice(None), -16), {}, "offsets that do not fit"),
        (shifted(1, 8), {}, "offsets that do not fit"),
        (shifted(1, 1 << 20), {}, "offsets that do not fit"),
        (lambda content: content.clear(), {}, "missing or damaged"),
    ],
)
def test_files_that_do_not_fit(
    encoded: tuple[ModelSpec, Path, Path], change: Any, metadata: dict[str, Any], fault: str
) -> None:
    spec, _, residual = encoded
    rewrite(residual / file_name(0, spec.num_moe_layers), change, **metadata)
    with pytest.raises(SpecterError, match=fault):
        ResidualDirectory.open(residual, spec).layer(0)


def test_truncated_and_missing_files(encoded: tuple[ModelSpec, Path, Path]) -> None:
    spec, _, residual = encoded
    path = residual / file_name(0, spec.num_moe_layers)
    path.write_bytes(path.read_bytes()[:-10])
    opened = ResidualDirectory.open(residual, spec)
    for _ in range(2):
        with pytest.raises(SpecterError, match="missing or damaged"):
            opened.layer(0)
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("content", "fault"),
    [(None, "no residual.json"), ("{", "is not JSON"), ("[1]", "has format"), ('{"format": "x"}', "has format 'x'")],
)
def test_reports_that_do_not_fit(tmp_path: Path, content: str | None, fault: str) -> None:
    if content is not None:
        (tmp_path / REPORT_FILE).write_text(content)
    with pytest.raises(SpecterError, match=fault):
        ResidualDirectory.open(tmp_path, FAMILIES["deepseek"])


def test_another_models_directory(encoded: tuple[ModelSpec, Path, Path]) -> None:
    spec, _, residual = encoded
    with pytest.raises(SpecterError, match="not of .*'hidden': 96"):
        ResidualDirectory.open(residual, dataclasses.replace(spec, hidden=96))


def test_bad_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["decode"])
    assert "encode|rebuild" in capsys.readouterr().err
    refused(capsys, lambda: main(["encode", "checkpoint=/nowhere"]), "quantized is not given")
    arguments = ["checkpoint=/nowhere", "quantized=/nowhere", f"out={tmp_path}/out"]
    refused(capsys, lambda: main(["encode", *arguments]), "/nowhere")
    refused(capsys, lambda: main(["encode", *arguments, "device=abacus"]), "device=abacus")
