"""Passes of the target behind the engine's `TargetPass`, as CUDA graphs or kernel by kernel; outputs are tokens.

What a method returns lies in page-locked memory and is valid once the event of its work has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from specter.kernels.pinned_io import PinnedRing, copy_pinned
from specter.models.base import Output, Routing
from specter.models.cuda.graph import Graph
from specter.models.cuda.staging import Staging
from specter.models.cuda.target import OUTPUT_ROWS, Target

Key = tuple[str, int, int]  # part of a pass, layer, rows launched
Part = tuple[str, int, Callable[[], object]]  # a part of a pass, its layer, and its launch; one graph each


class Runner(Protocol):
    """What a pass uses of a `ModelRunner`; results lie in page-locked memory."""

    num_layers: int
    num_dense_layers: int
    target: Target
    tables: PinnedRing  # of slots
    staging: Staging | None  # if slots hold blobs
    routing: Tensor  # int16 [MoE layers, max_rows, top_k]
    predicted: Tensor  # int16 [MoE layers - 1, max_rows, top_k]
    tokens: Tensor  # int32 [OUTPUT_ROWS]
    host_tokens: Any  # the same memory as an array


@dataclass(frozen=True, slots=True)
class WavePass:
    """A `TargetPass` in waves. Captured parts are replayed, the others launched kernel by kernel."""

    runner: Runner
    graphs: Mapping[Key, Graph]
    num_rows: int
    num_launched: int  # with padding
    num_outputs: int

    @property
    def num_chosen(self) -> int:
        """Rows that choose a token: all launched ones, if all rows are outputs."""
        return self.num_launched if self.num_outputs == self.num_rows else self.num_outputs

    def attend_and_route(self, layer: int) -> Routing | None:
        runner, num_rows = self.runner, self.num_launched
        moe = layer - runner.num_dense_layers
        if not self._is_replayed("attend", layer):
            if layer == 0:
                runner.target.embed(num_rows)
            runner.target.attend_and_route(layer, num_rows)
            if moe >= 0:
                copy_pinned(runner.target.routing.chosen[:num_rows], runner.routing[moe, :num_rows])
        return None if moe < 0 else _routing(runner.routing, moe, self.num_rows)

    def predict_next(self, layer: int) -> Routing:
        runner, num_rows = self.runner, self.num_rows
        moe = layer - runner.num_dense_layers
        if num_rows != self.num_launched or not self._is_replayed("predict", layer):
            runner.target.predict_next(layer, num_rows)
            copy_pinned(runner.target.predicted.chosen[:num_rows], runner.predicted[moe, :num_rows])
        return _routing(runner.predicted, moe, num_rows)

    def decode(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        runner, moe = self.runner, layer - self.runner.num_dense_layers
        assert runner.staging is not None
        runner.staging.decode(moe, experts, slots)

    def run_experts(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        runner = self.runner
        if experts:  # none while this is captured
            runner.tables.write(-1, experts, slots if runner.staging is None else runner.staging.places(slots))
        if not self._is_replayed("experts", 0):
            runner.tables.read_next()
            runner.target.run_experts(runner.tables.row, self.num_launched)

    def combine(self, layer: int) -> None:
        if not self._is_replayed("combine", layer):
            self.runner.target.combine(layer, self.num_launched)

    def outputs(self) -> Sequence[Output]:
        runner, num_chosen = self.runner, self.num_chosen
        if num_chosen < self.num_launched or not self._is_replayed("outputs", 0):
            runner.target.choose(self.num_launched, num_chosen)
            copy_pinned(runner.target.tokens[:num_chosen], runner.tokens[:num_chosen])
        tokens: Sequence[Output] = runner.host_tokens[: self.num_outputs]
        return tokens

    def parts(self, *, predicts_next: bool) -> Iterable[Part]:
        yield "experts", 0, partial(self.run_experts, 0, (), ())
        dense, last = self.runner.num_dense_layers, self.runner.num_layers - 1
        for layer in range(last + 1):
            yield "attend", layer, partial(self.attend_and_route, layer)
            if layer >= dense:
                yield "combine", layer, partial(self.combine, layer)
        yield "outputs", 0, self.outputs
        for layer in range(dense, last) if predicts_next else ():
            yield "predict", layer, partial(self.predict_next, layer)

    def _is_replayed(self, part: str, layer: int) -> bool:
        """Replays this part if it was captured; False if it was not."""
        graph = self.graphs.get((part, layer, self.num_launched))
        if graph is not None:
            graph.replay()
        return graph is not None


class ResidentPass(WavePass):
    """A `TargetPass` that launches every layer with the first one; the routing stays on the device."""

    __slots__ = ()

    @property
    def num_chosen(self) -> int:
        return self.num_rows if self.num_rows <= OUTPUT_ROWS else self.num_outputs

    def attend_and_route(self, layer: int) -> None:
        if layer == 0 and not self._is_replayed("pass", 0):
            self.runner.target.run(self.num_rows, self.num_chosen)
            copy_pinned(self.runner.target.tokens[: self.num_chosen], self.runner.tokens[: self.num_chosen])

    def outputs(self) -> Sequence[Output]:
        tokens: Sequence[Output] = self.runner.host_tokens[self.num_chosen - self.num_outputs : self.num_chosen]
        return tokens

    def parts(self, *, predicts_next: bool) -> Iterable[Part]:
        yield "pass", 0, partial(self.attend_and_route, 0)


def _routing(pinned: Tensor, moe_layer: int, num_rows: int) -> Routing:
    rows: Routing = pinned[moe_layer, :num_rows].numpy()
    return rows
