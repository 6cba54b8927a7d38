"""The stand-ins: the published models' depth, experts, router and rope, narrow everywhere else.

Every narrow width divides the full-size one, as tiled inflation requires. A narrow head has every fourth of the
rotary frequencies of the full-size head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from specter.models.full_size import FULL_SIZE
from specter.models.spec import ModelSpec


def _narrow(model: str, **widths: Any) -> ModelSpec:
    spec = FULL_SIZE[model]
    shared: dict[str, Any] = {"name": f"{spec.name}-standin", "vocab": 8192, "hidden": 64, "max_positions": 4096}
    return dataclasses.replace(spec, **shared | widths)


NARROW = {
    "deepseek_v2_lite": _narrow(
        "deepseek_v2_lite", dense_inter=342, expert_inter=32, shared_inter=64, num_heads=4, nope_dim=32, v_dim=32,
        kv_lora=64,
    ),
    "qwen1_5_moe": _narrow(
        "qwen1_5_moe", expert_inter=32, shared_inter=128, num_heads=2, num_kv_heads=2, rope_dim=32, v_dim=32
    ),
    "phi3_5_moe": _narrow(
        "phi3_5_moe", expert_inter=64, num_heads=4, num_kv_heads=2, rope_dim=32, v_dim=32,
        rope=dataclasses.replace(
            FULL_SIZE["phi3_5_moe"].rope, short_factors=(1.0,) * 16, long_factors=(1.0,) * 16
        ),
    ),
}  # fmt: skip
