"""Device memory by part, and the slots that a budget buys a system under a memory policy (docs/decisions/0008)."""

from __future__ import annotations

import math

from specter.config import BudgetConfig, ModelConfig, SystemConfig
from specter.errors import SpecterError
from specter.speculation.drafts import DRAFTS
from specter.timeline.costs import CostModel
from specter.timeline.hardware import Hardware

MIN_SLOTS = 2  # one slot computes while the other is being filled
PARTS = ("shared", "kv", "draft", "draft_shared", "draft_kv", "buffer", "slot")  # device_<part>_bytes in metrics
# The system that budgets are stated for: Specter's INT4 draft shares weights and KV with the target.
_REFERENCE = SystemConfig(name="reference", speculative=True)
_RESIDENT = SystemConfig(name="resident", eviction="resident")


class DoesNotFit(SpecterError):
    """A memory policy leaves a system fewer than two slots; a workflow records this as a result."""


def fixed_bytes(costs: CostModel, system: SystemConfig) -> dict[str, int]:
    """Device bytes of a system by part, of the full-size model, before its slots.

    shared: the target's non-expert weights · kv: its KV cache · draft: the INT4 experts · draft_shared, draft_kv: an
    own draft's copy of the non-expert weights, and its KV · buffer: spare buffers of a swapping system.
    """
    spec = costs.spec
    shared = spec.non_expert_params * costs.weight_bytes
    kv = spec.num_layers * costs.kv_capacity * spec.kv_width * costs.weight_bytes
    kind = DRAFTS[system.draft]
    owns = system.speculative and kind.is_own
    copy = shared if kind.weight_bits is None else math.ceil(spec.non_expert_params * kind.weight_bits / 8)
    return {
        "shared": shared,
        "kv": kv,
        "draft": round(spec.experts_params * costs.int4_bits / 8) if system.speculative else 0,
        "draft_shared": copy if owns else 0,
        "draft_kv": kv if owns else 0,
        "buffer": system.num_buffers * costs.payload_bytes,
    }


def device_bytes(costs: CostModel, system: SystemConfig, num_slots: int) -> dict[str, int]:
    """All device bytes of a system, by the names in `PARTS`."""
    return {**fixed_bytes(costs, system), "slot": num_slots * costs.payload_bytes}


def fit(costs: CostModel, system: SystemConfig, num_slots: int, hardware: Hardware) -> dict[str, int | bool]:
    """Device bytes by part (`device_<part>_bytes`), and whether they fit; also whether the whole model would."""
    parts = device_bytes(costs, system, num_slots)
    total = sum(parts.values())
    whole = sum(device_bytes(costs, _RESIDENT, costs.spec.num_moe_layers * costs.spec.num_experts).values())
    return {
        **{f"device_{part}_bytes": parts[part] for part in PARTS},
        "device_total_bytes": total,
        "fits_device": total <= hardware.device_memory_bytes,
        "fits_without_offloading": whole <= hardware.device_memory_bytes,
    }


def num_slots(model: ModelConfig, budget: BudgetConfig, system: SystemConfig, costs: CostModel) -> int:
    """Slots that the budget buys a system under `budget.policy`, at most one per expert.

    A budget is stated in experts that *Specter* keeps. `same_experts` gives every system as many; `same_bytes` gives it
    what Specter's device bytes leave beside its own fixed ones; `published` gives the residents that conf/model states
    for this system and tier.

    Raises:
        SpecterError: an unknown tier, a budget below two slots, or `published` where conf/model states no residents.
        DoesNotFit: the policy leaves this system fewer than two slots.
    """
    num_experts = costs.spec.num_moe_layers * costs.spec.num_experts
    if system.holds_all:
        return num_experts
    slots = _stated_slots(model, budget, costs)
    if budget.policy == "same_bytes":
        excess = sum(fixed_bytes(costs, _REFERENCE).values()) - sum(fixed_bytes(costs, system).values())
        slots += excess // costs.payload_bytes
    elif budget.policy == "published" and not spends_as_specter(system):
        slots = round(_published_residents(model, budget, system) * costs.spec.num_moe_layers)
    if slots < MIN_SLOTS:
        raise DoesNotFit(
            f"{system.name} does not fit: budget.policy={budget.policy} leaves it {max(slots, 0)} slots",
            "give a larger budget, or budget.policy=same_experts",
        )
    return min(slots, num_experts)


def spends_as_specter(system: SystemConfig) -> bool:
    """Whether a system has Specter's fixed bytes, and so the budget itself under every policy."""
    return system.speculative and not DRAFTS[system.draft].is_own and system.num_buffers == 0


def _published_residents(model: ModelConfig, budget: BudgetConfig, system: SystemConfig) -> float:
    """Experts per MoE layer. Raises SpecterError if conf/model states none for this system and tier."""
    name = system.residents_of or system.name
    is_tier = budget.experts_per_layer is None and budget.num_bytes is None
    for stated in (model.published, model.assumed):
        if is_tier and budget.tier in stated.get(name, {}):
            return stated[name][budget.tier]
    tier = f"tier {budget.tier!r}" if is_tier else "a number"
    raise SpecterError(
        f"conf/model states no residents of {name} for {model.name} at budget {tier}, which budget.policy=published "
        "needs",
        f"state published.{name} or assumed.{name} there, or choose budget.policy=same_bytes or same_experts",
    )


def _stated_slots(model: ModelConfig, budget: BudgetConfig, costs: CostModel) -> int:
    """Slots of Specter itself."""
    residents = model.residents
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
            f"budget tier {budget.tier!r} is unknown for {model.name}",
            f"use one of {', '.join([*residents, 'smallest'])}, budget.experts_per_layer=... or budget.num_bytes=...",
        )
    if slots < MIN_SLOTS:
        raise SpecterError(
            f"the budget holds {slots} experts of {costs.payload_bytes} bytes, fewer than {MIN_SLOTS} slots",
            f"give at least budget.num_bytes={MIN_SLOTS * costs.payload_bytes}",
        )
    return slots
