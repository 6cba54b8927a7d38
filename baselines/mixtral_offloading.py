"""`mixtral_offloading`: plain decoding over exclusive caching with two-way swaps (arXiv 2312.17238).

Faithful to: its released runtime. An expert is on the device or on the host, never on both, so a miss moves the loaded
expert in and the displaced one out. Per layer a fixed number of residents, displaced by LRU. 4 spare device buffers
(and 4 on the host). Copies run on the compute stream, so nothing overlaps. A layer's resident experts are computed
first. No draft, no prediction. 16-bit weights, as in every system here; its HQQ quantization is a separate feature.
Departing where: it starts empty instead of full of arbitrary experts, so a slot's first load moves nothing out. All
swaps of a layer are issued before its hits are computed, not three at a time (on one stream the totals are equal). The
host keeps its copy, since experts never change: bytes that move out are charged on the virtual clock, and copied to 4
page-locked host buffers on a device. They leave a slot before others come in, so the 4 spare device buffers are charged
and not used. It launches one grouped kernel per wave.

`mixtral_speculative_loading`: the same with the paper's second idea, which that runtime does not contain: once a
layer's experts are being loaded, the next layer's router on this layer's hidden state names two experts to load.
Departing where: such a load displaces the next layer's least recently used expert at once instead of waiting in a
spare buffer, and runs beside the compute stream, without which it could gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from specter.experts.residency import Slot
from specter.experts.transfer import TRANSFERS, Backend, Transfer
from specter.models.spec import ExpertId
from specter.timeline.base import Event, T, Timeline, Work


class OneStream:
    """A timeline on which copies and computes run in the order of issue, as on one CUDA stream.

    On a device, events between the two streams make the order, so that speculative loading can still run beside it.
    """

    def __init__(self, inner: Timeline) -> None:
        self._inner = inner
        self.clock = inner.clock
        self.ops = inner.ops
        self._last_compute: tuple[Event, ...] = ()
        self._last_copy: tuple[Event, ...] = ()
        self.now_ns, self.wait, self.wait_first, self.is_done = (
            inner.now_ns, inner.wait, inner.wait_first, inner.is_done
        )  # fmt: skip
        self.elapsed_ns, self.drain = inner.elapsed_ns, inner.drain
        self.totals, self.mark, self.totals_at = inner.totals, inner.mark, inner.totals_at

    def compute(self, work: Work, run: Callable[[], T], after: Iterable[Event] = ()) -> tuple[T, Event]:
        result, done = self._inner.compute(work, run, after=(*after, *self._last_copy))
        self._last_compute = (done,)
        return result, done

    def decode(self, work: Work, run: Callable[[], T], after: Iterable[Event] = ()) -> tuple[T, Event]:
        return self.compute(work, run, after)

    def copy(self, num_bytes: int, run: Callable[[], None], after: Iterable[Event] = (), label: str = "") -> Event:
        done = self._inner.copy(num_bytes, run, after=(*after, *self._last_compute), label=label)
        self._last_copy = (done,)
        return done


@TRANSFERS.register("swap")
class SwapTransfer(Transfer):
    """A load also moves the displaced expert out.

    Fetches are issued in order with compute; prefetches run beside it.
    """

    def __init__(self, backend: Backend, num_bytes: Callable[[ExpertId], int], num_buffers: int = 0) -> None:
        super().__init__(replace(backend, timeline=OneStream(backend.timeline)), num_bytes)
        self._write_back = backend.open_write_back(num_buffers)
        self._beside = Transfer(backend, num_bytes)

    def load(self, expert: ExpertId, slot: Slot, is_prefetch: bool, after: Iterable[Event] = ()) -> Event:
        timeline = self._beside.timeline if is_prefetch else self.timeline
        if slot.generation > 1:  # the slot held another expert before
            used = () if slot.last_use is None else (slot.last_use,)
            write_back = partial(self._write_back, slot.index)
            after = (*after, timeline.copy(self.num_bytes(expert), write_back, after=used, label="write back"))
        if is_prefetch:
            return self._beside.load(expert, slot, is_prefetch, after)
        return super().load(expert, slot, is_prefetch, after)
