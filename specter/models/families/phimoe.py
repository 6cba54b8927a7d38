"""PhiMoE: grouped heads with biases, LayerNorm, sparsemixer, LongRoPE."""

from __future__ import annotations

from typing import ClassVar

from specter.errors import SpecterError
from specter.models.families.base import FAMILIES, Config, Family, grouped_heads, rope_settings
from specter.models.spec import ModelSpec

_ROPES = {
    # factor and attention_factor have no effect beside short_mscale and long_mscale, which are required.
    "longrope": (
        *("short_factor", "long_factor", "short_mscale", "long_mscale", "original_max_position_embeddings"),
        *("factor", "attention_factor"),
    ),
    "default": (),
}


@FAMILIES.register("phimoe")
class Phimoe(Family):
    architecture = "PhimoeForCausalLM"
    published = "Phi-3.5-MoE"
    keys: ClassVar = {"expert_inter": "intermediate_size", "num_experts": "num_local_experts"}
    read_keys = Family.read_keys | {"sliding_window", "router_jitter_noise"}
    supported: ClassVar = {
        "num_experts_per_tok": (2,),  # sparsemixer has two masked softmaxes
        "attention_bias": (False, True),
        "lm_head_bias": (False, True),
    }
    ignored = frozenset({"input_jitter_noise", "hidden_dropout"})  # training only
    defaults: ClassVar = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
    from_hub = (
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.mlp\.router\.", ".mlp.gate."),
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
    )
    to_hub = (
        (r"\.mlp\.", ".block_sparse_moe."),
        (r"(\.experts\.\d+)\.gate_proj\.", r"\1.w1."),
        (r"(\.experts\.\d+)\.up_proj\.", r"\1.w3."),
        (r"(\.experts\.\d+)\.down_proj\.", r"\1.w2."),
    )

    @staticmethod
    def read(config: Config, name: str) -> Config:
        window = config.get("sliding_window")
        if window is not None and window < config["max_position_embeddings"]:
            raise SpecterError(
                f"{name}: config.json has sliding_window={window}, which is not implemented",
                "use a checkpoint that attends to all positions (Phi-3.5-MoE)",
            )
        kind, scaling = rope_settings(config, name, _ROPES, 1000000.0)
        rope: Config = {"theta": scaling["rope_theta"]}
        if kind == "longrope":
            heads = grouped_heads(config)
            rope |= {
                "short_factors": tuple(float(factor) for factor in scaling["short_factor"]),
                "long_factors": tuple(float(factor) for factor in scaling["long_factor"]),
                "short_mscale": float(scaling["short_mscale"]),
                "long_mscale": float(scaling["long_mscale"]),
                "original_max_positions": int(scaling["original_max_position_embeddings"]),
            }
            for key in ("short_factors", "long_factors"):
                if len(rope[key]) != heads["rope_dim"] // 2:
                    raise SpecterError(
                        f"{name}: config.json gives {len(rope[key])} {key.replace('_', ' ')} for heads of "
                        f"{heads['rope_dim']} channels",
                        f"it must give {heads['rope_dim'] // 2}: use the checkpoint's own config.json",
                    )
        return grouped_heads(config) | {
            "num_dense_layers": 0,
            "dense_inter": 0,
            "shared_inter": 0,
            "qkv_bias": bool(config.get("attention_bias", False)),
            "o_bias": bool(config.get("attention_bias", False)),
            "head_bias": bool(config.get("lm_head_bias", False)),
            "layer_norm": True,
            "router": "sparsemixer",
            "router_jitter": float(config.get("router_jitter_noise", 0.01)),
            "rope": rope,
        }

    @staticmethod
    def write(spec: ModelSpec) -> Config:
        config: Config = {
            "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.rope_dim,
            "attention_bias": spec.qkv_bias,
            "lm_head_bias": spec.head_bias,
            "router_jitter_noise": spec.router_jitter,
        }
        if spec.rope.short_factors:
            config["rope_scaling"] = {
                "rope_type": "longrope",
                "rope_theta": spec.rope.theta,
                "short_factor": list(spec.rope.short_factors),
                "long_factor": list(spec.rope.long_factors),
                "short_mscale": spec.rope.short_mscale,
                "long_mscale": spec.rope.long_mscale,
                "original_max_position_embeddings": spec.rope.original_max_positions,
            }
        return config
