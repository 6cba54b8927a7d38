"""The bench's table, file and floors."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from bench import kernels
from bench.__main__ import main
from bench.kernels import SUMMARY_KEYS
from bench.report import Report, Row, StepBytes, ms_at, run_section
from specter.models.full_size import FULL_SIZE
from specter.sample import Sample

DEEPSEEK_V2_LITE = FULL_SIZE["deepseek_v2_lite"]

REFERENCE = Path(__file__).parents[2] / "data" / "reference" / "h200" / "kernels.json"


def test_floors_are_those_of_the_issue() -> None:
    sizes = StepBytes(DEEPSEEK_V2_LITE, kv_len=64)
    int4_bytes = DEEPSEEK_V2_LITE.expert_params * (0.5 + 4 / 128)
    assert ms_at(sizes.draft(int4_bytes)) == pytest.approx(0.68, abs=0.005)
    assert ms_at(sizes.target(26 * 6)) == pytest.approx(1.15, abs=0.01)
    assert ms_at(6 * int4_bytes) * 1e3 == pytest.approx(6.41, abs=0.01)


def test_a_sample_is_its_median_and_spread() -> None:
    sample = Sample((1.0, 4.0, 2.0))
    assert (sample.median, sample.spread) == (2.0, 1.5)


@pytest.mark.parametrize(
    ("goal", "is_rate", "reached"), [(2.0, False, True), (1.9, False, False), (2.0, True, True), (2.1, True, False)]
)
def test_goals_know_their_direction(goal: float, is_rate: bool, reached: bool) -> None:
    row = Row("x", "ms", Sample((2.0,)), floor=0.5, goal=goal, is_rate=is_rate)
    assert row.is_reached is reached and row.over_floor == 4.0


def test_the_file_holds_what_the_table_shows(tmp_path: Path) -> None:
    report = Report(tmp_path / "deep" / "bench.json", {"gpu": "none"}, summary={"a": 1.0})
    report.add(Row("a thing", "ms", Sample((1.0, 2.0, 3.0)), 1.0, 1.5, note="why"))
    report.skipped["b"] = "FAILED: no"
    report.write()
    content = json.loads(report.path.read_text())
    assert content["summary"] == {"a": 1.0} and content["skipped"] == {"b": "FAILED: no"}
    assert content["table"][0]["values"] == [1.0, 2.0, 3.0] and content["table"][0]["is_reached"] is False
    console = Console(width=160, record=True)
    report.show(console)
    assert "MISSED" in console.export_text()


def test_the_shipped_reference_is_whole() -> None:
    content = json.loads(REFERENCE.read_text())
    assert set(content["summary"]) == set(SUMMARY_KEYS)
    assert all(value is not None for value in content["summary"].values())
    assert all(row["repeats"] >= 5 for row in content["table"])
    assert content["provenance"]["gpu"] and content["provenance"]["driver_version"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "use kernels, quantize or residual"),
        (["rounds"], "bench rounds is unknown"),
        (["kernels", "cap=3"], "cap_gb"),
        (["kernels", "model=nothing"], "model 'nothing' is unknown"),
        (["kernels", "pin=maybe"], "pin=maybe is unknown"),
    ],
)
def test_bad_calls_are_errors_with_a_remedy(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_missing_device_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["kernels"])
    assert "not available" in capsys.readouterr().err


def test_the_keys_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["kernels", "--help"])
    assert "model=TEXT" in capsys.readouterr().out


def test_the_provenance_tells_quantized_experts_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
    narrow: Any = SimpleNamespace(spec=SimpleNamespace(name="narrow"), digest=lambda: "1")
    model: Any = SimpleNamespace(spec=narrow.spec, checkpoint=narrow, codes=SimpleNamespace(method="gptq"))
    budget: Any = SimpleNamespace(device=torch.device("cpu"))
    digests: list[str] = []
    for codes in ("1", "2", "1"):
        (tmp_path / "model.safetensors").write_text(codes)
        (tmp_path / "quantization.json").write_text(str(len(digests)))  # its report, which has times
        digests.append(kernels.provenance_of(kernels.Options(), model, tmp_path, budget)["int4_sha256"])
    assert digests[0] == digests[2] != digests[1]


def test_a_failed_section_does_not_end_the_bench(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    report = Report(tmp_path / "bench.json", {})
    run_section("bad", fail, report, Console(quiet=True))
    run_section("good", lambda: None, report, Console(quiet=True))
    content = json.loads(report.path.read_text())
    assert content["skipped"] == {"bad": "FAILED: RuntimeError: no"}
    assert {"seconds: bad", "seconds: good"} <= set(content["facts"])
