"""Fills the pinned store from a checkpoint, or straight from its inflation on the device."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor

from specter.experts.store import RawCodec
from specter.gpu.store import Pin, PinnedStore
from specter.model.spec import ModelSpec


class ExpertSource(Protocol):
    """`Checkpoint` and `InflatedCheckpoint`, as far as loading goes."""

    spec: ModelSpec

    def experts(self, layer: int) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2F, D] and down [E, D, F] of one MoE layer, any float dtype, any device."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How loading went; `seconds` covers everything from the first allocation to the last byte."""

    num_bytes: int
    seconds: float
    layer_s: tuple[float, ...]  # of every layer
    open_s: float  # allocating, faulting in and page-locking, partly behind the copies
    is_pinned: bool

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9


def load_store(
    source: ExpertSource, codec: RawCodec, console: Console, pin: Pin = "require", store: PinnedStore | None = None
) -> tuple[PinnedStore, LoadReport]:
    """Loads every routed expert, layer by layer, with progress on `console`.

    The next layer's memory is opened while this one's payloads are computed and copied.

    Args:
        store: an empty store to fill, instead of one made with `pin`.
    Raises:
        SpecterError: host memory is short or page-locking refused (see `PinnedStore`), or the source is damaged.
    """
    spec = source.spec
    if store is None:
        store = PinnedStore(codec, spec.num_moe_layers, spec.num_experts, pin)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    ends = [time.perf_counter()]
    open_s = 0.0

    def open_layer() -> tuple[Tensor, float]:
        begin = time.perf_counter()
        return store.open_layer(), time.perf_counter() - begin

    try:
        with (
            ThreadPoolExecutor(1) as opener,
            Progress(*columns, TimeRemainingColumn(), console=console) as progress,
        ):
            task = progress.add_task("load experts", total=store.num_bytes)
            opening = opener.submit(open_layer)
            for layer in range(spec.num_moe_layers):
                arena, seconds = opening.result()
                open_s += seconds
                if layer + 1 < spec.num_moe_layers:
                    opening = opener.submit(open_layer)
                _fill(arena, codec, *source.experts(layer))
                ends.append(time.perf_counter())
                progress.advance(task, store.layer_bytes)
    except BaseException:
        store.close()
        raise
    layer_s = tuple(end - begin for begin, end in itertools.pairwise(ends))
    return store, LoadReport(store.num_bytes, ends[-1] - ends[0], layer_s, open_s, store.is_pinned)


def _fill(arena: Tensor, codec: RawCodec, gate_up: Tensor, down: Tensor) -> None:
    """From the device one contiguous copy per layer; on the host straight into place, without a second buffer."""
    if gate_up.is_cuda:
        arena.copy_(codec.pack(gate_up, down))
        return
    for place, value in zip(codec.views(arena), (gate_up, down), strict=True):
        place.copy_(value)
