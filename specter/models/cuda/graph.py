"""CUDA graphs of work that reads and writes fixed buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch

_WARMUP_RUNS = 2  # compiles kernels and lets libraries allocate, neither of which is allowed in a capture


class Graph:
    """A captured `run`, which reads and writes fixed buffers.

    Warm-up executes `run` too: capture between prompts, and reset the counters that it changes.
    """

    def __init__(self, run: Callable[[], object]) -> None:
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
        """Replays once on the current stream."""
        self._graph.replay()
