"""Repeated measurements of a GPU: kept one by one, shown as median and spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MIN_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """Repeats of one measurement, in one unit."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """(max - min) / median."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0

    def scaled(self, factor: float) -> Sample:
        """The repeats times `factor`: another unit, or a part of what was measured."""
        return Sample(tuple(value * factor for value in self.values))

    def rate(self, amount: float) -> Sample:
        """`amount` per unit of time."""
        return Sample(tuple(amount / value for value in self.values))


def host_ms(run: Callable[[], object], repeats: int = MIN_REPEATS, warmup: int = 1) -> Sample:
    """Wall time of `run` with the device idle before and after, ms."""
    values = []
    for index in range(warmup + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if index >= warmup:
            values.append((time.perf_counter() - start) * 1e3)
    return Sample(tuple(values))


def device_ms(
    run: Callable[[int], object], repeats: int = MIN_REPEATS, per_repeat: int = 20, warmup: int = 3
) -> Sample:
    """Device time of one `run(index)` between events, ms: each repeat is the mean of `per_repeat` calls in a row.

    `index` counts calls, so a run on data smaller than the cache can rotate through copies of it.
    """
    for index in range(warmup):
        run(index)
    torch.cuda.synchronize()
    spans: list[tuple[Any, Any]] = []
    for repeat in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for index in range(per_repeat):
            run(warmup + repeat * per_repeat + index)
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return Sample(tuple(start.elapsed_time(end) / per_repeat for start, end in spans))
