"""DeepSeek-V2 (arXiv 2405.04434): latent attention, shared experts, YaRN."""

from __future__ import annotations

from typing import ClassVar

from specter.errors import SpecterError
from specter.models.families.base import FAMILIES, Config, Family, rope_settings
from specter.models.spec import ModelSpec

_GREEDY, _GROUPED = "greedy", "group_limited_greedy"
_BETAS, _MSCALES = ("beta_fast", "beta_slow"), ("mscale", "mscale_all_dim")  # optional, named so in `RopeSpec`
_ROPES: dict[str, tuple[str, ...]] = {
    "yarn": ("factor", *_BETAS, *_MSCALES, "original_max_position_embeddings"),
    "default": (),
}
_YARN_SUPPORTED = {"attention_factor": (None,), "truncate": (True,)}


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
    read_keys = frozenset({"n_shared_experts", "routed_scaling_factor", "n_group", "topk_group", "num_key_value_heads"})
    supported: ClassVar = {
        "q_lora_rank": (None,),
        "topk_method": (_GREEDY, _GROUPED),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax", None),
        "moe_layer_freq": (1, None),
    }
    ignored = frozenset(
        {"head_dim", "qk_head_dim", "pretraining_tp", "aux_loss_alpha", "seq_aux", "ep_size"}  # the first two follow
    )
    defaults: ClassVar = {"q_lora_rank": 1536, "max_position_embeddings": 2048}
    may_be_zero = frozenset({"num_kv_heads"})

    @staticmethod
    def read(config: Config, name: str) -> Config:
        grouped = config.get("topk_method") == _GROUPED
        if config.get("num_key_value_heads") not in (None, config["num_attention_heads"]):
            raise SpecterError(
                f"{name}: config.json has num_key_value_heads={config['num_key_value_heads']!r} beside latents",
                "it must be null or num_attention_heads: use the checkpoint's own config.json",
            )
        kind, scaling = rope_settings(config, name, _ROPES, 10000.0, _YARN_SUPPORTED)
        rope: Config = {"theta": scaling["rope_theta"]}
        if kind == "yarn":
            rope |= {
                "factor": float(scaling["factor"]),
                **{key: float(scaling[key]) for key in _BETAS if scaling.get(key)},
                **_mscales(scaling, name),
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
                **{key: getattr(spec.rope, key) for key in ("factor", *_BETAS, *_MSCALES)},
                "original_max_position_embeddings": spec.rope.original_max_positions,
            }
        return config


def _mscales(scaling: Config, name: str) -> Config:
    """YaRN's two factors. With one of them alone, the publisher's code and transformers' differ."""
    mscale, all_dim = (float(scaling.get(key) or 0.0) for key in _MSCALES)
    if mscale and all_dim:
        return {"mscale": mscale, "mscale_all_dim": all_dim}
    if all_dim or mscale not in (0.0, 1.0):
        raise SpecterError(
            f"{name}: config.json gives mscale={mscale} and mscale_all_dim={all_dim} for YaRN: not implemented",
            "it must give both, or neither (DeepSeek-V2-Lite)",
        )
    return {"mscale": 1.0, "mscale_all_dim": 0.0}
