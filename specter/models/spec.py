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
from specter.models.hub_config import config_of, fields_of


class ExpertId(NamedTuple):
    """One routed expert. `layer` counts MoE layers from 0 (dense layers are not counted)."""

    layer: int
    expert: int


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: plain, YaRN (arXiv 2309.00071) or LongRoPE (arXiv 2402.13753)."""

    theta: float = 10000.0
    factor: float = 1.0  # above 1: YaRN
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    original_max_positions: int = 4096
    short_factors: tuple[float, ...] = ()  # one per rotated pair: LongRoPE (docs/decisions/0010)
    long_factors: tuple[float, ...] = ()
    short_mscale: float = 1.0
    long_mscale: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """Dimensions of a model and the parts that tell its family apart (dims as in docs/structure.md).

    Attention is multi-head latent (`kv_lora` above 0: one latent and one rotary key per position, queries of
    `nope_dim` + `rope_dim`), or has `num_kv_heads` keys and values of `rope_dim` = `v_dim` channels, all rotated.
    """

    name: str
    vocab: int  # V
    hidden: int  # D
    num_layers: int  # L, dense layers included
    num_dense_layers: int  # the first layers, without routed experts
    dense_inter: int
    expert_inter: int  # F
    num_experts: int  # E
    top_k: int
    shared_inter: int  # all shared experts together; 0: none
    num_heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    kv_lora: int
    routed_scaling: float = 1.0
    norm_eps: float = 1e-6
    max_positions: int = 4096
    rope: RopeSpec = RopeSpec()
    family: str = "deepseek_v2"  # model_type of the hub
    num_kv_heads: int = 0  # 0: latents
    qkv_bias: bool = False
    o_bias: bool = False
    head_bias: bool = False
    layer_norm: bool = False  # LayerNorm with bias instead of RMSNorm
    shared_gate: bool = False  # the shared expert is weighted by a sigmoid
    norm_top_k: bool = False  # router weights are divided by their sum
    num_groups: int = 1  # experts are chosen from the `top_groups` best of so many groups
    top_groups: int = 1
    router_jitter: float = 0.0  # above 0: sparsemixer, which masks what is this much (twice, relative) below the best
    tied: bool = False  # lm_head is the embedding

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def is_latent(self) -> bool:
        return self.kv_lora > 0

    @property
    def num_key_heads(self) -> int:
        """Heads of keys in the KV cache; latents are one."""
        return 1 if self.is_latent else self.num_kv_heads

    @property
    def key_width(self) -> int:
        """Channels that a query is multiplied with; of latents, the absorbed query's."""
        return self.kv_lora + self.rope_dim if self.is_latent else self.rope_dim

    @property
    def value_width(self) -> int:
        return self.kv_lora if self.is_latent else self.v_dim

    @property
    def kv_width(self) -> int:
        """Numbers that the KV cache holds per position and layer."""
        return self.key_width if self.is_latent else self.num_kv_heads * (self.key_width + self.value_width)

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert: gate and up [F, D] each, down [D, F]."""
        return 3 * self.hidden * self.expert_inter

    @property
    def attention_params(self) -> int:
        """Weights of one layer's attention (q, kv_a, kv_b, o; or q, k, v, o), biases left out."""
        q = self.num_heads * self.qk_dim * self.hidden
        o = self.hidden * self.num_heads * self.v_dim
        if not self.is_latent:
            return q + self.hidden * self.kv_width + o
        kv_a = (self.kv_lora + self.rope_dim) * self.hidden
        kv_b = self.num_heads * (self.nope_dim + self.v_dim) * self.kv_lora
        return q + kv_a + kv_b + o

    @property
    def num_router_out(self) -> int:
        """Channels of one layer's router, with that of the shared expert's gate where there is one."""
        return self.num_experts + self.shared_gate

    @property
    def non_expert_params(self) -> int:
        """All weights that draft and target share (embedding, attention, dense, shared, router); no vectors."""
        moe = self.num_moe_layers * (3 * self.hidden * self.shared_inter + self.num_router_out * self.hidden)
        dense = self.num_dense_layers * 3 * self.hidden * self.dense_inter
        vocabulary = (1 if self.tied else 2) * self.vocab * self.hidden
        return vocabulary + self.num_layers * self.attention_params + moe + dense

    @property
    def experts_params(self) -> int:
        return self.num_moe_layers * self.num_experts * self.expert_params

    # -- hub configuration ------------------------------------------------------------------

    @classmethod
    def from_config(cls, config: dict[str, Any], name: str) -> ModelSpec:
        """Reads a hub `config.json` of one of the families in `specter.models.hub_config`.

        Raises:
            SpecterError: another family, or a setting that this decoder does not implement.
        """
        fields = fields_of(config, name)
        spec = cls(name=name, **fields | {"rope": RopeSpec(**fields["rope"])})
        spec._check_sizes()
        return spec

    def _check_sizes(self) -> None:
        latents = self.family == "deepseek_v2"
        may_be_zero = {"num_dense_layers"} | ({"num_kv_heads"} if latents else {"nope_dim", "kv_lora", "shared_inter"})
        may_be_zero |= set() if self.num_dense_layers else {"dense_inter"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in may_be_zero else 1
            if field.type == "int" and (type(value) is not int or value < least):
                raise SpecterError(f"{self.name}: config.json gives {field.name} as {value!r}", "give a whole number")
        if not 1 <= self.top_k <= self.num_experts:
            raise SpecterError(
                f"{self.name}: config.json asks for {self.top_k} of {self.num_experts} experts",
                "num_experts_per_tok must be between 1 and the number of routed experts",
            )
        group_size, rest = divmod(self.num_experts, self.num_groups)
        if rest or not self.top_groups <= self.num_groups or self.top_k > self.top_groups * group_size:
            raise SpecterError(
                f"{self.name}: {self.top_k} experts from {self.top_groups} of {self.num_groups} groups of "
                f"{self.num_experts} experts",
                "n_group must divide the experts, and topk_group groups must hold enough of them",
            )
        if not self.is_latent and (self.num_heads % self.num_kv_heads or self.rope_dim % 2):
            raise SpecterError(
                f"{self.name}: {self.num_heads} heads over {self.num_kv_heads} keys of {self.rope_dim} channels",
                "num_key_value_heads must divide num_attention_heads, and head_dim must be even",
            )

    def to_config(self) -> dict[str, Any]:
        """The hub `config.json` of this spec; `from_config` reads it back unchanged."""
        return config_of(self)

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

# Source: config.json of Qwen/Qwen1.5-MoE-A2.7B-Chat.
QWEN1_5_MOE = ModelSpec(
    name="Qwen1.5-MoE-A2.7B",
    family="qwen2_moe",
    vocab=151936,
    hidden=2048,
    num_layers=24,
    num_dense_layers=0,
    dense_inter=0,
    expert_inter=1408,
    num_experts=60,
    top_k=4,
    shared_inter=5632,
    shared_gate=True,
    num_heads=16,
    num_kv_heads=16,
    nope_dim=0,
    rope_dim=128,
    v_dim=128,
    kv_lora=0,
    qkv_bias=True,
    max_positions=8192,
    rope=RopeSpec(theta=1000000.0),
)

# Source: config.json of microsoft/Phi-3.5-MoE-instruct, whose 64 short and 64 long factors only its own file gives:
# ones here, so this spec is for sizes and stand-ins.
PHI3_5_MOE = ModelSpec(
    name="Phi-3.5-MoE",
    family="phimoe",
    vocab=32064,
    hidden=4096,
    num_layers=32,
    num_dense_layers=0,
    dense_inter=0,
    expert_inter=6400,
    num_experts=16,
    top_k=2,
    shared_inter=0,
    num_heads=32,
    num_kv_heads=8,
    nope_dim=0,
    rope_dim=128,
    v_dim=128,
    kv_lora=0,
    qkv_bias=True,
    o_bias=True,
    head_bias=True,
    layer_norm=True,
    norm_eps=1e-5,
    router_jitter=0.01,
    max_positions=131072,
    rope=RopeSpec(
        short_factors=(1.0,) * 64, long_factors=(1.0,) * 64, short_mscale=1.243163121016122,
        long_mscale=1.243163121016122,
    ),
)  # fmt: skip

FULL_SIZE = {"deepseek_v2_lite": DEEPSEEK_V2_LITE, "qwen1_5_moe": QWEN1_5_MOE, "phi3_5_moe": PHI3_5_MOE}

# Their stand-ins: same depth, experts, router, rope; narrow everywhere else, so that it ships and runs
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
# A narrow head turns by every fourth of the real head's frequencies.
QWEN1_5_MOE_NARROW = dataclasses.replace(
    QWEN1_5_MOE,
    name="Qwen1.5-MoE-A2.7B-standin",
    vocab=8192,
    hidden=64,
    expert_inter=32,
    shared_inter=128,
    num_heads=2,
    num_kv_heads=2,
    rope_dim=32,
    v_dim=32,
    max_positions=4096,
)
PHI3_5_MOE_NARROW = dataclasses.replace(
    PHI3_5_MOE,
    name="Phi-3.5-MoE-standin",
    vocab=8192,
    hidden=64,
    expert_inter=64,
    num_heads=4,
    num_kv_heads=2,
    rope_dim=32,
    v_dim=32,
    max_positions=4096,
    rope=dataclasses.replace(PHI3_5_MOE.rope, short_factors=(1.0,) * 16, long_factors=(1.0,) * 16),
)

NARROW = {
    "deepseek_v2_lite": DEEPSEEK_V2_LITE_NARROW,
    "qwen1_5_moe": QWEN1_5_MOE_NARROW,
    "phi3_5_moe": PHI3_5_MOE_NARROW,
}
