"""A device clock that delays and reorders copies as far as events allow, to test losslessness."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import torch

from specter.timeline.base import Event
from specter.timeline.cuda import CudaEvent, CudaTimeline

_CYCLES_PER_US = 1980  # of an H200 at its highest clock; a slower one sleeps longer


class StressedTimeline(CudaTimeline):
    """Copies start late, end late and overtake each other on several streams, at random.

    Args:
        max_delay_us: of the delay before a copy, and of the one after it.
    """

    def __init__(
        self, device: torch.device | str = "cuda", trace: bool = False, seed: int = 0, max_delay_us: int = 500
    ) -> None:
        super().__init__(device, trace)
        self._random = random.Random(seed)
        self._max_delay_us = max_delay_us
        self._streams = [self.link_stream, self._cuda.Stream(self.device), self._cuda.Stream(self.device)]

    def copy(self, num_bytes: int, run: Callable[[], None], after: Iterable[Event] = (), label: str = "") -> CudaEvent:
        before, behind = (self._random.randrange(1 + self._max_delay_us) * _CYCLES_PER_US for _ in range(2))

        def late() -> None:
            self._cuda._sleep(before)
            run()
            self._cuda._sleep(behind)

        self.link_stream = self._random.choice(self._streams)
        return super().copy(num_bytes, late, after, label)

    def drain(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        super().drain()
