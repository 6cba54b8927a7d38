"""Device memory by part, and the slots that a budget buys a system under a memory policy (docs/decisions/0008)."""

from __future__ import annotations

import math
from dataclasses import replace

from specter.config import BudgetConfig, ModelConfig, SystemConfig
from specter.errors import SpecterError
from specter.speculation.drafts import DRAFTS
from specter.timeline.costs import CostModel
from specter.timeline.hardware import Hardware
from specter.timeline.payload import Blobs, Slots

MIN_SLOTS = 2  # one slot computes while the other is being filled
# device_<part>_bytes in metrics
PARTS = ("shared", "kv", "draft", "draft_shared", "draft_kv", "buffer", "staging", "tail", "slot")
# The system that budgets are stated for: Specter's INT4 draft shares weights and KV with the target.
_REFERENCE = SystemConfig(name="reference", speculative=True)
_RESIDENT = SystemConfig(name="resident", eviction="resident")


class DoesNotFit(SpecterError):
    """A memory policy leaves a system fewer than two slots; a workflow records this as a result."""


def fixed_bytes(costs: CostModel, system: SystemConfig) -> dict[str, int]:
    """Device bytes of a system by part, of the full-size model, before its slots.

    shared: the target's non-expert weights · kv: its KV cache · draft: the INT4 experts, which a codec that decodes
    needs without a draft, too · draft_shared, draft_kv: an own draft's copy of the non-expert weights, and its KV (or
    the copy of the target's) · buffer: spare buffers of a swapping system · staging: decoded experts.
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
        "draft": round(spec.experts_params * costs.int4_bits / 8) if system.speculative or costs.decodes else 0,
        "draft_shared": copy if owns else 0,
        "draft_kv": kv if owns or kind.copies_kv else 0,
        "buffer": system.num_buffers * costs.payload_bytes,
        "staging": costs.num_staged * costs.expert_bytes,
    }


def device_bytes(costs: CostModel, system: SystemConfig, slots: Slots) -> dict[str, int]:
    """All device bytes of a system, by the names in `PARTS`; tail: what blobs have beyond their slots."""
    return {**fixed_bytes(costs, system), "tail": slots.tail_bytes, "slot": slots.num * slots.num_bytes}


def fit(costs: CostModel, system: SystemConfig, slots: Slots, hardware: Hardware) -> dict[str, int | bool]:
    """Device bytes by part (`device_<part>_bytes`), and whether they fit; also whether the whole model would, in 16
    bits."""
    parts = device_bytes(costs, system, slots)
    total = sum(parts.values())
    plain = replace(costs, coded_bytes=None)
    all_slots = Slots(costs.spec.num_moe_layers * costs.spec.num_experts, costs.expert_bytes)
    whole = sum(device_bytes(plain, _RESIDENT, all_slots).values())
    return {
        **{f"device_{part}_bytes": parts[part] for part in PARTS},
        "device_total_bytes": total,
        "fits_device": total <= hardware.device_memory_bytes,
        "fits_without_offloading": whole <= hardware.device_memory_bytes,
    }


def buy_slots(
    model: ModelConfig, budget: BudgetConfig, system: SystemConfig, costs: CostModel, blobs: Blobs | None = None
) -> Slots:
    """Slots that the budget buys a system under `budget.policy`, at most one per expert.

    A budget is stated in 16-bit experts that *Specter* keeps. `same_experts` gives every system as many; `same_bytes`
    gives it what Specter's device bytes leave beside its own fixed ones; `published` gives the residents that
    conf/model states for this system and tier.

    Args:
        blobs: of a codec that decodes; None: 16-bit payloads.
    Raises:
        SpecterError: an unknown tier, a budget below two slots, or `published` where conf/model states no residents.
        DoesNotFit: the policy leaves this system fewer than two slots.
    """
    num_experts = costs.spec.num_moe_layers * costs.spec.num_experts
    if system.holds_all:
        return _slots_for(num_experts, costs, blobs)
    slots = _stated_slots(model, budget, costs)
    if budget.policy == "same_bytes":
        reference = fixed_bytes(replace(costs, coded_bytes=None), _REFERENCE)
        excess = sum(reference.values()) - sum(fixed_bytes(costs, system).values())
        if blobs is not None:
            bought = blobs.in_bytes(slots * costs.expert_bytes + excess)
            _check_fits(bought.num, budget, system)
            return bought
        slots += excess // costs.expert_bytes
    elif budget.policy == "published" and not spends_as_specter(system):
        slots = round(_published_residents(model, budget, system) * costs.spec.num_moe_layers)
    _check_fits(slots, budget, system)
    return _slots_for(min(slots, num_experts), costs, blobs)


def _slots_for(num: int, costs: CostModel, blobs: Blobs | None) -> Slots:
    return Slots(num, costs.expert_bytes) if blobs is None else blobs.for_experts(num)


def _check_fits(num_slots: int, budget: BudgetConfig, system: SystemConfig) -> None:
    if num_slots < MIN_SLOTS:
        raise DoesNotFit(
            f"{system.name} does not fit: budget.policy={budget.policy} leaves it {max(num_slots, 0)} slots",
            "give a larger budget, or budget.policy=same_experts",
        )


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
        slots = budget.num_bytes // costs.expert_bytes
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
            f"the budget holds {slots} experts of {costs.expert_bytes} bytes, fewer than {MIN_SLOTS} slots",
            f"give at least budget.num_bytes={MIN_SLOTS * costs.expert_bytes}",
        )
    return slots
