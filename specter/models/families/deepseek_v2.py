"""DeepSeek-V2 (arXiv 2405.04434): latent attention, shared experts, YaRN."""

from __future__ import annotations

from typing import ClassVar

from specter.models.families.base import FAMILIES, Config, Family, rope_settings
from specter.models.spec import ModelSpec

_GREEDY, _GROUPED = "greedy", "group_limited_greedy"
_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # optional, under the same names in `RopeSpec`


@FAMILIES.register("deepseek_v2")
class DeepseekV2(Family):
    architecture = "DeepseekV2ForCausalLM"
    published = "DeepSeek-V2-Lite"
    keys: ClassVar = {
        "num_dense_layers": "first_k_dense_replace",
        "dense_inter": "intermediate_size",
        "expert_inter": "moe_intermediate_size",
        "num_experts": "n_routed_experts",
        "nope_dim": "qk_nope_head_dim",
        "rope_dim": "qk_rope_head_dim",
        "v_dim": "v_head_dim",
        "kv_lora": "kv_lora_rank",
    }
    supported: ClassVar = {
        "q_lora_rank": (None,),
        "topk_method": (_GREEDY, _GROUPED, None),
        "attention_bias": (False, None),
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax", None),
        "moe_layer_freq": (1, None),
    }
    may_be_zero = frozenset({"num_kv_heads"})

    @staticmethod
    def read(config: Config, name: str) -> Config:
        grouped = config.get("topk_method") == _GROUPED
        kind, scaling = rope_settings(config, name, ("yarn", "default"), 10000.0)
        rope: Config = {"theta": scaling["rope_theta"]}
        if kind == "yarn":
            rope |= {
                "factor": float(scaling["factor"]),
                **{key: float(scaling[key]) for key in _YARN if key in scaling},
                "original_max_positions": int(scaling["original_max_position_embeddings"]),
            }
        return {
            "shared_inter": config["n_shared_experts"] * config["moe_intermediate_size"],
            "routed_scaling": float(config.get("routed_scaling_factor", 1.0)),
            "num_groups": config["n_group"] if grouped else 1,
            "top_groups": config["topk_group"] if grouped else 1,
            "rope": rope,
        }

    @staticmethod
    def write(spec: ModelSpec) -> Config:
        config: Config = {
            "n_shared_experts": spec.shared_inter // spec.expert_inter,
            "num_key_value_heads": spec.num_heads,
            "head_dim": spec.rope_dim,
            "q_lora_rank": None,
            "topk_method": _GROUPED if spec.num_groups > 1 else _GREEDY,
            "norm_topk_prob": False,
            "routed_scaling_factor": spec.routed_scaling,
            "attention_bias": False,
        }
        if spec.num_groups > 1:
            config |= {"n_group": spec.num_groups, "topk_group": spec.top_groups}
        if spec.rope.factor != 1.0:
            config["rope_scaling"] = {
                "rope_type": "yarn",
                "rope_theta": spec.rope.theta,
                **{key: getattr(spec.rope, key) for key in ("factor", *_YARN)},
                "original_max_position_embeddings": spec.rope.original_max_positions,
            }
        return config
