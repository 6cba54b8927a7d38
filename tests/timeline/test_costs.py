"""Costs: the published sizes come out, the parts add up, and waves, tiles and layers are charged as stated."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest

from specter.config import SystemConfig
from specter.errors import SpecterError
from specter.memory import device_bytes
from specter.models.full_size import FULL_SIZE
from specter.models.spec import ModelSpec
from specter.timeline.costs import CostModel
from specter.timeline.payload import Slots

DEEPSEEK_V2_LITE = FULL_SIZE["deepseek_v2_lite"]

COSTS = CostModel(DEEPSEEK_V2_LITE, tile_rows=48, kv_capacity=256)
MOE_LAYERS = range(DEEPSEEK_V2_LITE.num_dense_layers, DEEPSEEK_V2_LITE.num_layers)


def test_published_sizes() -> None:
    assert COSTS.payload_bytes == 17_301_504
    assert COSTS.draft_step().hbm_bytes == pytest.approx(2.2e9 + 0.70e9, rel=0.01)


every_model = pytest.mark.parametrize("spec", FULL_SIZE.values(), ids=FULL_SIZE.keys())


@pytest.mark.parametrize(
    ("name", "expert_mb", "experts_gb", "model_gb", "int4_gb"),
    [
        ("deepseek_v2_lite", 17.3, 28.8, 31.4, 7.4),
        ("qwen1_5_moe", 17.3, 24.9, 28.6, 6.4),
        ("phi3_5_moe", 157.3, 80.5, 83.7, 20.8),
    ],
)
def test_sizes_of_the_published_models(
    name: str, expert_mb: float, experts_gb: float, model_gb: float, int4_gb: float
) -> None:
    spec = FULL_SIZE[name]
    costs = CostModel(spec, tile_rows=16, kv_capacity=256)
    system = SystemConfig("specter", speculative=True, planner="three_phase", eviction="lru")
    parts = device_bytes(costs, system, Slots(spec.num_moe_layers * spec.num_experts, costs.payload_bytes))
    assert costs.payload_bytes / 1e6 == pytest.approx(expert_mb, abs=0.05)
    assert parts["slot"] / 1e9 == pytest.approx(experts_gb, abs=0.05)
    assert (parts["slot"] + parts["shared"]) / 1e9 == pytest.approx(model_gb, abs=0.05)
    assert parts["draft"] / 1e9 == pytest.approx(int4_gb, abs=0.05)


@every_model
def test_weights_are_read_once_and_all_of_them(spec: ModelSpec) -> None:
    """With one row and one position, a pass over no experts moves the non-expert weights but the embedding."""
    costs = CostModel(spec, tile_rows=1, kv_capacity=1)
    weights = 2 * (spec.non_expert_params - spec.vocab * spec.hidden)
    moved = costs.verification_bytes(num_experts=0, rows=1)
    assert weights < moved < weights * 1.005


@every_model
def test_flops_are_two_per_weight_and_row(spec: ModelSpec) -> None:
    costs = CostModel(spec, tile_rows=48, kv_capacity=1)
    passed = sum(costs.attend_and_route(layer).flops for layer in range(spec.num_layers)) + costs.head(1).flops
    assert passed == pytest.approx(2 * 48 * (spec.non_expert_params - spec.vocab * spec.hidden), rel=1e-3)
    assert costs.experts(3).flops == 2 * 48 * 3 * spec.expert_params


@pytest.mark.parametrize("rows", [1, 17, 48, 49])
def test_verification_is_the_sum_of_its_operations(rows: int) -> None:
    tiles = COSTS.num_tiles(rows)
    total = sum(COSTS.attend_and_route(layer, tiles).hbm_bytes for layer in range(DEEPSEEK_V2_LITE.num_layers))
    total += sum(COSTS.experts(11, tiles).hbm_bytes + COSTS.combine(tiles).hbm_bytes for _ in MOE_LAYERS)
    assert COSTS.verification_bytes(11 * len(MOE_LAYERS), rows) == total + COSTS.head(rows).hbm_bytes


def test_a_wave_more_costs_one_read_of_the_rows() -> None:
    whole, parts = COSTS.experts(10), [COSTS.experts(7), COSTS.experts(3)]
    assert sum(part.hbm_bytes for part in parts) - whole.hbm_bytes == 48 * 2048 * 2
    assert sum(part.flops for part in parts) == whole.flops


def test_rows_are_padded_to_tiles() -> None:
    assert [COSTS.num_tiles(rows) for rows in (1, 48, 49)] == [1, 1, 2]
    assert COSTS.head(1) == COSTS.head(48) != COSTS.head(49)
    assert COSTS.attend_and_route(5, tiles=2).flops == 2 * COSTS.attend_and_route(5).flops


def test_many_tiles_pad_each_expert_by_at_most_one_tile() -> None:
    """64 experts over 11 tiles: grouped rows 6 * 528 and 64 tiles of padding, not 64 * 528."""
    assert COSTS.experts(64, tiles=11).flops == 2 * DEEPSEEK_V2_LITE.expert_params * (6 * 528 + 64 * 48)


def test_attention_grows_with_the_capacity_alone() -> None:
    longer = dataclasses.replace(COSTS, kv_capacity=512)
    assert longer.attend_and_route(5).hbm_bytes - COSTS.attend_and_route(5).hbm_bytes == 256 * (512 + 64) * 2
    assert longer.attend_and_route(5).flops - COSTS.attend_and_route(5).flops == 2 * 48 * 16 * 256 * (512 + 64 + 512)


@pytest.mark.parametrize("num_dense", [0, 1, 3])
def test_the_cost_of_a_layer_does_not_depend_on_earlier_calls(num_dense: int) -> None:
    spec = dataclasses.replace(DEEPSEEK_V2_LITE, num_dense_layers=num_dense)
    shared = CostModel(spec, tile_rows=48, kv_capacity=256)
    for layer in reversed(range(6)):
        alone = CostModel(spec, tile_rows=48, kv_capacity=256).attend_and_route(layer)
        assert dataclasses.astuple(shared.attend_and_route(layer)) == dataclasses.astuple(alone)
    assert dataclasses.astuple(shared.attend_and_route(0)) != dataclasses.astuple(
        shared.attend_and_route(1)
    )  # layer 0 embeds


def test_a_draft_step_is_one_launch_of_many_kernels() -> None:
    assert COSTS.draft_step().launches == 1 < COSTS.draft_step().kernels
    assert COSTS.attend_and_route(1).launches == COSTS.attend_and_route(1).kernels > 1
    assert dataclasses.replace(COSTS, int4_bits=16).draft_step().hbm_bytes > COSTS.draft_step().hbm_bytes


@pytest.mark.parametrize("name", ["tile_rows", "kv_capacity", "weight_bytes", "int4_bits"])
def test_bad_settings(name: str) -> None:
    with pytest.raises(SpecterError, match=f"{name} is 0"):
        dataclasses.replace(COSTS, **cast(Any, {name: 0}))


@every_model
def test_a_draft_by_expert_has_two_kernels_per_chosen_expert(spec: ModelSpec) -> None:
    costs = CostModel(spec, tile_rows=16, kv_capacity=256)
    by_expert = dataclasses.replace(costs, draft_by_expert=True)
    fused, apart = costs.draft_step(), by_expert.draft_step()
    assert apart.kernels - fused.kernels == 2 * (spec.top_k - 1) * spec.num_moe_layers
    assert (apart.hbm_bytes, apart.flops, apart.launches) == (fused.hbm_bytes, fused.flops, fused.launches)
    assert by_expert.experts(3).kernels == costs.experts(3).kernels
