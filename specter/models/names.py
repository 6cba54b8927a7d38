"""Names and shapes of a checkpoint's tensors.

Specter uses DeepSeek-V2's names for every family: `mlp.gate` is the router, `mlp.shared_experts` the shared expert,
`mlp.experts.N.{gate,up,down}_proj` a routed one. Files use the publisher's or transformers' names: `canonical` reads
both, `on_hub` writes the publisher's.
"""

from __future__ import annotations

import re

from specter.models.families.base import FAMILIES, Rules
from specter.models.spec import ModelSpec

PARTS = ("gate_proj", "up_proj", "down_proj")
Shape = tuple[int, ...]


def canonical(family: str, name: str) -> str:
    """Specter's name of a tensor in a file of this family."""
    return _rename(FAMILIES[family].from_hub, name)


def on_hub(family: str, name: str) -> str:
    """The name under which this family's publisher stores a tensor; `canonical` reads it back."""
    return _rename(FAMILIES[family].to_hub, name)


def expected_shapes(spec: ModelSpec, fused: bool = False) -> dict[str, Shape]:
    """Name and shape of every tensor of a checkpoint; routed experts separate, or `fused` per layer."""
    hidden, inter, num_experts = spec.hidden, spec.expert_inter, spec.num_experts
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (spec.vocab, hidden),
        **_norm("model.norm", spec),
        **({} if spec.tied else {"lm_head.weight": (spec.vocab, hidden)}),
        **({"lm_head.bias": (spec.vocab,)} if spec.head_bias else {}),
    }
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= _norm(f"{prefix}.input_layernorm", spec) | _norm(f"{prefix}.post_attention_layernorm", spec)
        shapes |= _attention(f"{prefix}.self_attn", spec)
        if layer < spec.num_dense_layers:
            shapes |= _mlp(f"{prefix}.mlp", hidden, spec.dense_inter)
            continue
        shapes[f"{prefix}.mlp.gate.weight"] = (num_experts, hidden)
        if spec.shared_inter:
            shapes |= _mlp(f"{prefix}.mlp.shared_experts", hidden, spec.shared_inter)
        if spec.shared_gate:
            shapes[f"{prefix}.mlp.shared_expert_gate.weight"] = (1, hidden)
        if fused:
            shapes[f"{prefix}.mlp.experts.gate_up_proj"] = (num_experts, 2 * inter, hidden)
            shapes[f"{prefix}.mlp.experts.down_proj"] = (num_experts, hidden, inter)
        else:
            for expert in range(num_experts):
                shapes |= _mlp(f"{prefix}.mlp.experts.{expert}", hidden, inter)
    return shapes


def mlp_names(spec: ModelSpec, layer: int) -> tuple[list[str], str | None]:
    """Names, within a layer, of the matrices that read its MLP's norm (routed experts aside), and of the down matrix.

    In order: router and gate of the shared expert (MoE layers only), gate, up.
    """
    is_dense = layer < spec.num_dense_layers
    mlp = "mlp" if is_dense else "mlp.shared_experts"
    router = [] if is_dense else ["mlp.gate.weight", *(["mlp.shared_expert_gate.weight"] if spec.shared_gate else [])]
    if not is_dense and not spec.shared_inter:
        return router, None
    gate, up, down = (f"{mlp}.{part}.weight" for part in PARTS)
    return [*router, gate, up], down


def _norm(name: str, spec: ModelSpec) -> dict[str, Shape]:
    return {f"{name}.{part}": (spec.hidden,) for part in (("weight", "bias") if spec.layer_norm else ("weight",))}


def _attention(prefix: str, spec: ModelSpec) -> dict[str, Shape]:
    hidden = spec.hidden
    num_q, num_o = spec.num_heads * spec.qk_dim, spec.num_heads * spec.v_dim
    shapes: dict[str, Shape] = {f"{prefix}.q_proj.weight": (num_q, hidden), f"{prefix}.o_proj.weight": (hidden, num_o)}
    if spec.is_latent:
        return shapes | {
            f"{prefix}.kv_a_proj_with_mqa.weight": (spec.kv_lora + spec.rope_dim, hidden),
            f"{prefix}.kv_a_layernorm.weight": (spec.kv_lora,),
            f"{prefix}.kv_b_proj.weight": (spec.num_heads * (spec.nope_dim + spec.v_dim), spec.kv_lora),
        }
    num_kv = spec.num_kv_heads * spec.rope_dim
    shapes |= {f"{prefix}.{name}_proj.weight": (num_kv, hidden) for name in "kv"}
    if spec.qkv_bias:
        shapes |= {f"{prefix}.{name}_proj.bias": shapes[f"{prefix}.{name}_proj.weight"][:1] for name in "qkv"}
    if spec.o_bias:
        shapes[f"{prefix}.o_proj.bias"] = (hidden,)
    return shapes


def _mlp(prefix: str, hidden: int, inter: int) -> dict[str, Shape]:
    gate, up, down = (f"{prefix}.{part}.weight" for part in PARTS)
    return {gate: (inter, hidden), up: (inter, hidden), down: (hidden, inter)}


def _rename(rules: Rules, name: str) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
