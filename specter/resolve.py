"""A run's configuration, costs and slots, resolved once and passed together. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from specter.codecs.residual.sizes import blob_words, raw_words
from specter.config import ModelConfig, RunConfig
from specter.errors import SpecterError
from specter.files import read_object
from specter.memory import buy_slots, fit
from specter.models.full_size import FULL_SIZE
from specter.models.hub_config import read_spec
from specter.models.spec import ExpertId, ModelSpec
from specter.speculation.drafts import DRAFTS
from specter.text.tokenizer import eos_ids
from specter.timeline.costs import CostModel
from specter.timeline.payload import Blobs, Slots


@dataclass(frozen=True)
class ResolvedRun:
    """A checked configuration, the costs of the model that it charges for, and the slots that its budget buys."""

    config: RunConfig
    costs: CostModel
    slots: Slots
    blobs: Blobs | None = None  # of a codec that decodes
    eos_ids: frozenset[int] = frozenset()  # of the checkpoint, whether or not they end the text

    @property
    def spec(self) -> ModelSpec:
        """The full-size model charged."""
        return self.costs.spec

    @property
    def num_slots(self) -> int:
        return self.slots.num

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end the text."""
        return frozenset() if self.config.ignore_eos else self.eos_ids

    @property
    def bits_per_weight(self) -> float:
        """Of a stored expert, in the mean."""
        mean_bytes = self.costs.expert_bytes if self.blobs is None else self.blobs.mean_bytes
        return 8 * mean_bytes / self.spec.expert_params

    @cached_property
    def link_bytes(self) -> Callable[[ExpertId], int]:
        """Returns the bytes of an expert's copy."""
        if self.blobs is None:
            num_bytes = self.costs.expert_bytes
            return lambda expert: num_bytes
        sizes, num_experts = self.blobs.link_bytes(self.slots.num_bytes), self.spec.num_experts
        return lambda expert: sizes[expert.layer * num_experts + expert.expert]

    def fit(self) -> dict[str, int | bool]:
        """Device bytes by part, and whether they fit; see `memory.fit`."""
        return fit(self.costs, self.config.system, self.slots, self.config.hardware)


def resolve(config: RunConfig, blobs: Blobs | None = None) -> ResolvedRun:
    """Resolves a checked configuration.

    Args:
        blobs: of the full-size model; by default as its residual directory or `payload_bits` states them.
    Raises:
        SpecterError: an unknown `charged_as` or budget tier, a budget below two slots, no residual directory, or no EOS
            to honour.
        DoesNotFit: the memory policy leaves this system fewer than two slots.
    """
    costs, eos = build_costs(config), _eos_ids(config)
    if not config.decodes:
        slots = buy_slots(config.model, config.budget, config.system, costs)
        return ResolvedRun(config, costs, slots, eos_ids=eos)
    blobs = blobs or read_blobs(config, costs.spec)
    costs = replace(costs, coded_bytes=round(blobs.mean_bytes))
    slots = buy_slots(config.model, config.budget, config.system, costs, blobs)
    link_bytes = blobs.link_bytes(slots.num_bytes)
    costs = replace(costs, coded_bytes=round(sum(link_bytes) / len(link_bytes)))
    return ResolvedRun(config, costs, slots, blobs, eos)


def _eos_ids(config: RunConfig) -> frozenset[int]:
    found = eos_ids(Path(config.model.checkpoint))
    if not config.ignore_eos and not found:
        raise SpecterError(
            f"ignore_eos=false, and neither config.json nor generation_config.json in {config.model.checkpoint} has an "
            "eos_token_id",
            "set ignore_eos=true, or add the checkpoint's generation_config.json",
        )
    return found


def build_costs(config: RunConfig) -> CostModel:
    """Costs of the model charged: a full-size one, or the checkpoint `itself`. Raises SpecterError if unknown."""
    name = config.model.charged_as
    spec = read_spec(Path(config.model.checkpoint)) if name == "itself" else FULL_SIZE.get(name)
    if spec is None:
        raise SpecterError(f"model.charged_as={name!r} is unknown", f"use one of: {', '.join(FULL_SIZE)}, itself")
    # The device runtime keeps an own draft's non-expert weights in 16 bits; a measured profile charges what it does.
    draft_bits = None if config.hardware.issue_ns else DRAFTS[config.system.draft].weight_bits
    return CostModel(
        spec, config.tile_rows, config.kv_capacity, draft_shared_bits=draft_bits,
        draft_by_expert=config.execution.by_expert,
        one_graph=config.system.holds_all and config.hardware.issue_ns > 0,
    )  # fmt: skip


def read_blobs(config: RunConfig, spec: ModelSpec) -> Blobs:
    """The sizes of all blobs at the size of `spec`, from the residual directory of a checkpoint that stands for it.

    Streams and patches grow with the number of weights, since inflation repeats the narrow ones.

    Raises:
        SpecterError: no residual directory, or one of a model with other layers or experts.
    """
    num_experts = spec.num_moe_layers * spec.num_experts
    if config.payload_bits is not None:
        return Blobs([round(config.payload_bits * spec.expert_params / 8)] * num_experts)
    report = read_report(Path(config.model.residual), config.model)
    shape = [report["shape"][name] for name in ("num_moe_layers", "num_experts")]
    if shape != [spec.num_moe_layers, spec.num_experts]:
        raise SpecterError(
            f"{config.model.residual} has {shape[0]} layers of {shape[1]} experts, {spec.name} has others",
            "encode the residual of this model",
        )
    narrow = 3 * report["shape"]["hidden"] * report["shape"]["expert_inter"]
    weights = [2 * spec.expert_params // 3, spec.expert_params // 3]
    words = [
        raw_words(weights)
        if parts is None
        else blob_words(weights, *(round(part * spec.expert_params / narrow) for part in parts))
        for layer in report["layers"]
        for parts in layer["experts"]
    ]
    return Blobs([4 * one for one in words])


def read_report(directory: Path, model: ModelConfig) -> dict[str, Any]:
    """What `residual.json` states. Raises SpecterError naming the command that makes it."""
    path = directory / "residual.json"
    remedy = (
        f"make it: python -m specter.quantize.residual encode checkpoint={model.checkpoint} "
        f"quantized={model.quantized} out={directory}"
    )
    if not path.exists():
        raise SpecterError(f"the residual model.residual={directory} does not exist", remedy)
    report = read_object(path, remedy)
    if any("experts" not in layer for layer in report.get("layers", [{}])):
        raise SpecterError(f"{path} is of an older version of this code", f"delete the directory and {remedy}")
    return report


def check_paths(config: RunConfig) -> None:
    """Raises SpecterError, before anything is loaded, for a path that does not exist."""
    for key, path in (("model.checkpoint", config.model.checkpoint), ("model.tokenizer", config.model.tokenizer)):
        if not Path(path).exists():
            raise SpecterError(
                f"{key}={path} does not exist", "run from the root of the repository, or correct the path"
            )
    if config.system.speculative and not Path(config.model.quantized).is_dir():
        raise SpecterError(
            f"the draft model.quantized={config.model.quantized} does not exist",
            f"make it: python -m specter.quantize checkpoint={config.model.checkpoint} out={config.model.quantized}",
        )
