"""CUDA graphs: a fixed list of launches, replayed as one."""

from __future__ import annotations

from collections.abc import Callable

import torch

_WARMUP_RUNS = 2  # compiles kernels and lets libraries allocate, neither of which may happen in a capture


class Graph:
    """Captures `run` on first use. `run` reads and writes fixed buffers, and is run for warming up: whatever it
    counts must be reset afterwards, which `after_warmup` is for."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self) -> None:
        """Warms up and captures; what `run` wrote by then stays written."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP_RUNS):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        self._graph = graph

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def replay(self) -> None:
        """One replay on the current stream."""
        if self._graph is None:
            self.capture()
        assert self._graph is not None
        self._graph.replay()
