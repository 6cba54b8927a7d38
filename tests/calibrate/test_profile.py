"""Profiles from samples: a machine with known rates comes back from the times that it would show."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from specter.calibrate import profile
from specter.calibrate.__main__ import Options, main
from specter.calibrate.profile import Measured
from specter.errors import SpecterError
from specter.models.full_size import FULL_SIZE
from specter.sample import Sample
from specter.timeline.costs import DECODE_INT_OPS, CostModel
from specter.timeline.hardware import Hardware
from specter.typed import load_typed

MACHINE = Hardware(
    "known", 3_000_000_000_000, 2**36, 600 * 10**12, 50_000_000_000, 4000, 7000, 1500, 60000, "a test", "Known",
    30 * 10**12, 16000, 8000, 18000,
)  # fmt: skip
NUMBERS = {
    field.name: Measured(getattr(MACHINE, field.name), "a test")
    for field in fields(Hardware)
    if isinstance(getattr(MACHINE, field.name), int)
}


def once(value: float) -> Sample:
    return Sample((value * 0.98, value, value * 1.02))


def test_the_link_comes_back_from_its_copies() -> None:
    copies = {size: once(MACHINE.copy_ns(size) / 1e6) for size in (10**6, 17_301_504, 157_286_400)}
    found = profile.link(copies)
    assert found["link_bytes_per_s"].value == pytest.approx(MACHINE.link_bytes_per_s, rel=1e-4)
    assert found["link_latency_ns"].value == pytest.approx(MACHINE.link_latency_ns, abs=20)
    assert "spread up to 4.0 %" in found["link_latency_ns"].source


def test_a_line_never_has_an_offset_below_zero() -> None:
    offset, slope = profile.fit_line([(1.0, 1.0), (2.0, 2.2), (4.0, 4.4)])
    assert offset == 0
    assert 1.0 < slope < 1.1


@pytest.mark.parametrize("points", [[], [(1.0, 1.0)], [(1.0, 1.0), (1.0, 2.0)], [(1.0, 0.0), (2.0, 1.0)]])
def test_points_without_a_line_are_refused(points: list[tuple[float, float]]) -> None:
    with pytest.raises(SpecterError, match="no line"):
        profile.fit_line(points)


def test_times_that_shrink_with_the_size_are_refused() -> None:
    with pytest.raises(SpecterError, match="do not grow"):
        profile.fit_line([(1.0, 3.0), (2.0, 0.01)])


def test_kernels_and_graphs_are_told_apart() -> None:
    one = MACHINE.graph_ns + MACHINE.kernel_ns
    many = MACHINE.graph_ns + 64 * MACHINE.kernel_ns
    found = profile.kernels(once(one / 1e6), once(many / 1e6), 64)
    assert found["kernel_ns"].value == MACHINE.kernel_ns
    assert found["graph_ns"].value == MACHINE.graph_ns


def test_a_wave_is_what_its_bytes_and_kernels_leave() -> None:
    costs, without = CostModel(FULL_SIZE["deepseek_v2_lite"], 16, 256), replace(MACHINE, wave_ns=0)
    times = {count: once(MACHINE.compute_ns(costs.experts(count)) / 1e6) for count in (1, 2, 6)}
    charged = {count: without.compute_ns(costs.experts(count)) for count in times}
    assert profile.wave(times, charged).value == MACHINE.wave_ns


def test_decoding_is_charged_its_measured_time() -> None:
    costs = CostModel(FULL_SIZE["deepseek_v2_lite"], 16, 256, coded_bytes=8 * 10**6)
    us, num_weights = 19.0, costs.spec.expert_params
    rate = profile.decode(once(us), num_weights).value
    assert rate == pytest.approx(DECODE_INT_OPS * num_weights / us * 1e6)
    fast = replace(MACHINE, int_ops=rate, hbm_bytes_per_s=10**15, kernel_ns=0, graph_ns=0)
    assert fast.compute_ns(costs.decode(16)) == pytest.approx(16 * us * 1e3, rel=1e-4)


def test_a_wait_is_what_the_run_took_beyond_its_charge() -> None:
    assert profile.sync(2.3, 2.0, 3).value == 100_000
    assert profile.sync(1.9, 2.0, 3).value == 0  # never negative


def test_a_profile_is_written_whole_and_read_back(tmp_path: Path) -> None:
    found = profile.hardware("mine", "My GPU", NUMBERS)
    path = tmp_path / "hardware" / "mine.yaml"
    profile.write(path, found, {"gpu": "A GPU", "time_utc": "2026-12-01T00:00:00Z", "commit": "abc"})
    assert load_typed(Hardware, path) == found
    assert path.read_text().startswith("# Measured by python -m specter.calibrate: A GPU, 2026-12-01T00:00:00Z, abc.")
    assert found == replace(MACHINE, name="mine", title="My GPU", source=found.source)
    assert len(found.source.splitlines()) == len(NUMBERS)  # a source per number


def test_a_number_that_was_not_measured_is_named() -> None:
    with pytest.raises(SpecterError, match="not measured: sync_ns, wave_ns"):
        profile.hardware("mine", "", {k: v for k, v in NUMBERS.items() if k not in ("sync_ns", "wave_ns")})


def test_without_a_gpu_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SpecterError, match="no CUDA device"):
        main(Options(out=tmp_path / "mine.yaml"))
    assert not list(tmp_path.iterdir())
