"""Runs the target and its draft on a device: the engine's `Model`, over slots, pinned buffers and CUDA graphs.

Tokens are chosen on the device, so a draft step feeds the next one, and outputs *are* tokens (`TokenSampler`). Nothing
here waits for the device, and nothing uses a copy engine: the device reads tokens and slot tables from page-locked
memory and writes routing and chosen tokens to it. The host reads a result once the event of its work has happened.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specter.config import SamplingConfig
from specter.errors import SpecterError
from specter.kernels.pinned_io import PinnedRing, copy_pinned, pinned_zeros
from specter.kernels.select import SamplingParams
from specter.models.base import Choose, Proposal, TargetPass
from specter.models.cuda.arena import DeviceArena, Slots, make_mover, open_arena, open_blob_slots
from specter.models.cuda.blobs import BlobStore
from specter.models.cuda.draft import ByExpertDraft, Draft, UnfusedDraft
from specter.models.cuda.graph import Graph
from specter.models.cuda.loaded_model import LoadedModel
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.passes import Key, ResidentPass, WavePass
from specter.models.cuda.staging import Staging
from specter.models.cuda.target import OUTPUT_ROWS, Target
from specter.models.cuda.weights import GpuKVCache, GpuWeights, OwnMemory
from specter.models.rope import check_prompt
from specter.models.spec import ExpertId

# Slot tables that the host writes ahead. It waits for every layer's router: at most two layers of one-expert waves.
_NUM_TABLES = 512
_NUM_LINK_COPIES, _NUM_WARMUP_COPIES = 100, 3  # of one measurement of the link


def check_sampling(sampling: SamplingConfig) -> None:
    """Raises SpecterError: top-k, top-p or rejection sampling, which need logits on the host at every step."""
    if sampling.kind == "greedy":
        return
    checks = {"kind": sampling.kind != "seeded", "top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1.0}
    given = [f"sampling.{name}={getattr(sampling, name)}" for name, is_unsupported in checks.items() if is_unsupported]
    if given:
        raise SpecterError(
            f"{', '.join(given)} cannot be done inside a step on the device",
            "use sampling=greedy, or sampling=seeded with top_k=0 and top_p=1",
        )


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Everything that decides a runner's memory and kernels; runs with equal options share a runner."""

    num_slots: int
    kv_capacity: int
    max_rows: int  # of the longest pass
    max_draft_len: int = 1
    owns_draft: bool = False  # non-expert weights and a KV cache of the draft's own
    is_resident: bool = False  # every expert has a slot, a pass is one graph, nothing drafts, routing is not read
    is_fused: bool = True  # draft with the fused INT4 kernels, or else with plain torch
    is_by_expert: bool = False  # launch the fused kernels once per chosen expert
    is_graphed: bool = True  # launch through CUDA graphs, where there is CUDA
    slot_bytes: int = 0  # of blobs; slots of 16-bit experts have the size of one
    num_staged: int = 0  # decoded experts in the staging area, if slots hold blobs


@dataclass(frozen=True, slots=True)
class _DraftStep:
    """A `DraftStep` in page-locked memory, valid until the next draft begins."""

    tokens: NDArray[np.int32]  # [max_steps]
    routings: NDArray[np.int16]  # [max_steps, MoE layers, top_k]
    index: int

    @property
    def proposal(self) -> Proposal:
        return Proposal(int(self.tokens[self.index]))

    @property
    def routing(self) -> NDArray[np.int16]:
        routing: NDArray[np.int16] = self.routings[self.index].copy()
        return routing


class ModelRunner:
    """A `Model` over `options.num_slots` slots of `model`. Raises SpecterError: the slots do not fit the budget.

    Attributes:
        move: the `Mover` from the store into the slots.
        own_memory: of the draft that `own_draft` has made, if any.
    """

    def __init__(self, model: LoadedModel, budget: DeviceBudget, options: RunnerOptions) -> None:
        spec, weights, device = model.spec, model.weights, budget.device
        self.num_layers, self.num_dense_layers = spec.num_layers, spec.num_dense_layers
        self.num_experts, self.top_k = spec.num_experts, spec.top_k
        self.options = options
        self.own_memory: OwnMemory | None = None
        self._model, self._budget = model, budget
        self._pdl = device.type == "cuda"
        self._pass = ResidentPass if options.is_resident else WavePass
        self._uses_graphs = options.is_graphed and device.type == "cuda"

        self.arena, self.staging = self._open_slots()
        self.move = make_mover(self.arena, model.store)
        self.feed = pinned_zeros((options.max_rows,), torch.int32, device)
        cache = GpuKVCache(spec, options.kv_capacity, weights.dtype, device)
        slots = self.arena.flat.view(weights.dtype) if self.staging is None else self.staging.experts
        table = self._fill_slots() if options.is_resident else None
        self._sampling = SamplingParams.greedy(device)
        self.target = Target(
            weights,
            slots,
            cache,
            options.max_rows,
            slot_table=table,
            feed=self.feed,
            sampling=self._sampling,
            pdl=self._pdl,
        )
        rows = options.max_rows, spec.top_k
        self.routing = pinned_zeros((spec.num_moe_layers, *rows), torch.int16, device)
        self.predicted = pinned_zeros((max(spec.num_moe_layers - 1, 0), *rows), torch.int16, device)
        self.tokens = pinned_zeros((OUTPUT_ROWS,), torch.int32, device)
        self.host_tokens: Any = self.tokens.numpy()  # an int32 array, used as a sequence of outputs
        self.tables = PinnedRing(_NUM_TABLES, spec.num_experts, device)
        self.graphs: dict[Key, Graph] = {}
        if self.staging is not None and self._uses_graphs:
            self.staging.capture()
        self._captured: set[int] = set()  # rows of whole passes
        has_draft = model.has_draft and not options.is_resident
        self._set_draft(self._make_draft(weights, cache) if has_draft else None)
        self._own_draft: ModelRunner | None = None

    # -- the engine's `Model` -----------------------------------------------------------------------

    def set_sampling(self, sampling: SamplingConfig) -> None:
        """How draft and target select tokens from here on. Raises SpecterError as `check_sampling`. Asynchronous."""
        check_sampling(sampling)
        self._sampling.set(sampling.seed, None if sampling.kind == "greedy" else sampling.temperature)

    def reset(self) -> None:
        """Drops slot tables that an interrupted pass has left unread. Synchronizes the device.

        KV stays: attention ends at a pass's own rows, and the rows before them were written by the same prompt.
        """
        self.tables.restart()
        if self.staging is not None:
            self.staging.restart()

    def begin_draft(self, token: int, position: int, choose: Choose) -> None:
        """See `Model`; the device chooses the tokens, not `choose`. Raises SpecterError if there is no draft."""
        if self._draft is None:
            raise SpecterError("this model has no draft", "load the INT4 experts")
        self._draft.begin(token, position)
        self._num_drafted = 0

    def draft_step(self) -> _DraftStep:
        if self._step is None:
            self._launch_step()
        else:
            self._step.replay()
        self._num_drafted += 1
        return _DraftStep(self._draft_tokens.numpy(), self._draft_routing.numpy(), self._num_drafted - 1)

    def target_pass(self, tokens: Sequence[int], position: int, num_outputs: int) -> TargetPass:
        """See `Model`. Nothing is launched yet; the pass before must have ended.
        Raises SpecterError: more rows, outputs or positions than fit, or a prompt across LongRoPE's switch."""
        num_rows = len(tokens)
        if position == 0:
            check_prompt(self._model.spec, self.target.cache.capacity, num_rows)
        num_launched = self.num_launched(num_rows, position, num_outputs)
        one = self._pass(self, self.graphs, num_rows, num_launched, num_outputs)
        self.target.place(num_launched, position, one.num_chosen)
        padding = [tokens[-1]] * (num_launched - num_rows)
        self.feed[:num_launched] = torch.tensor([*tokens, *padding], dtype=torch.int32)
        return one

    def crop(self, length: int) -> None:
        """Nothing to do: the entries after `length` are written again before they are read."""

    # -- graphs --------------------------------------------------------------------------------------

    def capture(self, row_counts: Iterable[int], *, predicts_next: bool = False) -> None:
        """Captures passes of these numbers of rows, and their `predict_next`, unless they are already. Writes KV."""
        for num_rows in sorted(set(row_counts)) if self._uses_graphs else ():
            one = self._pass(self, {}, num_rows, num_rows, num_rows)  # without graphs: what is captured
            parts = {(part, layer, num_rows): run for part, layer, run in one.parts(predicts_next=predicts_next)}
            if parts.keys() <= self.graphs.keys():
                continue
            self.target.place(num_rows, 0, num_rows)
            for key in [key for key in parts if key not in self.graphs]:
                self.graphs[key] = Graph(parts[key])
            self._captured.add(num_rows)
            # Warm-up reads slots that are still empty, and the padding rows of a pass read `results` unwritten.
            self.target.results.zero_()
            self.tables.restart()  # warm-up reads tables

    def num_launched(self, num_rows: int, position: int, num_outputs: int) -> int:
        """Rows that a pass of `num_rows` launches: those of the next longer captured pass, if it fits.

        Padding rows change no other row as long as they are finite (a tile of queries reads all keys and values of its
        rows, and zero times NaN is NaN). Their routing is not read, so their experts run only if a wave has them
        anyway; otherwise results of an earlier pass remain. Their KV is written again before it is read.
        """
        if self.options.is_resident or num_outputs != num_rows:
            return num_rows
        capacity = self.target.cache.capacity
        longer = [rows for rows in self._captured if rows >= num_rows and position + rows <= capacity]
        return min(longer, default=num_rows)

    # -- drafts --------------------------------------------------------------------------------------

    def own_draft(self) -> ModelRunner:
        """This runner with a draft on a copy of the non-expert weights and a KV cache of its own, made once.
        Raises SpecterError: they do not fit the budget."""
        if self._own_draft is None:
            self.own_memory = OwnMemory.allocate(self._model.weights, self.options.kv_capacity, self._budget)
            self._own_draft = copy.copy(self)
            self._own_draft._set_draft(self._make_draft(self.own_memory.weights, self.own_memory.cache))
        return self._own_draft

    def _make_draft(self, weights: GpuWeights, cache: GpuKVCache) -> Draft:
        options = self.options
        make: Callable[..., Draft] = ByExpertDraft if options.is_by_expert else Draft
        if not options.is_fused:
            spec = self._model.spec
            self._budget.check(spec.experts_params, "the unpacked INT4 codes of a draft without fused kernels")
            make = partial(UnfusedDraft, self._model.int4_layers())
        return make(weights, self._model.int4, cache, options.max_draft_len, sampling=self._sampling, pdl=self._pdl)

    def _set_draft(self, draft: Draft | None) -> None:
        """Allocates the pinned outputs of `draft`, and captures its step."""
        self._draft, self._num_drafted = draft, 0
        self._step: Graph | None = None
        if draft is None:
            return
        device = self._budget.device
        self._draft_tokens = pinned_zeros(tuple(draft.tokens.shape), torch.int32, device)
        self._draft_routing = pinned_zeros(tuple(draft.routing.shape), torch.int16, device)
        if self._uses_graphs:
            draft.begin(0, 0)
            self._step = Graph(self._launch_step)

    def _launch_step(self) -> None:
        assert self._draft is not None
        self._draft.step()
        # All steps so far, at every step: a view of one row would need the step's number on the host.
        copy_pinned(self._draft.tokens, self._draft_tokens)
        copy_pinned(self._draft.routing, self._draft_routing)

    # -- slots ---------------------------------------------------------------------------------------

    def _open_slots(self) -> tuple[Slots, Staging | None]:
        """The slots, and the staging area if they hold blobs."""
        options, model, budget = self.options, self._model, self._budget
        if not isinstance(model.store, BlobStore):
            return open_arena(options.num_slots, model.codec, budget), None
        slots = open_blob_slots(options.num_slots, options.slot_bytes, model.store, budget)
        return slots, Staging(
            options.num_staged, _NUM_TABLES, codec=model.codec, codes=model.int4, store=model.store, slots=slots,
            budget=budget,
        )  # fmt: skip

    def _fill_slots(self) -> Tensor:
        """The slot table of a resident pass, whose slots are filled here."""
        store = self._model.plain_store
        assert isinstance(self.arena, DeviceArena)
        return self.arena.fill(store, self._model.spec.num_moe_layers)

    def poison(self) -> None:
        """Fills the slots with NaN unless all experts are resident: reading an expert that has not arrived shows."""
        if not self.options.is_resident:
            self.arena.flat.fill_(0xFF)
            if self.staging is not None:
                self.staging.poison()
            if self.arena.flat.is_cuda:  # copies run on another stream
                torch.cuda.synchronize(self.arena.flat.device)

    def link_bytes_per_s(self) -> int:
        """The rate of plain pinned copies, one expert after the other on the current stream; takes 0.03 to 0.3 s.
        Overwrites slots, but keeps their experts where all are resident."""
        store, num_slots = self._model.store, self.options.num_slots
        num_experts = self._model.spec.num_moe_layers * store.num_experts
        num_bytes = 0
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for index in range(-_NUM_WARMUP_COPIES, _NUM_LINK_COPIES):
            if index == 0:
                torch.cuda.synchronize()
                start.record()
                num_bytes = 0
            at = index % num_experts
            expert = ExpertId(*divmod(at, store.num_experts))
            self.move(expert, at if self.options.is_resident else at % num_slots)
            num_bytes += min(store.num_bytes_of(expert), self.arena.payload_bytes)
        end.record()
        end.synchronize()
        return round(num_bytes / float(start.elapsed_time(end)) * 1e3)
