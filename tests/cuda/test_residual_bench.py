"""The bench of the residual codec runs on a CPU, on a small model; its numbers are for a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bench import residual
from specter.arguments import parse_arguments
from specter.calibrate import residual_inputs
from specter.errors import SpecterError
from specter.models.checkpoint import write_checkpoint
from specter.models.full_size import FULL_SIZE
from specter.sample import Sample
from tests.cuda.test_inflation import NARROW
from tests.helpers import random_tensors

SMALL = dataclasses.replace(NARROW, num_experts=2, top_k=2, vocab=64)  # the interpreter takes 50 ms for 512 weights
LARGE = dataclasses.replace(SMALL, name="large")


class FakeStream:
    """A stream whose work is done when it is issued."""

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> object:
        return object()


class FakeGraph:
    def __init__(self, run: Any) -> None:
        self.replay = run


def run_once(run: Any, *arguments: Any, **options: int) -> Sample:
    run(*arguments)
    return Sample((1.0,))


@pytest.fixture
def without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: 0)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(residual_inputs, "Graph", FakeGraph)
    monkeypatch.setattr(residual_inputs, "device_ms", lambda run, **options: run_once(run, 0))
    monkeypatch.setattr(residual, "host_ms", run_once)
    monkeypatch.setattr(residual, "NUM_TIMED", 2)
    monkeypatch.setattr(residual, "PER_LAUNCH", (2, 8))
    monkeypatch.setattr(residual, "VARIANTS", ((16, None),))
    monkeypatch.setattr(residual.provenance, "of_device", lambda *arguments, **inputs: inputs)


@pytest.mark.usefixtures("without_device")
def test_it_runs_and_compares_every_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FULL_SIZE, "large", LARGE)
    write_checkpoint(tmp_path / "narrow", SMALL, random_tensors(SMALL, seed=1))
    options = residual.Options("large", tmp_path / "narrow", "rtn", layers=1, out=tmp_path / "out.json")
    report = residual.run(options, torch.device("cpu"), Console())
    assert report.skipped == {}
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["summary"]["experts_compared"] == LARGE.num_experts
    assert written["summary"]["bit_equal"] and written["summary"]["delivered_bit_equal"]
    assert {row["name"] for row in written["table"]} >= {"encode the model", "decode, 2 a launch"}
    assert "EXTRAPOLATED from 1 layers" in written["table"][0]["note"]
    assert set(written["facts"]["decode_us by kernel choices"]) == {
        f"16 segments, None registers, {count} a launch" for count in (1, 2)
    }


@pytest.mark.parametrize("argument", ["model=huge", "codes=awq", "checkpoint=/nowhere"])
def test_bad_arguments_are_refused(argument: str) -> None:
    options = parse_arguments(residual.Options, [argument])
    with pytest.raises(SpecterError, match=argument.partition("=")[2]):
        residual.run(options, torch.device("cpu"), Console())
