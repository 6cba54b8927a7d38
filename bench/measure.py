"""Repeated measurements, kept one by one and reported as median and spread, and floors: the fewest bytes to move."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specter.models.spec import ModelSpec

MIN_REPEATS = 5
HBM_BYTES_PER_S = 4.3e12  # copy ceiling of an H200, read plus written bytes; measured again beside every table
BF16_BYTES = 2


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


def share(flags: Sequence[bool]) -> float:
    """The share of true values; 0 of an empty sequence."""
    return sum(flags) / len(flags) if flags else 0.0


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Device-memory bytes of one pass of `spec` in BF16 at a KV length, every weight read once."""

    spec: ModelSpec
    kv_len: int

    @property
    def shared(self) -> int:
        """Everything but routed experts: all matrices except the embedding, and the latents of every layer."""
        spec = self.spec
        weights = spec.non_expert_params - spec.vocab * spec.hidden
        latents = spec.num_layers * self.kv_len * spec.kv_width
        return BF16_BYTES * (weights + latents)

    def draft(self, int4_expert_bytes: float) -> float:
        """One draft step: top-k INT4 experts in every MoE layer."""
        return self.shared + self.spec.num_moe_layers * self.spec.top_k * int4_expert_bytes

    def target(self, num_experts: float) -> float:
        """A target pass that reads `num_experts` distinct BF16 experts, over all MoE layers."""
        return self.shared + num_experts * BF16_BYTES * self.spec.expert_params


def ms_at(num_bytes: float, bytes_per_s: float = HBM_BYTES_PER_S) -> float:
    return num_bytes / bytes_per_s * 1e3
