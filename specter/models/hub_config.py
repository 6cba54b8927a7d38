"""Between a hub `config.json` and the fields of `ModelSpec`, one pair of functions per family.

A setting that the decoder does not implement is refused here, before any tensor is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specter.errors import SpecterError

if TYPE_CHECKING:
    from specter.models.spec import ModelSpec

Config = dict[str, Any]
_GREEDY, _GROUPED = "greedy", "group_limited_greedy"


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    read: Callable[[Config, str], Config]  # config, name -> fields of ModelSpec
    write: Callable[[ModelSpec], Config]  # what the families do not share
    published: str


def fields_of(config: Config, name: str) -> Config:
    """The fields of `ModelSpec` that a hub configuration means.

    Raises:
        SpecterError: another family, a missing key, or a setting that is not implemented.
    """
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        known = ", ".join(f"{kind} ({family.published})" for kind, family in FAMILIES.items())
        raise SpecterError(
            f"{name}: model_type {config.get('model_type')!r} is not supported", f"use a checkpoint of {known}"
        )
    allow(config, name, family.published, hidden_act=("silu", None))
    try:
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "an unknown method")
            raise SpecterError(
                f"{name}: the checkpoint is quantised already ({method})",
                f"use the 16-bit one ({family.published}); the draft is made from it by python -m specter.quantize",
            )
        return _shared_fields(config) | family.read(config, name)
    except (TypeError, ValueError, AttributeError) as error:
        raise SpecterError(
            f"{name}: config.json has a value of the wrong type: {error}", "use the checkpoint's own config.json"
        ) from None
    except KeyError as missing:
        raise SpecterError(
            f"{name}: config.json lacks {missing}", "use the config.json that came with the checkpoint"
        ) from None


def config_of(spec: ModelSpec) -> Config:
    """The hub configuration of a spec; `fields_of` reads it back unchanged."""
    family = FAMILIES[spec.family]
    shared = {
        "architectures": [family.architecture],
        "model_type": spec.family,
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.num_layers,
        "num_experts_per_tok": spec.top_k,
        "num_attention_heads": spec.num_heads,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_positions,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied,
        "rope_theta": spec.rope.theta,
    }
    return shared | family.write(spec)


def allow(config: Config, name: str, published: str, **allowed: tuple[Any, ...]) -> None:
    """Raises SpecterError for the first key whose value is none of those allowed (None: absent)."""
    for key, values in allowed.items():
        if config.get(key) not in values:
            raise SpecterError(
                f"{name}: config.json has {key}={config[key]!r}, which is not implemented",
                f"use a checkpoint with {key} in {values} ({published})",
            )


def _shared_fields(config: Config) -> Config:
    return {
        "family": config["model_type"],
        "vocab": config["vocab_size"],
        "hidden": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "top_k": config["num_experts_per_tok"],
        "num_heads": config["num_attention_heads"],
        "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "max_positions": int(config.get("max_position_embeddings", 4096)),
        "tied": bool(config.get("tie_word_embeddings", False)),
    }


def _rope(config: Config, name: str, kinds: tuple[str, ...], theta: float) -> tuple[str, Config]:
    """The kind of rotary embedding, and its settings, theta included."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in kinds:
        raise SpecterError(f"{name}: rope type {kind!r} is not implemented", f"use a checkpoint with {kinds}")
    chosen = scaling.get("rope_theta") or config.get("rope_theta") or theta
    return kind, {**scaling, "rope_theta": float(chosen)}


# -- DeepSeek-V2 ---------------------------------------------------------------------------------


def _read_deepseek(config: Config, name: str) -> Config:
    allow(
        config,
        name,
        "DeepSeek-V2-Lite",
        q_lora_rank=(None,),
        topk_method=(_GREEDY, _GROUPED, None),
        attention_bias=(False, None),
        norm_topk_prob=(False, None),
        scoring_func=("softmax", None),
        moe_layer_freq=(1, None),
    )
    grouped = config.get("topk_method") == _GROUPED
    kind, scaling = _rope(config, name, ("yarn", "default"), 10000.0)
    rope: Config = {"theta": scaling["rope_theta"]}
    if kind == "yarn":
        rope |= {
            "factor": float(scaling["factor"]),
            "beta_fast": float(scaling.get("beta_fast", 32)),
            "beta_slow": float(scaling.get("beta_slow", 1)),
            "mscale": float(scaling.get("mscale", 1.0)),
            "mscale_all_dim": float(scaling.get("mscale_all_dim", 0.0)),
            "original_max_positions": int(scaling["original_max_position_embeddings"]),
        }
    return {
        "num_dense_layers": config["first_k_dense_replace"],
        "dense_inter": config["intermediate_size"],
        "expert_inter": config["moe_intermediate_size"],
        "num_experts": config["n_routed_experts"],
        "shared_inter": config["n_shared_experts"] * config["moe_intermediate_size"],
        "nope_dim": config["qk_nope_head_dim"],
        "rope_dim": config["qk_rope_head_dim"],
        "v_dim": config["v_head_dim"],
        "kv_lora": config["kv_lora_rank"],
        "routed_scaling": float(config.get("routed_scaling_factor", 1.0)),
        "num_groups": config["n_group"] if grouped else 1,
        "top_groups": config["topk_group"] if grouped else 1,
        "rope": rope,
    }


def _write_deepseek(spec: ModelSpec) -> Config:
    config: Config = {
        "first_k_dense_replace": spec.num_dense_layers,
        "intermediate_size": spec.dense_inter,
        "moe_intermediate_size": spec.expert_inter,
        "n_routed_experts": spec.num_experts,
        "n_shared_experts": spec.shared_inter // spec.expert_inter,
        "num_key_value_heads": spec.num_heads,
        "qk_nope_head_dim": spec.nope_dim,
        "qk_rope_head_dim": spec.rope_dim,
        "v_head_dim": spec.v_dim,
        "head_dim": spec.rope_dim,
        "kv_lora_rank": spec.kv_lora,
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
            "factor": spec.rope.factor,
            "beta_fast": spec.rope.beta_fast,
            "beta_slow": spec.rope.beta_slow,
            "mscale": spec.rope.mscale,
            "mscale_all_dim": spec.rope.mscale_all_dim,
            "original_max_position_embeddings": spec.rope.original_max_positions,
        }
    return config


# -- Qwen2-MoE and PhiMoE: heads with keys and values of their own --------------------------------


def _grouped_heads(config: Config) -> Config:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    return {"nope_dim": 0, "rope_dim": head_dim, "v_dim": head_dim, "kv_lora": 0, "num_kv_heads": num_kv_heads}


def _read_qwen(config: Config, name: str) -> Config:
    allow(config, name, "Qwen1.5-MoE-A2.7B", use_sliding_window=(False, None), decoder_sparse_step=(1, None))
    dense = sorted(config.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))):
        raise SpecterError(
            f"{name}: config.json has dense layers {dense} between MoE layers, which is not implemented",
            "use a checkpoint whose first layers are the dense ones, or one without (Qwen1.5-MoE-A2.7B)",
        )
    _, scaling = _rope(config, name, ("default",), 10000.0)
    return _grouped_heads(config) | {
        "num_dense_layers": len(dense),
        "dense_inter": config["intermediate_size"] if dense else 0,
        "expert_inter": config["moe_intermediate_size"],
        "num_experts": config["num_experts"],
        "shared_inter": config["shared_expert_intermediate_size"],
        "shared_gate": True,
        "qkv_bias": bool(config.get("qkv_bias", True)),
        "norm_top_k": bool(config.get("norm_topk_prob", False)),
        "rope": {"theta": scaling["rope_theta"]},
    }


def _write_qwen(spec: ModelSpec) -> Config:
    return {
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.rope_dim,
        "intermediate_size": spec.dense_inter or spec.shared_inter,
        "moe_intermediate_size": spec.expert_inter,
        "shared_expert_intermediate_size": spec.shared_inter,
        "num_experts": spec.num_experts,
        "mlp_only_layers": list(range(spec.num_dense_layers)),
        "decoder_sparse_step": 1,
        "norm_topk_prob": spec.norm_top_k,
        "qkv_bias": spec.qkv_bias,
        "use_sliding_window": False,
    }


def _read_phi(config: Config, name: str) -> Config:
    allow(config, name, "Phi-3.5-MoE", num_experts_per_tok=(2,))  # sparsemixer's two masked softmaxes
    window = config.get("sliding_window")
    if window is not None and window < config["max_position_embeddings"]:
        raise SpecterError(
            f"{name}: config.json has sliding_window={window}, which is not implemented",
            "use a checkpoint that attends to all positions (Phi-3.5-MoE)",
        )
    kind, scaling = _rope(config, name, ("longrope", "default"), 1000000.0)
    rope: Config = {"theta": scaling["rope_theta"]}
    if kind == "longrope":
        heads = _grouped_heads(config)
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
    return _grouped_heads(config) | {
        "num_dense_layers": 0,
        "dense_inter": 0,
        "expert_inter": config["intermediate_size"],
        "num_experts": config["num_local_experts"],
        "shared_inter": 0,
        "qkv_bias": bool(config.get("attention_bias", False)),
        "o_bias": bool(config.get("attention_bias", False)),
        "head_bias": bool(config.get("lm_head_bias", False)),
        "layer_norm": True,
        "router_jitter": float(config.get("router_jitter_noise", 0.01)),
        "rope": rope,
    }


def _write_phi(spec: ModelSpec) -> Config:
    config: Config = {
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.rope_dim,
        "intermediate_size": spec.expert_inter,
        "num_local_experts": spec.num_experts,
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


FAMILIES = {
    "deepseek_v2": _Family("DeepseekV2ForCausalLM", _read_deepseek, _write_deepseek, "DeepSeek-V2-Lite"),
    "qwen2_moe": _Family("Qwen2MoeForCausalLM", _read_qwen, _write_qwen, "Qwen1.5-MoE-A2.7B"),
    "phimoe": _Family("PhimoeForCausalLM", _read_phi, _write_phi, "Phi-3.5-MoE"),
}
