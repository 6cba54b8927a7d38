"""Slots of one size on the device, with the target and the draft over them: what engines are built on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from specter.models.cuda.arena import open_arena
from specter.models.cuda.copies import make_mover
from specter.models.cuda.device_pass import DevicePasses
from specter.models.cuda.draft import Draft
from specter.models.cuda.full_size import DTYPE, FullSize, fill
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.model import DeviceModel
from specter.models.cuda.own_draft import OwnMemory
from specter.models.cuda.target import Target
from specter.models.cuda.weights import GpuKVCache, GpuWeights
from specter.models.cuda.write_back import WriteBack


class Bed:
    """Everything on the device that depends on the number of slots or on how tokens are chosen.

    `move` is its `Mover`.

    Args:
        is_resident: every expert has a slot and passes run whole, as one graph each; there is no draft then.
        max_rows: of the longest pass.
        temperature, seed: as in `specter.models.cuda.draft.Draft`.
        is_graphed: launch by CUDA graphs, where there is CUDA.
        make_draft: another draft than `Draft`, with its arguments.

    Attributes:
        model: the target, and the draft that shares its weights and KV.
        own_memory: of the draft that `own_draft` has made, if it has.
    Raises:
        SpecterError: the slots do not fit the budget.
    """

    def __init__(
        self,
        full: FullSize,
        num_slots: int,
        budget: DeviceBudget,
        kv_capacity: int,
        max_rows: int,
        max_draft_len: int,
        temperature: float | None = None,
        seed: int = 0,
        is_graphed: bool = True,
        is_resident: bool = False,
        make_draft: Callable[..., Draft] = Draft,
    ) -> None:
        spec, device = full.spec, budget.device
        self.spec = spec
        self._full, self._budget, self._kv_capacity = full, budget, kv_capacity
        self._arena = open_arena(num_slots, full.codec, budget)
        self.move = make_mover(self._arena, full.store)
        self.is_resident = is_resident
        table = fill(self._arena, full.store, spec.num_moe_layers) if is_resident else None
        pdl = device.type == "cuda"
        self._is_graphed = is_graphed and pdl
        cache = GpuKVCache(spec, kv_capacity, DTYPE, device)
        slots = self._arena.flat.view(DTYPE)
        target = Target(full.weights, slots, cache, max_rows, table, seed, temperature, pdl)

        def draft_over(weights: GpuWeights, cache: GpuKVCache) -> Draft:
            return make_draft(weights, full.int4, cache, max_draft_len, seed, temperature, pdl)

        self._draft_over = draft_over
        draft = draft_over(full.weights, cache) if full.has_draft and not is_resident else None
        self._captured, self._captured_foresight = set[int](), set[int]()
        self.model = DeviceModel(DevicePasses(target, is_resident), draft, self._is_graphed)
        self.own_memory: OwnMemory | None = None
        self._own_draft: DeviceModel | None = None

    def capture(self, row_counts: Iterable[int], foresees: bool = False) -> None:
        """Captures passes of these numbers of rows where they are not yet, if graphs are wanted; between prompts.

        Args:
            foresees: also what a system with foresight launches beside them.
        """
        wanted = set(row_counts)
        for num_rows in sorted(wanted - self._captured):
            self.model.capture(num_rows)
        self._captured |= wanted
        if foresees:
            for num_rows in sorted(wanted - self._captured_foresight):
                self.model.capture_foresight(num_rows)
            self._captured_foresight |= wanted

    def own_draft(self) -> DeviceModel:
        """The draft on a copy of the non-expert weights and a KV cache of its own, made at the first call.

        Raises:
            SpecterError: they do not fit the budget.
        """
        if self._own_draft is None:
            self.own_memory = OwnMemory.allocate(self._full.weights, self._kv_capacity, self._budget)
            draft = self._draft_over(self.own_memory.weights, self.own_memory.cache)
            self._own_draft = DeviceModel(self.model.passes, draft, self._is_graphed)
        return self._own_draft

    def open_write_back(self, num_buffers: int) -> WriteBack:
        """The way back of a swapping system; see `build_engine`."""
        return WriteBack(self._arena, num_buffers)

    def poison(self) -> None:
        """Fills every slot with NaN, unless all are resident: whoever reads what did not arrive cannot go unseen."""
        if not self.is_resident:
            self._arena.flat.fill_(0xFF)
            if self._arena.flat.is_cuda:  # copies come on another stream
                torch.cuda.synchronize(self._arena.flat.device)
