"""A full-size model in memory: experts in the pinned store, all other weights on the device, and its loading."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from torch import Tensor

from specter.codecs.int4 import Int4Experts, Int4Matrices
from specter.codecs.residual.resident import layout_of
from specter.errors import SpecterError
from specter.experts.store import RawCodec
from specter.kernels.int4_moe import PackedExperts
from specter.models.checkpoint import Checkpoint
from specter.models.cuda.attention import check_served
from specter.models.cuda.blobs import BlobReport, BlobStore, Encoding, Stored, load_blobs
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.store import LoadReport, Pin, PinnedStore
from specter.models.cuda.weights import GpuWeights
from specter.models.inflation.inflated import GROUP, InflatedCheckpoint
from specter.models.spec import ModelSpec
from specter.quantize.gptq_format import check_draft_origin, read_directory
from specter.quantize.residual.directory import REPORT_FILE

DTYPE = torch.bfloat16
Int4Layer = tuple[Int4Matrices, Int4Matrices, Int4Matrices]  # gate, up, down [E, out, in]
_NUM_OPENERS = 3
_NUM_AHEAD = 8  # layers opened or being opened before they are filled


class ExpertSource(Protocol):
    """The part of `Checkpoint` and `InflatedCheckpoint` that loading uses."""

    spec: ModelSpec

    def experts(self, layer: int) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2F, D] and down [E, D, F] of one MoE layer, any float dtype, any device."""


def load_store(
    source: ExpertSource, codec: RawCodec, console: Console, pin: Pin = "require", store: PinnedStore | None = None
) -> tuple[PinnedStore, LoadReport]:
    """Loads every routed expert, layer by layer, with progress on `console`; fills `store`, or one made with `pin`.

    Several threads open memory ahead while payloads are computed and copied.
    Raises SpecterError: too little host memory, page-locking refused (see `PinnedStore`), or a damaged source.
    """
    spec = source.spec
    if store is None:
        store = PinnedStore(codec, spec.num_moe_layers, spec.num_experts, pin)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    ends = [time.perf_counter()]
    try:
        with _opened(store) as arenas, Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task("load experts", total=store.num_layers * store.layer_bytes)
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
    return store, LoadReport.of(store, ends)


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


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that is loaded once; runners share it."""

    spec: ModelSpec
    checkpoint: Checkpoint  # as on the disk: of this size, or a narrow stand-in
    codes: Int4Experts  # of `checkpoint`
    draft_origin: str  # see `check_draft_origin`
    source: Checkpoint | InflatedCheckpoint
    codec: RawCodec  # of the experts that kernels read
    store: PinnedStore | BlobStore
    load: LoadReport
    weights: GpuWeights
    int4: PackedExperts  # of no layer, if nothing reads them
    blobs: BlobReport | None = None  # of a `BlobStore`

    @property
    def plain_store(self) -> PinnedStore:
        """The store of 16-bit experts. Raises SpecterError: it holds blobs."""
        if not isinstance(self.store, PinnedStore):
            raise SpecterError("this needs the 16-bit experts in host memory", "load the model with codec=bf16")
        return self.store

    @property
    def has_draft(self) -> bool:
        return len(self.int4.down) > 0

    def int4_layer(self, layer: int) -> Int4Layer:
        """The codes of one MoE layer, at full size, on the device."""
        return _int4_layer(self.codes, self.source, layer, self.weights.device)

    def int4_layers(self) -> list[Int4Layer]:
        """The codes of every MoE layer, a byte each: twice the bytes of the packed experts."""
        return [self.int4_layer(layer) for layer in range(self.spec.num_moe_layers)]

    def first_layers(self, num_layers: int) -> LoadedModel:
        """The model cut after its first layers, over the same memory: real payloads, meaningless text."""
        spec = dataclasses.replace(self.spec, num_layers=num_layers)
        weights = dataclasses.replace(self.weights, spec=spec, layers=self.weights.layers[:num_layers])
        return dataclasses.replace(self, spec=spec, weights=weights)


def _int4_layer(
    codes: Int4Experts, source: Checkpoint | InflatedCheckpoint, layer: int, device: torch.device
) -> Int4Layer:
    if isinstance(source, InflatedCheckpoint):
        return source.int4(codes, layer)
    return codes.gate.layer(layer).to(device), codes.up.layer(layer).to(device), codes.down.layer(layer).to(device)


def load_model(
    checkpoint: Path,
    quantized: Path,
    spec: ModelSpec,
    budget: DeviceBudget,
    console: Console,
    *,
    pin: Pin = "require",
    with_draft: bool = True,
    residual: Path | None = None,
) -> LoadedModel:
    """Loads a checkpoint and its INT4 codes: experts to the host, everything else to the device.

    A checkpoint narrower than `spec` (a stand-in) is inflated on the way, codes included. Without `with_draft` the INT4
    experts stay off the device, which leaves room for more slots.

    Args:
        residual: the store then holds residual blobs: those of this directory if the checkpoint is of full size and the
            directory exists, or else encoded on the device. The INT4 experts are loaded in any case.

    Raises SpecterError: heads or a router that the kernels do not support; codes made from another checkpoint; or as
    the readers, the budget and the store.
    """
    check_served(spec)
    opened = Checkpoint.open(checkpoint)
    draft_origin = check_draft_origin(quantized, opened)
    codes = read_directory(quantized, opened.spec)
    codes.check_plain()
    is_full = opened.spec.hidden == spec.hidden
    source = opened if is_full else InflatedCheckpoint(opened, spec, "tiled", DTYPE, budget.device)
    if residual is not None:  # opened before anything large is loaded
        is_stored = is_full and (residual / REPORT_FILE).is_file()
        blobs = Stored.open(residual, spec, quantized) if is_stored else Encoding(source, budget.device)
    codec = RawCodec(DTYPE, spec.expert_inter, spec.hidden)
    budget.check(DTYPE.itemsize * spec.non_expert_params, "the weights that draft and target share")
    num_tokens = source.num_tokens if isinstance(source, InflatedCheckpoint) else None
    weights = GpuWeights.load(spec, source.tensor, budget.device, DTYPE, num_tokens)
    num_packed = spec.num_moe_layers if with_draft or residual is not None else 0
    packed_spec = dataclasses.replace(spec, num_layers=spec.num_dense_layers + num_packed)
    budget.check(packed_spec.experts_params // 2, "the INT4 experts")
    int4 = PackedExperts.empty(packed_spec, codes.gate.group if is_full else GROUP, budget.device)
    for layer in range(num_packed):
        int4.set_layer(layer, *_int4_layer(codes, source, layer, budget.device))
    store: PinnedStore | BlobStore
    report: BlobReport | None = None
    if residual is None:
        store, load = load_store(source, codec, console, pin)
    else:
        store = blob_store = BlobStore(layout_of(int4.layer(0)), spec.num_moe_layers, spec.num_experts, pin)
        load, report = load_blobs(blobs, int4, blob_store, console)
    torch.cuda.empty_cache()
    return LoadedModel(
        spec=spec, checkpoint=opened, codes=codes, draft_origin=draft_origin, source=source, codec=codec, store=store,
        load=load, weights=weights, int4=int4, blobs=report,
    )  # fmt: skip
