"""Configuration to objects, by explicit registries: the only place of the runtime that knows the baselines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from baselines.lru_next_gate import NextGate
from baselines.mixtral_offloading import OneStream, SwapTransfer
from baselines.on_demand import DropEviction
from baselines.specmoeoff import TwoModels, TwoPlansPlanner
from specter.config import OWN_INT4, SHARED, RunConfig
from specter.engine import Engine
from specter.errors import SpecterError
from specter.experts.cache import ExpertCache
from specter.experts.policies.eviction import Eviction, LruEviction, layer_quotas
from specter.experts.policies.planner import DeadlinePlanner, Foresight, Planner, ThreePhasePlanner
from specter.experts.policies.retain import RetainEviction
from specter.experts.residency import Residency
from specter.experts.transfer import Mover, SendBack, Transfer, move_nothing, open_nothing
from specter.memory import num_slots
from specter.models.base import Model
from specter.models.full_size import FULL_SIZE
from specter.models.hub_config import read_spec
from specter.models.spec import ExpertId
from specter.speculation.accept import Sampler
from specter.timeline.base import Timeline
from specter.timeline.costs import INT4_BITS, CostModel
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
    "deadline_cold": lambda residents_per_layer, payload_bytes: DeadlinePlanner(starts_cold=True),
    "deadline_joined": lambda residents_per_layer, payload_bytes: DeadlinePlanner(joins_before_verify=True),
    "two_plans": TwoPlansPlanner,
    "none": lambda residents_per_layer, payload_bytes: None,
}
FORESIGHTS: dict[str, Callable[[], Foresight | None]] = {
    "next_gate": NextGate,
    "next_gate_2": lambda: NextGate(num_guesses=2),
    "none": lambda: None,
}


def build_costs(config: RunConfig) -> CostModel:
    """Costs of the model charged: a full-size one, or the checkpoint `itself`. Raises SpecterError if unknown."""
    name = config.model.charged_as
    spec = read_spec(Path(config.model.checkpoint)) if name == "itself" else FULL_SIZE.get(name)
    if spec is None:
        raise SpecterError(f"model.charged_as={name!r} is unknown", f"use one of: {', '.join(FULL_SIZE)}, itself")
    draft_bits = INT4_BITS if config.system.draft == OWN_INT4 else None
    return CostModel(spec, config.tile_rows, config.kv_capacity, draft_shared_bits=draft_bits)


def build_model(config: RunConfig, model: Model, make_draft: Callable[[], Model]) -> Model:
    """The live model of a system: one model, which is target and draft, or that and a draft apart from it.

    Args:
        make_draft: makes a draft that shares neither non-expert weights nor KV with `model`.
    """
    return model if config.system.draft == SHARED else TwoModels(model, make_draft())


def build_engine(
    config: RunConfig,
    model: Model,
    sampler: Sampler,
    mover: Mover = move_nothing,
    timeline: Timeline | None = None,
    costs: CostModel | None = None,
    open_write_back: Callable[[int], SendBack] = open_nothing,
) -> Engine:
    """An engine with an empty cache (`resident`: a full one).

    Args:
        mover: copies payloads into the model's slots; a replay needs none.
        timeline: a fresh virtual one of `config.hardware` by default.
        costs: of the model that `config` charges for by default.
        open_write_back: makes the way back of a swapping system, with so many buffers on the host.
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
    if config.system.transfer == "swap":
        stream = OneStream(timeline)
        write_back = open_write_back(config.system.num_buffers)
        transfer, timeline = SwapTransfer(stream, timeline, costs.payload_bytes, mover, write_back), stream
    eviction = EVICTIONS[config.system.eviction](quotas, spec.num_experts, config.system.num_staging)
    cache = ExpertCache(Residency(slots), eviction, transfer, timeline)
    if config.system.eviction == "resident":
        cache.place([ExpertId(m, e) for m in range(spec.num_moe_layers) for e in range(spec.num_experts)])
    planner = PLANNERS[config.system.planner](quotas, costs.payload_bytes)
    foresight = FORESIGHTS[config.system.foresight]()
    owns_draft = config.system.draft != SHARED
    return Engine(model, sampler, cache, timeline, costs, planner, config.depth, foresight, owns_draft)


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
