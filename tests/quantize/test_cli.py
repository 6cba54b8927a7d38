"""`python -m specter.quantize` from checkpoint to directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from specter.models.checkpoint import Checkpoint, write_checkpoint
from specter.models.spec import ModelSpec
from specter.quantize import quantizers, workspace
from specter.quantize.cli import main
from specter.quantize.gptq_format import REPORT_FILE, read_directory
from specter.quantize.layer import Int4Layer
from specter.quantize.rtn import quantize_rtn
from tests.helpers import exit_status
from tools.standin.checkpoint import to_hub
from tools.standin.network import init_weights


@pytest.fixture(scope="module")
def checkpoint(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, spec, to_hub(init_weights(spec, seed=0), spec), int8=True)
    return directory


@pytest.fixture(scope="module")
def calibration(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "calibration.safetensors"
    tokens = np.random.default_rng(0).integers(0, spec.vocab, (24, 40)).astype(np.uint16)
    save_file({"tokens": tokens}, path)
    return path


@pytest.mark.parametrize("method", ["gptq", "awq", "rtn"])
def test_quantizes_a_checkpoint(
    spec: ModelSpec, checkpoint: Path, calibration: Path, tmp_path: Path, method: str
) -> None:
    out = tmp_path / "deep" / method
    arguments = [f"checkpoint={checkpoint}", f"out={out}", f"method={method}", f"calibration={calibration}"]
    assert exit_status(main, arguments) == 0
    experts = read_directory(out, spec)
    gate_up, down = Checkpoint.open(checkpoint).experts(1)
    nearest = quantize_rtn(down, 128)
    assert torch.equal(experts.down.scales[1], nearest.scales) or method == "awq"
    assert torch.equal(experts.down.codes[1], nearest.codes) == (method == "rtn")
    assert (experts.input_scales is not None) == (method == "awq")
    if method != "awq":
        step = experts.gate.scales[1].float()
        assert ((experts.gate.dequantize()[1] - gate_up[:, : spec.expert_inter]).abs() <= 4 * step).all()

    report = json.loads((out / REPORT_FILE).read_text())
    assert report["method"] == experts.method == method
    assert report["num_experts"] == spec.num_moe_layers * spec.num_experts
    assert report["num_fallback"] == experts.num_fallback
    assert report["min_tokens"] == 2 * spec.hidden
    assert set(report["relative_output_error"]) == {method, "rtn"}
    assert all(len(e["per_layer"]) == spec.num_moe_layers for e in report["relative_output_error"].values())
    assert report["calibration"]["num_tokens"] == 960 and report["calibration"]["num_held_out_tokens"] == 120
    spread = report["tokens_per_expert"]
    assert 0 <= spread["min"] <= spread["median"] <= spread["max"] <= 840
    assert [sum(layer) for layer in spread["per_layer"]] == [840 * spec.top_k] * spec.num_moe_layers
    assert report["checkpoint"]["sha256"] == Checkpoint.open(checkpoint).digest()
    assert [path.name for path in out.parent.iterdir()] == [method]  # no partial directory is left


def test_few_tokens_are_reported_as_fallbacks(
    spec: ModelSpec, checkpoint: Path, calibration: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = [f"checkpoint={checkpoint}", f"out={out}", f"calibration={calibration}", "min_tokens=841"]
    assert exit_status(main, arguments) == 0
    assert read_directory(out, spec).num_fallback == spec.num_moe_layers * spec.num_experts


@pytest.mark.parametrize(
    ("argument", "fault"),
    [
        ("methud=gptq", "methud"),
        ("gptq", "'gptq'"),
        ("method=hqq", "method=hqq"),
        ("group=many", "group=many"),
        ("group=12", "groups of 12 do not divide rows of 32"),
        ("group=0", "group size 0"),
        ("method=q4_k", "fidelity study"),
        ("sequences=25", "sequences=25"),
        ("min_tokens=-1", "min_tokens"),
        ("checkpoint=/nowhere", "/nowhere"),
        ("calibration=/nowhere", "/nowhere"),
        ("device=abacus", "device=abacus"),
        ("out=/proc/out", "/proc/out"),
    ],
)
def test_bad_arguments_are_refused(
    checkpoint: Path,
    calibration: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    argument: str,
    fault: str,
) -> None:
    arguments = [f"checkpoint={checkpoint}", f"out={tmp_path / 'out'}", f"calibration={calibration}", argument]
    assert exit_status(main, arguments) == 2
    message = capsys.readouterr().err
    assert fault in message and "->" in message and "Traceback" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("absent", ["checkpoint", "out"])
def test_both_directories_must_be_given(capsys: pytest.CaptureFixture[str], absent: str) -> None:
    assert exit_status(main, [f"{key}=somewhere" for key in ("checkpoint", "out") if key != absent]) == 2
    assert f"{absent} is not given" in capsys.readouterr().err


def test_a_directory_in_use_is_left_alone(
    checkpoint: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert exit_status(main, [f"checkpoint={checkpoint}", f"out={tmp_path}", f"calibration={calibration}"]) == 2
    assert str(tmp_path) in capsys.readouterr().err.replace("\n", "")
    assert (tmp_path / "mine.txt").read_text() == "mine"


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != REPORT_FILE}


@pytest.mark.parametrize("cut", ["in a layer", "before the states are kept"])
def test_a_killed_run_goes_on_and_repeats_nothing(
    checkpoint: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    arguments = [f"checkpoint={checkpoint}", f"calibration={calibration}"]
    assert exit_status(main, [*arguments, f"out={tmp_path / 'whole'}"]) == 0

    calls: list[int] = []

    def counting(*arguments: Any) -> Int4Layer:
        calls.append(1)
        if cut == "in a layer" and len(calls) == 3:
            raise KeyboardInterrupt
        return quantize(*arguments)

    def cut_short(*arguments: Any, **keywords: Any) -> None:
        if "states" in str(arguments[1]) and cut != "in a layer" and len(calls) == 2:
            raise KeyboardInterrupt
        save(*arguments, **keywords)

    quantize, save = quantizers.METHODS["gptq"], workspace.save_file
    monkeypatch.setitem(quantizers.METHODS, "gptq", counting)
    monkeypatch.setattr(workspace, "save_file", cut_short)
    assert exit_status(main, [*arguments, f"out={tmp_path / 'out'}"]) == 130
    assert not (tmp_path / "out").exists()
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / ".out.partial").glob("model-*")}
    assert len(finished) == 2

    monkeypatch.setitem(quantizers.METHODS, "gptq", quantize)
    monkeypatch.setattr(workspace, "save_file", save)
    reads: list[int] = []
    experts = Checkpoint.experts
    monkeypatch.setattr(Checkpoint, "experts", lambda self, layer: (reads.append(layer), experts(self, layer))[1])
    assert exit_status(main, [*arguments, f"out={tmp_path / 'out'}"]) == 0
    assert reads == ([2] if cut == "in a layer" else [1, 2])  # the second layer's states are computed, not its codes
    assert finished.items() <= {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}.items()
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert json.loads((tmp_path / "out" / REPORT_FILE).read_text())["num_resumed_layers"] == 2
    assert not (tmp_path / ".out.partial").exists()


def test_what_another_run_left_is_replaced(
    spec: ModelSpec, checkpoint: Path, calibration: Path, tmp_path: Path
) -> None:
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "origin").write_text("other options")
    (partial / "layer-0.json").write_text("{}")
    (partial / "model-00001-of-00003.safetensors").write_text("half a file")
    assert exit_status(main, [f"checkpoint={checkpoint}", f"out={tmp_path / 'out'}", f"calibration={calibration}"]) == 0
    assert not partial.exists()
    assert len(list((tmp_path / "out").iterdir())) == spec.num_moe_layers + 3
    read_directory(tmp_path / "out", spec)
