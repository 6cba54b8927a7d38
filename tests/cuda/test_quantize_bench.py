"""The bench of quantising runs on a CPU, on a small model; its numbers are for a GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench import quantize
from bench.__main__ import main
from specter.arguments import parse_arguments
from specter.errors import SpecterError
from specter.models.checkpoint import write_checkpoint
from tests.cuda.test_inflation import NARROW, WIDE
from tests.helpers import random_tensors

SMALL = dataclasses.replace(NARROW, vocab=8192, max_positions=256)
LARGE = dataclasses.replace(WIDE, vocab=8192, hidden=64, expert_inter=64, shared_inter=128, max_positions=256)


@pytest.mark.parametrize("layers", [0, 1])
def test_it_runs_and_says_what_is_extrapolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int) -> None:
    monkeypatch.setitem(quantize.FULL_SIZE, "large", LARGE)
    write_checkpoint(tmp_path / "narrow", SMALL, random_tensors(SMALL, seed=1))
    arguments = [f"checkpoint={tmp_path / 'narrow'}", "model=large", "device=cpu", "sequences=8", f"layers={layers}"]
    main(["quantize", *arguments, f"out={tmp_path / 'out.json'}", f"scratch={tmp_path / 'scratch'}"])
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["is_extrapolated"] == (layers == 1) and report["num_layers"] == (layers or 2)
    assert report["num_experts"] == report["num_layers"] * LARGE.num_experts
    assert report["all_layers_s"] == pytest.approx(2 * report["seconds_per_layer"], abs=0.06)
    assert report["relative_output_error"]["gptq"]["mean"] < report["relative_output_error"]["rtn"]["mean"]
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("argument", ["model=huge", "device=abacus", "layers=27", "checkpoint=/nowhere"])
def test_bad_arguments_are_refused(argument: str, tmp_path: Path) -> None:
    arguments = ["device=cpu", f"out={tmp_path / 'out.json'}", f"scratch={tmp_path}", argument]
    with pytest.raises(SpecterError, match=argument.partition("=")[2]):
        quantize.run(parse_arguments(quantize.Options, arguments), Console())
