"""What a model *is*, in numbers: dimensions, routing and rotary settings.

A `ModelSpec` describes either the model whose numerics run (narrow or full size) or the
full-size model that the virtual clock charges for. It holds no tensors and needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specter.errors import SpecterError


class ExpertId(NamedTuple):
    """One routed expert. `layer` counts MoE layers from 0 (dense layers are not counted)."""

    layer: int
    expert: int


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding; `factor` 1 is plain RoPE, above 1 is YaRN (arXiv 2309.00071)."""

    theta: float = 10000.0
    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    original_max_positions: int = 4096


@dataclass(frozen=True)
class ModelSpec:
    """Dimensions of a DeepSeek-V2-family model (dims D, F, E, L, V as in docs/structure.md)."""

    name: str
    vocab: int  # V
    hidden: int  # D
    num_layers: int  # L, dense layers included
    num_dense_layers: int  # the first layers, without routed experts
    dense_inter: int
    expert_inter: int  # F
    num_experts: int  # E
    top_k: int
    shared_inter: int  # all shared experts together
    num_heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    kv_lora: int
    routed_scaling: float = 1.0
    norm_eps: float = 1e-6
    max_positions: int = 4096
    rope: RopeSpec = RopeSpec()

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert: gate and up [F, D] each, down [D, F]."""
        return 3 * self.hidden * self.expert_inter

    @property
    def attention_params(self) -> int:
        """Weights of one layer's attention (q, kv_a, kv_b, o)."""
        q = self.num_heads * self.qk_dim * self.hidden
        kv_a = (self.kv_lora + self.rope_dim) * self.hidden
        kv_b = self.num_heads * (self.nope_dim + self.v_dim) * self.kv_lora
        o = self.hidden * self.num_heads * self.v_dim
        return q + kv_a + kv_b + o

    @property
    def non_expert_params(self) -> int:
        """All weights that draft and target share (embedding, attention, dense, shared, router)."""
        moe = self.num_moe_layers * (3 * self.hidden * self.shared_inter + self.num_experts * self.hidden)
        dense = self.num_dense_layers * 3 * self.hidden * self.dense_inter
        return 2 * self.vocab * self.hidden + self.num_layers * self.attention_params + moe + dense

    @property
    def experts_params(self) -> int:
        return self.num_moe_layers * self.num_experts * self.expert_params

    # -- hub configuration ------------------------------------------------------------------

    @classmethod
    def from_config(cls, config: dict[str, Any], name: str) -> ModelSpec:
        """Reads a hub `config.json` of model_type deepseek_v2.

        Raises:
            SpecterError: another family, or a setting that this decoder does not implement.
        """
        if config.get("model_type") != "deepseek_v2":
            raise SpecterError(
                f"{name}: model_type {config.get('model_type')!r} is not supported",
                "use a DeepSeek-V2-Lite style checkpoint (model_type deepseek_v2)",
            )
        unsupported = {
            "q_lora_rank": (None,),
            "topk_method": ("greedy", None),
            "attention_bias": (False, None),
            "hidden_act": ("silu", None),
            "tie_word_embeddings": (False, None),
            "norm_topk_prob": (False, None),
            "scoring_func": ("softmax", None),
            "moe_layer_freq": (1, None),
        }
        for key, allowed in unsupported.items():
            if config.get(key) not in allowed:
                raise SpecterError(
                    f"{name}: config.json has {key}={config[key]!r}, which is not implemented",
                    f"use a checkpoint with {key} in {allowed} (DeepSeek-V2-Lite)",
                )
        try:
            scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
            kind = scaling.get("rope_type", scaling.get("type", "default"))
            if kind not in ("yarn", "default"):
                raise SpecterError(
                    f"{name}: rope type {kind!r} is not implemented", "use a checkpoint with YaRN or plain RoPE"
                )
            theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
            rope = RopeSpec(theta=float(theta))
            if kind == "yarn":
                rope = RopeSpec(
                    theta=float(theta),
                    factor=float(scaling["factor"]),
                    beta_fast=float(scaling.get("beta_fast", 32)),
                    beta_slow=float(scaling.get("beta_slow", 1)),
                    mscale=float(scaling.get("mscale", 1.0)),
                    mscale_all_dim=float(scaling.get("mscale_all_dim", 0.0)),
                    original_max_positions=int(scaling["original_max_position_embeddings"]),
                )
            spec = cls(
                name=name,
                vocab=config["vocab_size"],
                hidden=config["hidden_size"],
                num_layers=config["num_hidden_layers"],
                num_dense_layers=config["first_k_dense_replace"],
                dense_inter=config["intermediate_size"],
                expert_inter=config["moe_intermediate_size"],
                num_experts=config["n_routed_experts"],
                top_k=config["num_experts_per_tok"],
                shared_inter=config["n_shared_experts"] * config["moe_intermediate_size"],
                num_heads=config["num_attention_heads"],
                nope_dim=config["qk_nope_head_dim"],
                rope_dim=config["qk_rope_head_dim"],
                v_dim=config["v_head_dim"],
                kv_lora=config["kv_lora_rank"],
                routed_scaling=float(config.get("routed_scaling_factor", 1.0)),
                norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                max_positions=int(config.get("max_position_embeddings", 4096)),
                rope=rope,
            )
            spec._check_sizes()
            return spec
        except (TypeError, ValueError, AttributeError) as error:
            raise SpecterError(
                f"{name}: config.json has a value of the wrong type: {error}", "use the checkpoint's own config.json"
            ) from None
        except KeyError as missing:
            raise SpecterError(
                f"{name}: config.json lacks {missing}", "use the config.json that came with the checkpoint"
            ) from None

    def _check_sizes(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "num_dense_layers" else 1
            if field.type == "int" and (type(value) is not int or value < least):
                raise SpecterError(f"{self.name}: config.json gives {field.name} as {value!r}", "give a whole number")
        if not 1 <= self.top_k <= self.num_experts:
            raise SpecterError(
                f"{self.name}: config.json asks for {self.top_k} of {self.num_experts} experts",
                "num_experts_per_tok must be between 1 and n_routed_experts",
            )

    def to_config(self) -> dict[str, Any]:
        """The hub `config.json` of this spec; `from_config` reads it back unchanged."""
        config: dict[str, Any] = {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.num_layers,
            "first_k_dense_replace": self.num_dense_layers,
            "intermediate_size": self.dense_inter,
            "moe_intermediate_size": self.expert_inter,
            "n_routed_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "n_shared_experts": self.shared_inter // self.expert_inter,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.v_dim,
            "head_dim": self.rope_dim,
            "kv_lora_rank": self.kv_lora,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": self.routed_scaling,
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "rope_theta": self.rope.theta,
        }
        if self.rope.factor != 1.0:
            config["rope_scaling"] = {
                "rope_type": "yarn",
                "rope_theta": self.rope.theta,
                "factor": self.rope.factor,
                "beta_fast": self.rope.beta_fast,
                "beta_slow": self.rope.beta_slow,
                "mscale": self.rope.mscale,
                "mscale_all_dim": self.rope.mscale_all_dim,
                "original_max_position_embeddings": self.rope.original_max_positions,
            }
        return config

    def digest(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def read_spec(directory: Path) -> ModelSpec:
    """Reads the spec of a checkpoint directory from its `config.json`."""
    path = directory / "config.json"
    if not path.is_file():
        raise SpecterError(f"no config.json in {directory}", "give a checkpoint directory in hub format")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise SpecterError(f"{path} is not JSON: {error}", "get the checkpoint's config.json anew") from None
    if not isinstance(config, dict):
        raise SpecterError(f"{path} holds no JSON object", "get the checkpoint's config.json anew")
    return ModelSpec.from_config(config, name=directory.name)


# The published model. Source: config.json of deepseek-ai/DeepSeek-V2-Lite.
DEEPSEEK_V2_LITE = ModelSpec(
    name="DeepSeek-V2-Lite",
    vocab=102400,
    hidden=2048,
    num_layers=27,
    num_dense_layers=1,
    dense_inter=10944,
    expert_inter=1408,
    num_experts=64,
    top_k=6,
    shared_inter=2816,
    num_heads=16,
    nope_dim=128,
    rope_dim=64,
    v_dim=128,
    kv_lora=512,
    max_positions=163840,
    rope=RopeSpec(factor=40.0, mscale=0.707, mscale_all_dim=0.707, original_max_positions=4096),
)

# Its stand-in: same depth, experts, router, rope; narrow everywhere else, so that it ships and runs
# on a CPU. Every narrow width divides its full-size one a whole number of times (tiled inflation).
DEEPSEEK_V2_LITE_NARROW = dataclasses.replace(
    DEEPSEEK_V2_LITE,
    name="DeepSeek-V2-Lite-standin",
    vocab=8192,
    hidden=64,
    dense_inter=342,
    expert_inter=32,
    shared_inter=64,
    num_heads=4,
    nope_dim=32,
    v_dim=32,
    kv_lora=64,
    max_positions=4096,
)
