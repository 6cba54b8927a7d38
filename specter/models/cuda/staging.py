"""Residual experts on the device: their slots hold blobs, which waves decode into a staging area that kernels read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

from specter.experts.slots import poisoned, stride_bytes
from specter.experts.store import RawCodec
from specter.kernels.int4_moe import PackedExperts
from specter.kernels.pinned_io import PinnedRing
from specter.kernels.residual import WaveDecoder, wave_row
from specter.models.cuda.arena import BlobSlots
from specter.models.cuda.blobs import BlobStore
from specter.models.cuda.graph import Graph
from specter.models.cuda.memory import DeviceBudget

_SIZES = (1, 2, 3, 4, 6, 8, 12)  # waves whose decoding is captured; others take the next larger one


class Staging:
    """Places for the decoded experts of two waves, and the decoder that fills them.

    Waves take the halves in turn, so that one can be decoded while the last is read: `decode` and `places` each count
    the waves for themselves.

    Attributes:
        experts: [num_places, stride] in the codec's dtype, NaN until written; an arena for `grouped_mlp`.
    """

    def __init__(
        self, num_places: int, num_waves: int, *, codec: RawCodec, codes: PackedExperts, store: BlobStore,
        slots: BlobSlots, budget: DeviceBudget,
    ) -> None:  # fmt: skip
        """
        Args:
            num_waves: that the host issues ahead.
            codec: of the decoded experts. codes: of every layer.
        Raises SpecterError: the places do not fit the budget.
        """
        budget.check(num_places * stride_bytes(codec), f"a staging area of {num_places} decoded experts")
        self._bytes = poisoned(num_places, stride_bytes(codec), budget.device)
        self.experts = self._bytes.view(codec.dtype)
        self._half, self._slots = num_places // 2, slots
        self._num_decoded = self._num_read = 0  # waves
        self._windows, self._num_experts = store.windows, store.num_experts
        self._waves = PinnedRing(num_waves, len(wave_row(store.windows[0], 0, (), (), self._half)), budget.device)
        self._decoder = WaveDecoder(codes.layers())
        self._sizes: list[int] = []  # captured
        self._graphs: dict[tuple[int, bool], Graph] = {}  # by size and kind of windows

    def capture(self) -> None:
        """Captures decoding, for waves of several sizes. Call it before the first wave: warm-up decodes empty ones."""
        self._sizes = [size for size in _SIZES if size < self._half] + [self._half]
        for key in itertools.product(self._sizes, {windows.two_sided for windows in self._windows}):
            self._graphs[key] = Graph(partial(self._launch, *key))
        self.restart()

    def decode(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Decodes experts of MoE layer `layer`, at most half as many as there are places, from these slots into the
        next half; issued to the current stream."""
        windows, first = self._windows[layer], layer * self._num_experts
        place = self._num_decoded % 2 * self._half
        self._num_decoded += 1
        self._waves.write_row(wave_row(windows, place, [first + expert for expert in experts], slots, self._half))
        size = next((size for size in self._sizes if size >= len(experts)), None)
        if size is None:
            self._launch(len(experts), windows.two_sided)
        else:
            self._graphs[size, windows.two_sided].replay()

    def places(self, places: Sequence[int]) -> list[int]:
        """Where places 0, 1, … of the oldest wave not yet read are."""
        first = self._num_read % 2 * self._half
        self._num_read += 1
        return [first + place for place in places]

    def restart(self) -> None:
        """Discards all waves. Synchronizes the device."""
        self._num_decoded = self._num_read = 0
        self._waves.restart()

    def poison(self) -> None:
        self._bytes.fill_(0xFF)

    def _launch(self, size: int, two_sided: bool) -> None:
        self._waves.read_next()
        self._decoder.launch(self._waves.row, self._slots.memory, self.experts, two_sided=two_sided, num_experts=size)
