"""Device memory by part, and what a budget buys under each memory policy, worked out by hand for a small model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.plan import compose
from harness.scales import load_experiment
from specter.errors import SpecterError
from specter.memory import DoesNotFit, buy_slots, device_bytes, fit
from specter.resolve import resolve
from specter.timeline.payload import Slots
from tests.charges.runs import make_config
from tests.runtime.test_summary import BY_HAND, COSTS, MEMORY

NOTHING = dict.fromkeys(("draft", "draft_shared", "draft_kv", "buffer", "staging", "tail"), 0)
PARTS: dict[str, dict[str, int]] = {
    "lru": NOTHING,
    "specter": {**NOTHING, "draft": 594},
    "specmoeoff": {**NOTHING, "draft": 594, "draft_shared": 4732, "draft_kv": 2160},
    "specmoeoff_tuned": {**NOTHING, "draft": 594, "draft_shared": 1220, "draft_kv": 2160},  # 2366 weights at 4.125 bits
    "mixtral_offloading": {**NOTHING, "buffer": 4 * 192},
}


@pytest.mark.parametrize("system", PARTS)
def test_every_part_of_a_systems_device_memory(system: str) -> None:
    parts = device_bytes(COSTS, make_config(system, None).system, Slots(5, 192))
    assert parts == {"shared": 4732, "kv": 2160, "slot": 5 * 192, **PARTS[system]}


@pytest.mark.parametrize(("memory", "fits"), [(8638, True), (8637, False)])
def test_a_system_fits_a_device_that_holds_its_parts(memory: int, fits: bool) -> None:
    machine = replace(BY_HAND, device_memory_bytes=memory)
    found = fit(COSTS, make_config("specter", None).system, Slots(6, 192), machine)
    assert found == {**MEMORY, "fits_device": fits, "fits_without_offloading": False}


@pytest.mark.parametrize(("memory", "fits"), [(4732 + 2160 + 12 * 192, True), (4732 + 2160 + 12 * 192 - 1, False)])
def test_a_model_needs_no_offloading_where_all_its_experts_fit(memory: int, fits: bool) -> None:
    """For every system: plain decoding has no draft."""
    machine = replace(BY_HAND, device_memory_bytes=memory)
    assert fit(COSTS, make_config("specmoeoff", None).system, Slots(6, 192), machine)["fits_without_offloading"] is fits


def slots(system: str, **budget: Any) -> int:
    config = make_config(system, None)
    config.budget = replace(config.budget, **{"experts_per_layer": None} | budget)
    config.model = replace(
        config.model,
        residents={"high": 3, "low": 1.5},
        published={"specmoeoff": {"high": 2.5}, "mixtral_offloading": {"low": 1}},
        assumed={"specmoeoff": {"low": 2}},
    )
    return buy_slots(config.model, config.budget, config.system, COSTS).num


@pytest.mark.parametrize(
    ("system", "budget", "expected"),
    [
        # as many as Specter has
        ("specter", {"policy": "same_experts", "tier": "high"}, 6),
        ("specmoeoff", {"policy": "same_experts", "tier": "high"}, 6),
        ("lru", {"policy": "same_experts", "tier": "low"}, 3),
        ("lru", {"policy": "same_experts", "tier": "smallest"}, 2),
        ("lru", {"policy": "same_experts", "tier": "high", "num_bytes": 5 * 192 + 191}, 5),
        ("lru", {"policy": "same_experts", "tier": "high", "num_bytes": 13 * 192}, 12),  # one per expert is enough
        ("resident", {"policy": "same_experts", "tier": "smallest"}, 12),
        # what Specter's bytes leave: 594 of the draft are three slots
        ("specter", {"policy": "same_bytes", "tier": "high"}, 6),
        ("lru", {"policy": "same_bytes", "tier": "high"}, 9),
        ("on_demand", {"policy": "same_bytes", "tier": "low"}, 6),
        # 4 buffers of 192 bytes are 174 more than the draft: one slot less
        ("mixtral_offloading", {"policy": "same_bytes", "tier": "high"}, 5),
        # an own draft's 1220 + 2160 bytes are 18 slots, its 4732 + 2160 are 36
        ("specmoeoff_tuned", {"policy": "same_bytes", "tier": "high", "num_bytes": 25 * 192}, 7),
        ("specmoeoff", {"policy": "same_bytes", "tier": "high", "num_bytes": 40 * 192}, 4),
        # what the paper gives, or what is assumed, for this system and tier; as many as Specter for its variants
        ("specmoeoff", {"policy": "published", "tier": "high"}, 5),
        ("specmoeoff", {"policy": "published", "tier": "low"}, 4),
        ("specmoeoff_tuned", {"policy": "published", "tier": "high"}, 5),  # those of specmoeoff
        ("lru", {"policy": "published", "tier": "low"}, 2),  # those of mixtral_offloading
        ("specter", {"policy": "published", "tier": "high"}, 6),
        ("specter_deadline", {"policy": "published", "tier": "smallest"}, 2),
    ],
)
def test_slots_that_a_budget_buys(system: str, budget: dict[str, Any], expected: int) -> None:
    assert slots(system, **budget) == expected


@pytest.mark.parametrize("budget", [{"tier": "high"}, {"tier": "low", "experts_per_layer": 3}])
def test_residents_that_are_stated_nowhere_are_refused(budget: dict[str, Any]) -> None:
    with pytest.raises(SpecterError, match=r"no residents of mixtral_offloading(?s:.*)published.mixtral_offloading"):
        slots("lru", policy="published", **budget)


def test_every_model_states_the_residents_of_every_system_of_the_main_experiment() -> None:
    for path in Path("conf/model").glob("*.yaml"):
        for system in load_experiment("main").systems:
            for tier in ("high", "low"):
                resolve(
                    compose([f"model={path.stem}", f"system={system}", f"budget={tier}", "budget.policy=published"])
                )


def test_assumed_residents_follow_the_rules_that_the_published_ones_suggest() -> None:
    """Of SpecMoEOff the share of Specter's, of Mixtral-Offloading what equal bytes leave, rounded down."""
    published = compose(["model=deepseek_v2_lite"]).model
    for path in Path("conf/model").glob("*.yaml"):
        model = compose([f"model={path.stem}"]).model
        stated = {**model.published, **model.assumed}
        for tier in ("high", "low"):
            residents = model.residents[tier]
            share = published.published["specmoeoff"][tier] / published.residents[tier]
            assert stated["specmoeoff"][tier] == share * residents
            run = resolve(compose([f"model={path.stem}", "system=mixtral_offloading", f"budget={tier}"]))
            assert stated["mixtral_offloading"][tier] == run.num_slots // run.spec.num_moe_layers


@pytest.mark.parametrize(("model", "card"), [("deepseek_v2_lite", 24), ("qwen1_5_moe", 24), ("phi3_5_moe", 80)])
def test_the_card_that_all_residual_experts_fit(model: str, card: int) -> None:
    """In the stated GB, of which the budget uses all but half an expert per layer; 16-bit experts do not fit."""
    ours, residual, whole = (
        resolve(compose([f"model={model}", "budget=card", f"system={system}", *settings]))
        for system, *settings in (("specter",), ("lru_residual", "payload_bits=7.25"), ("resident",))
    )
    total, unit = int(ours.fit()["device_total_bytes"]), ours.costs.expert_bytes * ours.spec.num_moe_layers
    assert card * 1e9 - 0.5 * unit < total < card * 1e9 + 0.01 * unit
    assert residual.num_slots == residual.spec.num_moe_layers * residual.spec.num_experts > ours.num_slots
    assert int(residual.fit()["device_total_bytes"]) < card * 1e9 < int(whole.fit()["device_total_bytes"])


def test_experts_per_layer_are_rounded_to_whole_slots() -> None:
    config = make_config("lru", None)
    for stated, expected in ((2.7, 5), (2.8, 6), (1.0, 2)):
        config.budget.experts_per_layer = stated
        assert buy_slots(config.model, config.budget, config.system, COSTS).num == expected


def test_a_policy_that_leaves_fewer_than_two_slots_does_not_fit() -> None:
    with pytest.raises(DoesNotFit, match="specmoeoff does not fit: budget.policy=same_bytes leaves it 0 slots"):
        slots("specmoeoff", policy="same_bytes", tier="high")
    with pytest.raises(DoesNotFit, match="leaves it 1 slots"):
        slots("specmoeoff", policy="same_bytes", tier="high", num_bytes=37 * 192)
    assert slots("specmoeoff", policy="same_bytes", tier="high", num_bytes=38 * 192) == 2
    with pytest.raises(SpecterError, match=r"holds 1 experts of 192 bytes(?s:.*)num_bytes=384$"):
        slots("lru", policy="same_bytes", tier="high", num_bytes=383)
