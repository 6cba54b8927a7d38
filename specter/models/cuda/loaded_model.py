"""A full-size model in memory: experts in the pinned store, all other weights on the device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from specter.codecs.int4 import Int4Experts, Int4Matrices
from specter.experts.store import RawCodec
from specter.kernels.int4_moe import PackedExperts
from specter.models.checkpoint import Checkpoint
from specter.models.cuda.attention import check_served
from specter.models.cuda.loading import LoadReport, load_store
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.store import Pin, PinnedStore
from specter.models.cuda.weights import GpuWeights
from specter.models.inflation.inflated import GROUP, InflatedCheckpoint
from specter.models.spec import ModelSpec
from specter.quantize.gptq_format import check_draft_origin, read_directory

DTYPE = torch.bfloat16
Int4Layer = tuple[Int4Matrices, Int4Matrices, Int4Matrices]  # gate, up, down [E, out, in]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that is loaded once; runners share it."""

    spec: ModelSpec
    checkpoint: Checkpoint  # as on the disk: of this size, or a narrow stand-in
    codes: Int4Experts  # of `checkpoint`
    draft_origin: str  # see `check_draft_origin`
    source: Checkpoint | InflatedCheckpoint
    codec: RawCodec
    store: PinnedStore
    load: LoadReport
    weights: GpuWeights
    int4: PackedExperts  # of no layer, if nothing drafts

    @property
    def has_draft(self) -> bool:
        return len(self.int4.down) > 0

    def int4_layer(self, layer: int) -> Int4Layer:
        """The codes of one MoE layer, at full size, on the device."""
        return _int4_layer(self.source, self.codes, layer, self.weights.device)

    def int4_layers(self) -> list[Int4Layer]:
        """The codes of every MoE layer, a byte each: twice the bytes of the packed experts."""
        return [self.int4_layer(layer) for layer in range(self.spec.num_moe_layers)]

    def first_layers(self, num_layers: int) -> LoadedModel:
        """The model cut after its first layers, over the same memory: real payloads, shorter passes.

        Its text is meaningless, and its draft is rejected more often.
        """
        spec = dataclasses.replace(self.spec, num_layers=num_layers)
        weights = dataclasses.replace(self.weights, spec=spec, layers=self.weights.layers[:num_layers])
        return dataclasses.replace(self, spec=spec, weights=weights)


def load_model(
    checkpoint: Path,
    quantized: Path,
    spec: ModelSpec,
    budget: DeviceBudget,
    console: Console,
    *,
    pin: Pin = "require",
    with_draft: bool = True,
) -> LoadedModel:
    """Loads a checkpoint and its INT4 codes: experts to the host, everything else to the device.

    A checkpoint narrower than `spec` (a stand-in) is inflated on the way, codes included.

    Args:
        with_draft: put the INT4 experts on the device; without them there is room for more slots.
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
    codec = RawCodec(DTYPE, spec.expert_inter, spec.hidden)
    store, load = load_store(source, codec, console, pin)
    budget.check(DTYPE.itemsize * spec.non_expert_params, "the weights that draft and target share")
    num_tokens = source.num_tokens if isinstance(source, InflatedCheckpoint) else None
    weights = GpuWeights.load(spec, source.tensor, budget.device, DTYPE, num_tokens)
    num_packed = spec.num_moe_layers if with_draft else 0
    packed_spec = dataclasses.replace(spec, num_layers=spec.num_dense_layers + num_packed)
    budget.check(packed_spec.experts_params // 2, "the INT4 experts")
    int4 = PackedExperts.empty(packed_spec, codes.gate.group if is_full else GROUP, budget.device)
    for layer in range(num_packed):
        int4.set_layer(layer, *_int4_layer(source, codes, layer, budget.device))
    torch.cuda.empty_cache()
    return LoadedModel(
        spec=spec, checkpoint=opened, codes=codes, draft_origin=draft_origin, source=source, codec=codec, store=store,
        load=load, weights=weights, int4=int4,
    )  # fmt: skip


def _int4_layer(
    source: Checkpoint | InflatedCheckpoint, codes: Int4Experts, layer: int, device: torch.device
) -> Int4Layer:
    if isinstance(source, InflatedCheckpoint):
        return source.int4(codes, layer)

    def part(batch: Int4Matrices) -> Int4Matrices:
        codes, scales, zeros = (tensor[layer].to(device) for tensor in (batch.codes, batch.scales, batch.zeros))
        return Int4Matrices(codes, scales, zeros, batch.group)

    return part(codes.gate), part(codes.up), part(codes.down)
