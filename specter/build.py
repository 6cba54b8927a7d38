"""Configuration to objects, by explicit registries: the only place of the runtime that knows the baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from baselines.on_demand import DropEviction
from specter.config import RunConfig
from specter.engine import Engine
from specter.errors import SpecterError
from specter.experts.cache import ExpertCache
from specter.experts.eviction import Eviction, LruEviction, layer_quotas
from specter.experts.planner import DeadlinePlanner, Planner, ThreePhasePlanner
from specter.experts.residency import Residency
from specter.experts.retention import RetainEviction
from specter.experts.transfer import Mover, Transfer, move_nothing
from specter.metrics import device_bytes
from specter.model.base import Model
from specter.model.spec import FULL_SIZE, ExpertId, read_spec
from specter.speculation.accept import Sampler
from specter.timeline.base import Timeline
from specter.timeline.costs import CostModel
from specter.timeline.virtual import VirtualTimeline

# From slots per MoE layer, experts per layer, and staging slots.
EVICTIONS: dict[str, Callable[[Sequence[int], int, int], Eviction]] = {
    "lru": lambda quotas, num_experts, num_staging: LruEviction(quotas),
    "retain": RetainEviction,
    "resident": lambda quotas, num_experts, num_staging: LruEviction(quotas),
    "drop": lambda quotas, num_experts, num_staging: DropEviction(),
}
PLANNERS: dict[str, Callable[[Sequence[int], int], Planner | None]] = {
    "three_phase": ThreePhasePlanner,
    "deadline": lambda residents_per_layer, payload_bytes: DeadlinePlanner(),
    "none": lambda residents_per_layer, payload_bytes: None,
}

MIN_SLOTS = 2  # one slot computes while the other is being filled


def build_costs(config: RunConfig) -> CostModel:
    """Costs of the model charged: a full-size one, or the checkpoint `itself`. Raises SpecterError if unknown."""
    name = config.model.charged_as
    spec = read_spec(Path(config.model.checkpoint)) if name == "itself" else FULL_SIZE.get(name)
    if spec is None:
        raise SpecterError(f"model.charged_as={name!r} is unknown", f"use one of: {', '.join(FULL_SIZE)}, itself")
    return CostModel(spec, config.tile_rows, config.kv_capacity)


def num_slots(config: RunConfig, costs: CostModel) -> int:
    """Slots that the budget buys, at most one per expert.

    Raises:
        SpecterError: an unknown tier, or a budget below two slots.
    """
    num_experts = costs.spec.num_moe_layers * costs.spec.num_experts
    if config.system.eviction == "resident":
        return num_experts
    budget, residents = config.budget, config.model.residents
    if budget.num_bytes is not None:
        slots = budget.num_bytes // costs.payload_bytes
    elif budget.experts_per_layer is not None:
        slots = round(budget.experts_per_layer * costs.spec.num_moe_layers)
    elif budget.tier == "smallest":
        slots = MIN_SLOTS
    elif budget.tier in residents:
        slots = round(residents[budget.tier] * costs.spec.num_moe_layers)
    else:
        raise SpecterError(
            f"budget tier {budget.tier!r} is unknown for {config.model.name}",
            f"use one of {', '.join([*residents, 'smallest'])}, budget.experts_per_layer=... or budget.num_bytes=...",
        )
    if slots < MIN_SLOTS:
        raise SpecterError(
            f"the budget holds {slots} experts of {costs.payload_bytes} bytes, fewer than {MIN_SLOTS} slots",
            f"give at least budget.num_bytes={MIN_SLOTS * costs.payload_bytes}",
        )
    if config.system.takes_draft_bytes:
        slots += device_bytes(costs, 0, is_speculative=True)["draft_bytes"] // costs.payload_bytes
    return min(slots, num_experts)


def build_engine(
    config: RunConfig,
    model: Model,
    sampler: Sampler,
    mover: Mover = move_nothing,
    timeline: Timeline | None = None,
    costs: CostModel | None = None,
) -> Engine:
    """An engine with an empty cache (`resident`: a full one).

    Args:
        mover: copies payloads into the model's slots; a replay needs none.
        timeline: a fresh virtual one of `config.hardware` by default.
        costs: of the model that `config` charges for by default.
    """
    costs = costs or build_costs(config)
    spec = costs.spec
    if (model.num_layers, model.num_dense_layers, model.num_experts, model.top_k) != (
        spec.num_layers,
        spec.num_dense_layers,
        spec.num_experts,
        spec.top_k,
    ):
        raise SpecterError(
            f"{config.model.checkpoint} has other layers or experts than {spec.name}, which it is to be charged as",
            "set model.charged_as to the full-size model that this checkpoint stands for",
        )
    slots = num_slots(config, costs)
    quotas = layer_quotas(slots, spec.num_moe_layers)
    if timeline is None:
        timeline = VirtualTimeline(config.hardware, config.trace)
    transfer = Transfer(timeline, costs.payload_bytes, mover)
    eviction = EVICTIONS[config.system.eviction](quotas, spec.num_experts, config.system.num_staging)
    cache = ExpertCache(Residency(slots), eviction, transfer, timeline)
    if config.system.eviction == "resident":
        cache.place([ExpertId(m, e) for m in range(spec.num_moe_layers) for e in range(spec.num_experts)])
    planner = PLANNERS[config.system.planner](quotas, costs.payload_bytes)
    return Engine(model, sampler, cache, timeline, costs, planner, config.k if config.system.speculative else 0)


def check_paths(config: RunConfig) -> None:
    """Refuses before loading what cannot be read or written."""
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
