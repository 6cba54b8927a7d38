"""Slots of one size on the device, with the target and the draft over them: what engines are built on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from specter.gpu.arena import open_arena
from specter.gpu.copies import make_mover
from specter.gpu.device_pass import DevicePasses
from specter.gpu.draft import Draft
from specter.gpu.full_size import DTYPE, FullSize, fill
from specter.gpu.memory import DeviceBudget
from specter.gpu.model import DeviceModel
from specter.gpu.target import Target
from specter.gpu.weights import GpuKVCache


class Bed:
    """Everything on the device that depends on the number of slots or on how tokens are chosen.

    `move` is its `Mover`.

    Args:
        is_resident: every expert has a slot and passes run whole, as one graph each; there is no draft then.
        max_rows: of the longest pass.
        temperature, seed: as in `specter.gpu.draft.Draft`.
        is_graphed: launch by CUDA graphs.
        make_draft: another draft than `Draft`, with its arguments.
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
        self._arena = open_arena(num_slots, full.codec, budget)
        self.move = make_mover(self._arena, full.store)
        self.is_resident = is_resident
        table = fill(self._arena, full.store, spec.num_moe_layers) if is_resident else None
        pdl = device.type == "cuda"
        cache = GpuKVCache(spec, kv_capacity, DTYPE, device)
        slots = self._arena.flat.view(DTYPE)
        target = Target(full.weights, slots, cache, max_rows, table, seed, temperature, pdl)
        draft = None
        if not is_resident:
            draft = make_draft(full.weights, full.int4, cache, max_draft_len, seed, temperature, pdl)
        self._captured = set[int]()
        self.model = DeviceModel(DevicePasses(target, is_resident), draft, is_graphed)

    def capture(self, row_counts: Iterable[int]) -> None:
        """Captures passes of these numbers of rows where they are not yet, if graphs are wanted; between prompts."""
        for num_rows in set(row_counts) - self._captured:
            self.model.capture(num_rows)
            self._captured.add(num_rows)

    def poison(self) -> None:
        """Fills every slot with NaN, unless all are resident: whoever reads what did not arrive cannot go unseen."""
        if not self.is_resident:
            self._arena.flat.fill_(0xFF)
            torch.cuda.synchronize(self._arena.flat.device)
