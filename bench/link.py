"""The link, and the host's time per call: the host issues a copy faster than the link carries it, or the link idles."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bench.measure import MIN_REPEATS, Sample, device_ms
from bench.report import Row
from specter.models.cuda.arena import DeviceArena, make_mover, open_arena
from specter.models.cuda.loaded_model import LoadedModel
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.store import PinnedStore
from specter.models.spec import ExpertId

_CALLS = 40  # fewer than a driver queues before it blocks


def link_rows(model: LoadedModel, budget: DeviceBudget) -> list[Row]:
    """Plain pinned copies, expert by expert and a whole layer at once, and the host's time per call."""
    store = model.store
    arena = open_arena(store.num_experts, model.codec, budget)
    move = make_mover(arena, store)
    single = device_ms(lambda index: move(_expert(store, index), index % 2), per_repeat=100)
    layers = device_ms(lambda index: arena.write_run(0, store.arena(index % store.num_layers)), per_repeat=4)
    one, whole = (
        Sample(tuple(num_bytes / ms / 1e6 for ms in sample.values))
        for num_bytes, sample in ((store.codec.payload_bytes, single), (store.layer_bytes, layers))
    )
    return [
        Row("link, one expert per copy", "GB/s", one, note="pinned host to device, back to back"),
        *host_rows(arena, store),
        Row("link, one layer per copy", "GB/s", whole, note=f"{store.num_experts} adjacent experts"),
    ]


def host_rows(arena: DeviceArena, store: PinnedStore) -> list[Row]:
    """The host's time per call, calls in a row while copies are in flight; µs."""
    stream, compute = torch.cuda.Stream(), torch.cuda.current_stream()
    move = make_mover(arena, store)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_CALLS)]

    def copies(index: int) -> None:
        move(_expert(store, index), index % arena.num_slots)

    def framework_copies(index: int) -> None:
        arena.write(index % arena.num_slots, store.payload(_expert(store, index)))

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


def _expert(store: PinnedStore, index: int) -> ExpertId:
    layer, expert = divmod(index, store.num_experts)
    return ExpertId(layer % store.num_layers, expert)
