"""CUDA graphs: a fixed list of launches, replayed as one."""

from __future__ import annotations

from collections.abc import Callable

import torch

_WARMUP_RUNS = 2  # compiles kernels and lets libraries allocate, neither of which may happen in a capture


class Graph:
    """A captured `run`, which must read and write fixed buffers.

    `run` is executed for warming up too: capture before the first prompt, and reset afterwards what it counts.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            run()

    def replay(self) -> None:
        """One replay on the current stream."""
        self._graph.replay()
