"""Qwen2-MoE: plain heads with QKV biases, a shared expert behind a sigmoid gate."""

from __future__ import annotations

from typing import ClassVar

from specter.errors import SpecterError
from specter.models.families.base import FAMILIES, Config, Family, grouped_heads, rope_settings
from specter.models.spec import ModelSpec


@FAMILIES.register("qwen2_moe")
class Qwen2Moe(Family):
    architecture = "Qwen2MoeForCausalLM"
    published = "Qwen1.5-MoE-A2.7B"
    keys: ClassVar = {
        "expert_inter": "moe_intermediate_size",
        "num_experts": "num_experts",
        "shared_inter": "shared_expert_intermediate_size",
    }
    read_keys = Family.read_keys | {"intermediate_size", "mlp_only_layers", "layer_types"}
    supported: ClassVar = {
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "qkv_bias": (True, False),
        "norm_topk_prob": (False, True),
    }
    ignored = frozenset({"sliding_window", "max_window_layers"})  # read with use_sliding_window only
    defaults: ClassVar = {"num_key_value_heads": 16, "max_position_embeddings": 32768}
    from_hub = ((r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),)
    to_hub = ((r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),)

    @staticmethod
    def read(config: Config, name: str) -> Config:
        kinds = config.get("layer_types")
        if kinds is not None and kinds != ["full_attention"] * config["num_hidden_layers"]:
            raise SpecterError(
                f"{name}: config.json has layer_types={kinds!r:.60}, which is not implemented",
                "use a checkpoint with full attention in every layer (Qwen1.5-MoE-A2.7B)",
            )
        dense = sorted(config.get("mlp_only_layers") or [])
        if dense != list(range(len(dense))):
            raise SpecterError(
                f"{name}: config.json has dense layers {dense} between MoE layers, which is not implemented",
                "use a checkpoint whose first layers are the dense ones, or one without (Qwen1.5-MoE-A2.7B)",
            )
        _, scaling = rope_settings(config, name, {"default": ()}, 10000.0)
        return grouped_heads(config) | {
            "num_dense_layers": len(dense),
            "dense_inter": config["intermediate_size"] if dense else 0,
            "shared_gate": True,
            "qkv_bias": bool(config.get("qkv_bias", True)),
            "norm_top_k": bool(config.get("norm_topk_prob", False)),
            "rope": {"theta": scaling["rope_theta"]},
        }

    @staticmethod
    def write(spec: ModelSpec) -> Config:
        return {
            "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.rope_dim,
            "intermediate_size": spec.dense_inter or spec.shared_inter,
            "mlp_only_layers": list(range(spec.num_dense_layers)),
            "decoder_sparse_step": 1,
            "norm_topk_prob": spec.norm_top_k,
            "qkv_bias": spec.qkv_bias,
            "use_sliding_window": False,
        }
