"""`mixtral_offloading`: plain decoding over exclusive caching with two-way swaps (arXiv 2312.17238).

Faithful to: its released runtime. An expert is on the device or on the host, never on both, so a miss moves the loaded
expert in *and* the displaced one out. Per layer a fixed number of residents, displaced by LRU. 4 spare device buffers
(and 4 on the host). Copies run on the compute stream, with no events: nothing overlaps. The resident experts of a
layer are computed first. No draft, no prediction. 16-bit weights, as everybody here; its HQQ quantisation is a
separate switch.
Departing where: it starts empty instead of full of arbitrary experts, so that a slot's first load moves nothing out;
all swaps of a layer are issued before its hits are computed, not three at a time (on one stream no total changes); the
host keeps its copy, since experts never change, and the bytes that move out are dropped: on the virtual clock they are
charged, on a device they are copied to its 4 buffers of page-locked host memory. Bytes leave a slot before others come
in, so that the 4 spare device buffers are charged and not used. It launches one grouped kernel per wave, as everybody
here.

`mixtral_speculative_loading`: the same with the paper's other idea, which that runtime does not contain: once a
layer's experts are on their way, the next layer's router on this layer's hidden state names two experts to load.
Departing where: such a load displaces the next layer's least recently used expert at once instead of waiting in a
spare buffer, and runs beside the compute stream, without which it could gain nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from specter.experts.residency import Slot
from specter.experts.transfer import Mover, SendBack, Transfer
from specter.models.spec import ExpertId
from specter.timeline.base import Event, LaneTotals, Mark, T, Timeline, Work


class OneStream:
    """A timeline on which copies and computes follow each other in the order of issue, as on one CUDA stream.

    On a device too, where events between its two streams make the order: with one stream alone (`is_serial`) nothing
    could run beside it, as speculative loading must.
    """

    def __init__(self, inner: Timeline) -> None:
        self._inner = inner
        self.clock = inner.clock
        self.ops = inner.ops
        self._last_compute: tuple[Event, ...] = ()
        self._last_copy: tuple[Event, ...] = ()

    def compute(self, work: Work, run: Callable[[], T], after: Iterable[Event] = ()) -> tuple[T, Event]:
        result, done = self._inner.compute(work, run, after=(*after, *self._last_copy))
        self._last_compute = (done,)
        return result, done

    def copy(self, num_bytes: int, run: Callable[[], None], after: Iterable[Event] = (), label: str = "") -> Event:
        done = self._inner.copy(num_bytes, run, after=(*after, *self._last_compute), label=label)
        self._last_copy = (done,)
        return done

    def wait(self, event: Event) -> None:
        self._inner.wait(event)

    def wait_first(self, events: Sequence[Event]) -> None:
        self._inner.wait_first(events)

    def is_done(self, event: Event) -> bool:
        return self._inner.is_done(event)

    def elapsed_ns(self, start: Event, end: Event) -> int:
        return self._inner.elapsed_ns(start, end)

    def now_ns(self) -> int:
        return self._inner.now_ns()

    def drain(self) -> None:
        self._inner.drain()

    def totals(self) -> LaneTotals:
        return self._inner.totals()

    def mark(self) -> Mark:
        return self._inner.mark()

    def totals_at(self, mark: Mark) -> LaneTotals:
        return self._inner.totals_at(mark)


class SwapTransfer(Transfer):
    """A load moves the expert that it displaces out as well.

    Args:
        stream: what a fetch is issued on, in order with compute.
        beside: what a prefetch is issued on.
        write_back: moves the displaced expert's bytes; on the virtual clock there is nothing to move.
    """

    def __init__(
        self, stream: Timeline, beside: Timeline, payload_bytes: int, mover: Mover, write_back: SendBack
    ) -> None:
        super().__init__(stream, payload_bytes, mover)
        self._write_back = write_back
        self._beside = Transfer(beside, payload_bytes, mover)
        self._streams = {False: stream, True: beside}

    def load(self, expert: ExpertId, slot: Slot, is_prefetch: bool, after: Iterable[Event] = ()) -> Event:
        if slot.generation > 1:  # the slot had an expert before
            used = () if slot.last_use is None else (slot.last_use,)
            copy = partial(self._write_back, slot.index)
            left = self._streams[is_prefetch].copy(self.payload_bytes, copy, after=used, label="write back")
            after = (*after, left)
        if is_prefetch:
            return self._beside.load(expert, slot, True, after)
        return super().load(expert, slot, False, after)
