"""Profiles: complete, sourced, and true to what was measured; bad ones name the key and the remedy."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from specter.errors import SpecterError
from specter.models.full_size import FULL_SIZE
from specter.timeline.base import Work
from specter.timeline.costs import CostModel
from specter.timeline.hardware import Hardware
from specter.typed import build_typed, load_typed

DEEPSEEK_V2_LITE = FULL_SIZE["deepseek_v2_lite"]

PROFILES = Path(__file__).parents[2] / "conf" / "hardware"
A100 = PROFILES / "a100_40gb_pcie4.yaml"


def test_the_named_profiles_exist() -> None:
    assert {"a100_40gb_pcie4", "h200_pcie5", "rtx4090_ddr4"} <= {path.stem for path in PROFILES.glob("*.yaml")}


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_number_has_a_source(path: Path) -> None:
    hardware = load_typed(Hardware, path)
    sourced = [line.partition(":")[0] for line in hardware.source.strip().splitlines()]
    absent = {name for name in ("issue_ns", "graph_ns", "wave_ns") if not getattr(hardware, name)}  # not measured there
    texts = {"name", "source", "title"}
    assert sourced == [field.name for field in fields(Hardware) if field.name not in texts | absent]


def test_a_captured_operation_is_one_issue_and_a_pass_of_residents_one_graph() -> None:
    launched = load_typed(Hardware, A100)
    captured = replace(launched, issue_ns=16_000, graph_ns=7000, wave_ns=18_000)
    costs = CostModel(FULL_SIZE["deepseek_v2_lite"], 16, 256)
    wave, attend = costs.experts(2), costs.attend_and_route(3)
    assert launched.host_ns(attend) == attend.kernels * launched.launch_ns
    assert captured.host_ns(attend) == captured.host_ns(wave) == 16_000
    assert captured.compute_ns(wave) - launched.compute_ns(wave) == 7000 + 18_000
    assert captured.compute_ns(attend) - launched.compute_ns(attend) == 7000
    whole = replace(costs, one_graph=True)
    first, later = whole.attend_and_route(0), whole.attend_and_route(3)
    assert [captured.host_ns(work) for work in (first, later, whole.experts(2), whole.combine(), whole.head(1))] == [
        16_000, 0, 0, 0, 0
    ]  # fmt: skip
    assert captured.compute_ns(later) == launched.compute_ns(attend)  # within the graph of the first


def test_h200_copies_as_measured() -> None:
    h200 = load_typed(Hardware, PROFILES / "h200_pcie5.yaml")
    for num_bytes, gb_per_s in ((1_000_000, 47.9), (17_301_504, 54.7), (157_286_400, 55.2)):
        assert num_bytes / h200.copy_ns(num_bytes) == pytest.approx(gb_per_s, rel=0.01)


@pytest.mark.parametrize(
    ("record", "model"),
    [("deepseek_gptq", "deepseek_v2_lite"), ("qwen_gptq", "qwen1_5_moe"), ("phi_gptq", "phi3_5_moe")],
)
def test_decoding_is_charged_as_measured(record: str, model: str) -> None:
    """In launches of 1 to 32 experts, whose constant part is what a launch of few pays."""
    h200 = load_typed(Hardware, PROFILES / "h200_pcie5.yaml")
    measured = json.loads((PROFILES.parents[1] / f"data/reference/h200/residual_{record}.json").read_text())["summary"]
    spec = FULL_SIZE[model]
    costs = CostModel(spec, 16, 256, coded_bytes=round(measured["bits_per_weight"] * spec.expert_params / 8))
    for num_experts in (1, 8, 16, 32):
        charged_us = h200.compute_ns(costs.decode(num_experts)) / num_experts / 1e3
        assert charged_us == pytest.approx(measured[f"decode_us_{num_experts}"], rel=0.04)


@pytest.mark.parametrize(("name", "floor_ms"), [("a100_40gb_pcie4", 2.1), ("h200_pcie5", 0.68)])
def test_draft_step_floors(name: str, floor_ms: float) -> None:
    costs = CostModel(DEEPSEEK_V2_LITE, tile_rows=48, kv_capacity=256)
    hardware = load_typed(Hardware, PROFILES / f"{name}.yaml")
    assert hardware.hbm_ns(costs.draft_step().hbm_bytes) / 1e6 == pytest.approx(floor_ms, rel=0.02)


def test_roofline_takes_the_larger_and_rounds_up() -> None:
    hardware = Hardware("test", 3, 1, 7, 11, 2, 0, 5, 0, "test")  # rates per second
    assert hardware.compute_ns(Work("w", hbm_bytes=1, flops=1, kernels=2, launches=1)) == 333_333_334 + 10
    assert hardware.compute_ns(Work("w", hbm_bytes=0, flops=1, kernels=0, launches=1)) == 142_857_143
    assert hardware.copy_ns(1) == 2 + 90_909_091
    assert hardware.copy_ns(0) == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hbm": 1}, "'hbm'"),
        ({"launch_ns": None}, "here: launch_ns: .* missing mandatory value"),
        ({"launch_ns": -1}, "launch_ns is -1"),
        ({"link_bytes_per_s": 0}, "link_bytes_per_s is 0"),
        ({"link_bytes_per_s": 24e9}, "here: link_bytes_per_s: Value '24000000000.0' of type 'float'"),
        ({"kernel_ns": True}, "here: kernel_ns: Value 'True' of type 'bool'"),
        ({"source": " "}, "source is ' '"),
    ],
)
def test_bad_values(change: dict[str, object], named: str) -> None:
    values = {key: value for key, value in (asdict(load_typed(Hardware, A100)) | change).items() if value is not None}
    with pytest.raises(SpecterError, match=named):
        build_typed(Hardware, values, "here: ")


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(SpecterError, match="a100_40gb_pcie4, h200_fitted"):
        load_typed(Hardware, PROFILES / "a100.yaml")
    other = tmp_path / "other.yaml"
    other.write_text(A100.read_text())
    with pytest.raises(SpecterError, match="name it 'other'"):
        load_typed(Hardware, other)
    for text in ("- 1\n", "name: [", "name: a\nname: b\n"):
        other.write_text(text)
        with pytest.raises(SpecterError, match="other.yaml"):
            load_typed(Hardware, other)
