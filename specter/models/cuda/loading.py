"""Fills the pinned store from a checkpoint, or from its inflation on the device."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor

from specter.experts.store import RawCodec
from specter.models.checkpoint import Checkpoint
from specter.models.cuda.store import Pin, PinnedStore
from specter.models.spec import ModelSpec

_NUM_OPENERS = 3
_NUM_AHEAD = 8  # layers opened or being opened before they are filled


class ExpertSource(Protocol):
    """The part of `Checkpoint` and `InflatedCheckpoint` that loading uses."""

    spec: ModelSpec

    def experts(self, layer: int) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2F, D] and down [E, D, F] of one MoE layer, any float dtype, any device."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Times of loading; `seconds` is from the first allocation to the last byte."""

    num_bytes: int
    seconds: float
    layer_s: tuple[float, ...]  # by layer
    wait_s: float  # waiting for free memory, summed over threads; overlaps the copies
    fault_s: float  # faulting pages in, likewise
    lock_s: float  # page-locking, likewise
    is_pinned: bool

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9


def load_store(
    source: ExpertSource, codec: RawCodec, console: Console, pin: Pin = "require", store: PinnedStore | None = None
) -> tuple[PinnedStore, LoadReport]:
    """Loads every routed expert, layer by layer, with progress on `console`.

    Several threads open memory ahead while payloads are computed and copied.

    Args:
        store: an empty store to fill, instead of one made with `pin`.
    Raises SpecterError: too little host memory, page-locking refused (see `PinnedStore`), or a damaged source.
    """
    spec = source.spec
    if store is None:
        store = PinnedStore(codec, spec.num_moe_layers, spec.num_experts, pin)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    ends = [time.perf_counter()]
    try:
        with _opened(store) as arenas, Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task("load experts", total=store.num_bytes)
            for layer, arena in enumerate(arenas):
                if isinstance(source, Checkpoint):  # one matrix at a time
                    source.read_experts(layer, *codec.views(arena))
                else:
                    _fill(arena, codec, *source.experts(layer))
                ends.append(time.perf_counter())
                progress.advance(task, store.layer_bytes)
    except BaseException:
        store.close()
        raise
    layer_s = tuple(end - begin for begin, end in itertools.pairwise(ends))
    return store, LoadReport(
        store.num_bytes, ends[-1] - ends[0], layer_s, store.wait_s, store.fault_s, store.lock_s, store.is_pinned
    )


@contextmanager
def _opened(store: PinnedStore) -> Iterator[Iterator[Tensor]]:
    """The store's arenas in order, opened ahead by other threads."""
    with ThreadPoolExecutor(_NUM_OPENERS) as openers:
        ahead = deque(openers.submit(store.open_layer, layer) for layer in range(min(_NUM_AHEAD, store.num_layers)))

        def arenas() -> Iterator[Tensor]:
            for layer in range(store.num_layers):
                arena = ahead.popleft().result()
                if layer + _NUM_AHEAD < store.num_layers:
                    ahead.append(openers.submit(store.open_layer, layer + _NUM_AHEAD))
                yield arena

        try:
            yield arenas()
        finally:
            openers.shutdown(cancel_futures=True)


def _fill(arena: Tensor, codec: RawCodec, gate_up: Tensor, down: Tensor) -> None:
    """One contiguous copy per layer from the device; on the host directly into place, without a second buffer."""
    if gate_up.is_cuda:
        arena.copy_(codec.pack(gate_up, down))
        return
    for place, value in zip(codec.views(arena), (gate_up, down), strict=True):
        place.copy_(value)
