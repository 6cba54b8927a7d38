"""From measured samples to a hardware profile, the file of conf/hardware/ that the virtual clock charges by.

Pure: the samples come from `specter.calibrate.rates` on a GPU, or from a test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specter.errors import SpecterError
from specter.files import write_whole
from specter.sample import Sample
from specter.timeline.costs import DECODE_INT_OPS
from specter.timeline.hardware import Hardware
from specter.typed import load_typed


@dataclass(frozen=True, slots=True)
class Measured:
    """One number of a profile, in the unit of its field, with where it comes from."""

    value: int
    source: str


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Offset and slope of y = offset + slope * x by least squares of the relative error; an offset is at least 0.

    Raises:
        SpecterError: fewer than two different x, a y that is not above 0, or a slope that is not.
    """
    if len({x for x, _ in points}) < 2 or any(y <= 0 for _, y in points):
        raise SpecterError(f"no line through {list(points)}", "measure two sizes or more, with times above 0")
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    offset = mean_y - slope * mean_x
    if offset < 0:  # a line through the origin
        offset = 0.0
        slope = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / sum(
            w * x * x for w, (x, _) in zip(weights, points, strict=True)
        )
    if slope <= 0:
        raise SpecterError(f"times {list(points)} do not grow with the size", "measure again on an idle machine")
    return offset, slope


def stated(sample: Sample, scale: float, what: str) -> Measured:
    """The median of `sample` times `scale`, with its spread."""
    value = round(sample.median * scale)
    return Measured(value, f"measured, {what}; median of {len(sample.values)}, spread {100 * sample.spread:.1f} %")


def link(copies: Mapping[int, Sample]) -> dict[str, Measured]:
    """Latency and rate of the link from copies, ms by bytes."""
    points = [(float(size), sample.median * 1e6) for size, sample in copies.items()]
    latency, per_byte = fit_line(points)
    spread = max(sample.spread for sample in copies.values())
    sizes = ", ".join(f"{size / 1e6:.3g} MB: {size / sample.median / 1e6:.1f} GB/s" for size, sample in copies.items())
    how = f"fitted to page-locked host-to-device copies ({sizes}); spread up to {100 * spread:.1f} %"
    return {
        "link_bytes_per_s": Measured(round(1e9 / per_byte), how),
        "link_latency_ns": Measured(round(latency), how),
    }


def kernels(one: Sample, many: Sample, count: int) -> dict[str, Measured]:
    """The device time of a kernel and of a graph beyond its kernels.

    Args:
        one, many: ms of a graph of one and of `count` kernels that do next to nothing.
    """
    kernel = max(many.median - one.median, 0.0) / (count - 1) * 1e6
    spread = 100 * max(one.spread, many.spread)
    how = f"graphs of 1 and {count} small kernels took {1e3 * one.median:.2f} and {1e3 * many.median:.2f} us"
    return {
        "kernel_ns": Measured(round(kernel), f"measured, {how}; spread up to {spread:.1f} %"),
        "graph_ns": Measured(max(round(one.median * 1e6 - kernel), 0), f"measured, {how}; spread up to {spread:.1f} %"),
    }


def wave(by_experts: Mapping[int, Sample], charged_ns: Mapping[int, int]) -> Measured:
    """The device time of a wave beyond what `charged_ns` states for it, the mean over numbers of experts.

    Args:
        by_experts: ms of a wave, by its number of experts. charged_ns: of the same waves with wave_ns=0.
    """
    beyond = [sample.median * 1e6 - charged_ns[count] for count, sample in by_experts.items()]
    times = ", ".join(f"{count}: {1e3 * sample.median:.1f} us" for count, sample in by_experts.items())
    spread = 100 * max(sample.spread for sample in by_experts.values())
    how = f"measured, waves by number of experts ({times}) beyond their bytes and kernels; spread up to {spread:.1f} %"
    return Measured(max(round(sum(beyond) / len(beyond)), 0), how)


def decode(us_per_expert: Sample, num_weights: int) -> Measured:
    """The integer rate at which the residual decoder's charge equals its measured time."""
    value = round(DECODE_INT_OPS * num_weights / us_per_expert.median * 1e6)
    how = f"decoding a residual expert took {us_per_expert.median:.2f} us, {DECODE_INT_OPS} operations a weight"
    return Measured(value, f"measured, {how}; spread {100 * us_per_expert.spread:.1f} %")


def sync(measured_ms: float, charged_ms: float, num_waits: int) -> Measured:
    """The host time of a wait at which a run's charge equals its measured time.

    Args:
        measured_ms: per token of plain decoding. charged_ms: of the same run with sync_ns=0.
    """
    how = (
        f"plain decoding of the first layers took {measured_ms:.3f} ms a token, {charged_ms:.3f} without waits, "
        f"{num_waits} waits"
    )
    return Measured(max(round((measured_ms - charged_ms) * 1e6 / num_waits), 0), f"measured, {how}")


def hardware(name: str, title: str, numbers: Mapping[str, Measured]) -> Hardware:
    """The profile. Raises SpecterError: a number of it is missing, or out of range."""
    texts = {"name", "title", "source"}
    wanted = [field.name for field in fields(Hardware) if field.name not in texts]
    if missing := [field for field in wanted if field not in numbers]:
        raise SpecterError(f"not measured: {', '.join(missing)}", "see the errors above; every section is needed")
    source = "".join(f"{field}: {numbers[field].source}\n" for field in wanted)
    values: dict[str, Any] = {field: numbers[field].value for field in wanted}
    return Hardware(name=name, title=title, source=source, **values)


def write(path: Path, profile: Hardware, where: Mapping[str, Any]) -> None:
    """Writes the profile as a file of conf/hardware/, and reads it back. `where`: the machine and the time."""
    facts = ", ".join(
        str(where[key]) for key in ("gpu", "time_utc", "driver_version", "torch", "commit") if key in where
    )
    numbers = [f for f in fields(Hardware) if isinstance(getattr(profile, f.name), int)]
    lines = [
        f"# Measured by python -m specter.calibrate: {facts}.",
        f"name: {profile.name}",
        f"title: {profile.title}",
        *(f"{field.name}: {getattr(profile, field.name):_}" for field in numbers),
        "source: |",
        *(f"  {line}" for line in profile.source.splitlines()),
    ]
    write_whole(path, "\n".join(lines) + "\n")
    if load_typed(Hardware, path) != profile:
        raise SpecterError(f"{path} does not hold the profile that was written", "report this: it is a fault")
