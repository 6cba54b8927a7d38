"""Prefill with nothing resident: layer by layer, with every expert streamed over the link exactly once.

The slots are two halves: while a layer computes on one half, the link fills the other with the next layer. The host
issues everything and never waits. The floor is one pass over all experts at the link's rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from specter.errors import SpecterError
from specter.models.base import Output, TargetPass
from specter.models.cuda.arena import DeviceArena
from specter.models.cuda.store import PinnedStore
from specter.models.spec import ModelSpec
from specter.timeline.base import Event, Timeline, Work

_ATTEND, _EXPERTS, _COMBINE, _HEAD = (
    Work(name, 0, 0, 1, 1) for name in ("attend_and_route", "experts", "combine", "head")
)


class LayerStream:
    """Whole MoE layers, in order, through two halves of an arena."""

    def __init__(self, store: PinnedStore, arena: DeviceArena, timeline: Timeline) -> None:
        """Raises SpecterError: the arena does not hold two layers."""
        num_experts = store.num_experts
        if arena.num_slots < 2 * num_experts:
            raise SpecterError(
                f"streaming layers of {num_experts} experts needs {2 * num_experts} slots; there are {arena.num_slots}",
                "raise the budget, or prefill with fewer tokens through the expert cache",
            )
        self._store, self._arena, self._timeline = store, arena, timeline
        self._last_use: list[Event | None] = [None, None]

    def prefill(self, spec: ModelSpec, target: TargetPass) -> Sequence[Output]:
        """Issues a target pass over a whole prompt; returns its outputs (see `Model.target_pass`), maybe in flight."""
        timeline, num_layers = self._timeline, self._store.num_layers
        arrivals = [self._fetch(layer) for layer in range(min(2, num_layers))]
        for layer in range(spec.num_layers):
            timeline.compute(_ATTEND, partial(target.attend_and_route, layer))
            moe_layer = layer - spec.num_dense_layers
            if moe_layer < 0:
                continue
            run = partial(target.run_experts, layer, range(spec.num_experts), self._slots(moe_layer))
            _, self._last_use[moe_layer % 2] = timeline.compute(_EXPERTS, run, after=(arrivals[moe_layer],))
            timeline.compute(_COMBINE, partial(target.combine, layer))
            if moe_layer + 2 < num_layers:
                arrivals.append(self._fetch(moe_layer + 2))
        outputs, _ = timeline.compute(_HEAD, target.outputs)
        return outputs

    def _slots(self, layer: int) -> range:
        """The slots of the layer's experts, in order."""
        first = layer % 2 * self._store.num_experts
        return range(first, first + self._store.num_experts)

    def _fetch(self, layer: int) -> Event:
        """Issues the copy of one layer, after the last use of its half."""
        last_use = self._last_use[layer % 2]
        copy = partial(self._arena.write_run, self._slots(layer).start, self._store.arena(layer))
        after = () if last_use is None else (last_use,)
        return self._timeline.copy(self._store.layer_bytes, copy, after, f"stream L{layer}")
