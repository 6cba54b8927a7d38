from __future__ import annotations

import dataclasses

import pytest

from specter.models.spec import ModelSpec
from tools.standin.specs import NARROW


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    """Three MoE layers of four experts."""
    return dataclasses.replace(
        NARROW["deepseek_v2_lite"],
        name="tiny",
        vocab=64,
        hidden=32,
        num_layers=4,
        expert_inter=16,
        shared_inter=32,
        dense_inter=48,
        num_experts=4,
        top_k=2,
        num_heads=2,
        nope_dim=8,
        rope_dim=8,
        v_dim=8,
        kv_lora=16,
    )
