"""What the host pays for the calls that a round is made of: it must issue a copy in less time than the link takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bench.measure import MIN_REPEATS, Sample
from bench.report import Row
from specter.models.cuda.arena import DeviceArena
from specter.models.cuda.copies import make_mover
from specter.models.cuda.store import PinnedStore
from specter.models.spec import ExpertId

_CALLS = 40  # fewer than what a driver queues before it blocks


def host_rows(arena: DeviceArena, store: PinnedStore) -> list[Row]:
    """Host time per call, one behind the other while copies are under way; µs."""
    stream, compute = torch.cuda.Stream(), torch.cuda.current_stream()
    move = make_mover(arena, store)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_CALLS)]

    def expert(index: int) -> ExpertId:
        layer, one = divmod(index, store.num_experts)
        return ExpertId(layer % store.num_layers, one)

    def copies(index: int) -> None:
        move(expert(index), index % arena.num_slots)

    def framework_copies(index: int) -> None:
        arena.write(index % arena.num_slots, store.payload(expert(index)))

    calls: dict[str, Callable[[int], object]] = {
        "one expert's copy, issued": copies,
        "one expert's copy, issued by Tensor.copy_": framework_copies,
        "an event, recorded": lambda index: events[index].record(stream),
        "an event, asked": lambda index: events[index].query(),
        "an event, waited for by another stream": lambda index: compute.wait_event(events[index]),
    }
    rows = []
    with torch.cuda.stream(stream):
        for name, call in calls.items():
            values = []
            for repeat in range(-1, MIN_REPEATS):
                copies(0)
                start = time.perf_counter()
                for index in range(_CALLS):
                    call(index)
                if repeat >= 0:
                    values.append((time.perf_counter() - start) / _CALLS * 1e6)
                torch.cuda.synchronize()
            rows.append(Row(f"host, {name}", "us", Sample(tuple(values)), note="host clock"))
    return rows
