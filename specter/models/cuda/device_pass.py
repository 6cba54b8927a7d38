"""Passes of the device target behind the `TargetPass` protocol: graphs going out, routing and tokens coming back.

Nothing here waits, and nothing uses a copy engine. Tokens and slot tables are read by the device from page-locked
memory, routing and chosen tokens are written to it; the host may read them once the work's event has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from specter.kernels import pinned_io
from specter.models.base import Output, Routing, TargetPass
from specter.models.cuda.foresight import DeviceForesight
from specter.models.cuda.graphs import Graph
from specter.models.cuda.target import OUTPUT_ROWS, Target
from specter.models.rope import check_prompt

# Slot tables that the host may be ahead by. It waits for every layer's router: at most two layers of one-expert waves.
_NUM_TABLES = 512

Run = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Launches:
    """The work of a pass of so many rows, as graphs or kernel by kernel."""

    mix: Sequence[Run]  # by layer
    experts: Run
    combine: Sequence[Run]  # by layer, dense ones included, which nobody calls
    outputs: Run  # as many as rows


class DevicePasses:
    """Passes of one target; graphed for the numbers of rows that were captured.

    Args:
        is_resident: the target's slot table names every expert, and a pass runs whole: the ceiling.
    """

    def __init__(self, target: Target, is_resident: bool = False) -> None:
        spec, device = target.weights.spec, target.weights.device
        self.target = target
        self.is_resident = is_resident
        self.feed = pinned_io.pinned_zeros((target.max_rows,), torch.int32, device)
        self.routing = pinned_io.pinned_zeros((spec.num_moe_layers, target.max_rows, spec.top_k), torch.int16, device)
        self.tokens = pinned_io.pinned_zeros((OUTPUT_ROWS,), torch.int32, device)
        self.tables = pinned_io.PinnedRing(_NUM_TABLES, spec.num_experts, device)
        self._captured: dict[int, _Launches] = {}
        self._resident: dict[int, Run] = {}
        self._foresight = DeviceForesight(target)
        self._foresee: dict[tuple[int, int], Run] = {}  # by layer and number of rows

    def begin(self, tokens: Sequence[int], position: int, num_outputs: int) -> TargetPass:
        """A pass over `tokens` at `position`…, of which nothing runs yet; the one before must have ended.

        Raises:
            SpecterError: more rows, outputs or positions than there is room for, or a prompt that LongRoPE's switch
                forbids.
        """
        num_rows = len(tokens)
        if position == 0:
            check_prompt(self.target.weights.spec, self.target.cache.capacity, num_rows)
        launched = self._num_launched(num_rows, position, num_outputs)
        self.target.place(launched, position, launched if self.is_resident or launched > num_rows else num_outputs)
        self.feed[:launched] = torch.tensor([*tokens, *[tokens[-1]] * (launched - num_rows)], dtype=torch.int32)
        if self.is_resident:
            return _ResidentPass(
                self, self._resident.get(num_rows, partial(self._run, num_rows)), num_rows, num_outputs
            )
        return _DevicePass(self, self._captured.get(launched) or self._launches(launched), num_rows, num_outputs)

    def _num_launched(self, num_rows: int, position: int, num_outputs: int) -> int:
        """Rows that a pass of `num_rows` launches: as many as the next larger one that was captured, if it fits.

        Rows behind the pass' own change none of them, as long as they are finite (a tile of queries reads all keys and
        values of its rows, and zero times NaN is NaN): nobody looks at their routing, so that their experts run only
        where a wave has them anyway, and else leave results of a pass before; their KV is written anew before it is
        read.
        """
        larger = [one for one in self._captured if one >= num_rows and position + one <= self.target.cache.capacity]
        return min(larger, default=num_rows) if num_outputs == num_rows else num_rows

    def capture(self, num_rows: int) -> None:
        """Captures passes of `num_rows` rows. Call it between prompts: it writes KV at the first positions."""
        self.target.place(num_rows, 0, num_rows)
        if self.is_resident:
            self._resident[num_rows] = Graph(partial(self._run, num_rows)).replay
            return
        runs = self._launches(num_rows)
        spec = self.target.weights.spec
        dense = spec.num_dense_layers
        mix, experts, combine = [], Graph(runs.experts).replay, list(runs.combine[:dense])
        for layer in range(spec.num_layers):
            mix.append(Graph(runs.mix[layer]).replay)
            if layer >= dense:
                combine.append(Graph(runs.combine[layer]).replay)
        self._captured[num_rows] = _Launches(mix, experts, combine, Graph(runs.outputs).replay)
        # Warming up has read slots that may hold nothing yet, and rows behind a pass' own add whatever is left here.
        self.target.results.zero_()
        self.tables.restart()  # warming up has read some

    def capture_foresight(self, num_rows: int) -> None:
        """Captures what `foresee` launches in passes of `num_rows` rows."""
        spec = self.target.weights.spec
        for layer in range(spec.num_dense_layers, spec.num_layers - 1):
            self._foresee[layer, num_rows] = Graph(partial(self._foresight.run, layer, num_rows)).replay

    def foresee(self, layer: int, num_rows: int) -> Routing:
        """See `TargetPass.predict_next`; readable once the work's event has happened."""
        run = self._foresee.get((layer, num_rows)) or partial(self._foresight.run, layer, num_rows)
        run()
        moe = layer - self.target.weights.spec.num_dense_layers
        return cast(Routing, self._foresight.foreseen[moe, :num_rows].numpy())

    # -- the kernels, launched one by one ---------------------------------------------------------

    def _launches(self, num_rows: int) -> _Launches:
        layers = range(self.target.weights.spec.num_layers)
        return _Launches(
            [partial(self._mix, layer, num_rows) for layer in layers],
            partial(self._experts, num_rows),
            [partial(self.target.combine, layer, num_rows) for layer in layers],
            partial(self.choose, num_rows, num_rows),
        )

    def _mix(self, layer: int, num_rows: int) -> None:
        if layer == 0:
            self.target.embed(num_rows, self.feed)
        self.target.mix(layer, num_rows)
        moe = layer - self.target.weights.spec.num_dense_layers
        if moe >= 0:
            pinned_io.copy_pinned(self.target.routing.chosen[:num_rows], self.routing[moe, :num_rows])

    def _experts(self, num_rows: int) -> None:
        self.tables.read_next()
        self.target.run_experts(self.tables.row, num_rows)

    def choose(self, num_rows: int, num_outputs: int) -> None:
        """Tokens of the last `num_outputs` rows, to the host."""
        self.target.choose(num_rows, num_outputs)
        pinned_io.copy_pinned(self.target.tokens[:num_outputs], self.tokens[:num_outputs])

    def _run(self, num_rows: int) -> None:
        self.target.run(num_rows, self.feed)
        pinned_io.copy_pinned(self.target.tokens[:num_rows], self.tokens[:num_rows])


@dataclass(frozen=True, slots=True)
class _DevicePass:
    """A `TargetPass`; its outputs are tokens. What it returns is readable once the work's event has happened."""

    passes: DevicePasses
    launches: _Launches
    num_rows: int
    num_outputs: int

    def attend_and_route(self, layer: int) -> Routing | None:
        self.launches.mix[layer]()
        moe = layer - self.passes.target.weights.spec.num_dense_layers
        return None if moe < 0 else self.passes.routing[moe, : self.num_rows].numpy()

    def predict_next(self, layer: int) -> Routing:
        return self.passes.foresee(layer, self.num_rows)

    def run_experts(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        self.passes.tables.write(-1, experts, slots)
        self.launches.experts()

    def combine(self, layer: int) -> None:
        self.launches.combine[layer]()

    def outputs(self) -> Sequence[Output]:
        if self.num_outputs == self.num_rows:
            self.launches.outputs()
        else:
            self.passes.choose(self.num_rows, self.num_outputs)
        return cast(Sequence[Output], self.passes.tokens[: self.num_outputs].numpy())


@dataclass(frozen=True, slots=True)
class _ResidentPass:
    """Every layer runs whole, like a dense one, all of them with the first; the routing stays on the device."""

    passes: DevicePasses
    run: Run
    num_rows: int
    num_outputs: int

    def attend_and_route(self, layer: int) -> Routing | None:
        if layer == 0:
            self.run()  # every row is an output
        return None

    def predict_next(self, layer: int) -> Routing:
        raise AssertionError("no layer told a routing")

    def run_experts(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        raise AssertionError("no layer told a routing")

    def combine(self, layer: int) -> None:
        raise AssertionError("no layer told a routing")

    def outputs(self) -> Sequence[Output]:
        return cast(Sequence[Output], self.passes.tokens[self.num_rows - self.num_outputs : self.num_rows].numpy())
