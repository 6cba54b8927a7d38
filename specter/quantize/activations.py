"""What a target feeds its experts: a batched, teacher-forced pass over many sequences, one layer at a time.

Weights are read from the checkpoint layer by layer and dropped again, so a full-size model needs the room of
one layer plus the hidden states. Plain textbook form, fp32: calibration needs no fixed tile and no KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.model.checkpoint import Checkpoint
from specter.model.rope import rotary_table, rotate, softmax_scale
from specter.model.routing import top_k
from specter.model.spec import ModelSpec
from specter.quantize.layer import LayerExperts, LayerInputs, expert_output

SEQUENCES_AT_ONCE = 8  # bounds the memory of attention and of a wide dense layer
_LATENT_NORM_EPS = 1e-6  # the published model's, whatever rms_norm_eps says
Weight = Callable[[str], Tensor]  # a layer's weight by its name within the layer


def walk_moe_layers(
    checkpoint: Checkpoint, tokens: Tensor, device: torch.device | str = "cpu"
) -> Iterator[tuple[LayerExperts, LayerInputs]]:
    """Yields each MoE layer's experts and their inputs over `tokens`, int64 [sequences, length].

    Rows of the inputs are all tokens in order, [sequences * length, ...]. The pass goes on with the target's own,
    unquantised experts.
    """
    spec = checkpoint.spec
    embedding = checkpoint.tensor("model.embed_tokens.weight").to(device)
    states = list(F.embedding(tokens.to(device), embedding).split(SEQUENCES_AT_ONCE))
    del embedding
    for layer in range(spec.num_layers):

        def weight(name: str, layer: int = layer) -> Tensor:
            return checkpoint.tensor(f"model.layers.{layer}.{name}.weight").to(device)

        norm = weight("post_attention_layernorm")
        states = [x + attention for x, attention in zip(states, _attend_all(spec, weight, states), strict=True)]
        hidden = [F.rms_norm(x, (spec.hidden,), norm, spec.norm_eps) for x in states]
        if layer < spec.num_dense_layers:
            mlp = _mlp_weights(weight, "mlp")
            states = [x + _gated(h, mlp) for x, h in zip(states, hidden, strict=True)]
            continue
        rows = torch.cat([h.flatten(0, 1) for h in hidden])
        gains, routing = top_k(rows @ weight("mlp.gate").T, spec.top_k)
        gate_up, down = (w.to(device) for w in checkpoint.experts(layer - spec.num_dense_layers))
        gate, up = gate_up.split(spec.expert_inter, 1)
        experts, inputs = LayerExperts(gate, up, down), LayerInputs(rows, routing)
        yield experts, inputs
        routed = _run_experts(experts, inputs, gains * spec.routed_scaling)
        shared = _mlp_weights(weight, "mlp.shared_experts")
        parts = routed.split([h.shape[0] * h.shape[1] for h in hidden])
        states = [x + _gated(h, shared) + part.view_as(x) for x, h, part in zip(states, hidden, parts, strict=True)]


def _attend_all(spec: ModelSpec, weight: Weight, states: list[Tensor]) -> Iterator[Tensor]:
    """Causal multi-head latent attention (arXiv 2405.04434, 2.1.2) of each batch of states [B, T, D]."""
    norm = weight("input_layernorm")
    q_proj, kv_a, o_proj = (weight(f"self_attn.{name}") for name in ("q_proj", "kv_a_proj_with_mqa", "o_proj"))
    kv_norm, kv_b = weight("self_attn.kv_a_layernorm"), weight("self_attn.kv_b_proj")
    cos, sin = (table.to(norm.device)[:, None] for table in rotary_table(spec, states[0].shape[1]))
    for x in states:
        h = F.rms_norm(x, (spec.hidden,), norm, spec.norm_eps)
        q_nope, q_pe = (h @ q_proj.T).unflatten(-1, (spec.num_heads, -1)).split((spec.nope_dim, spec.rope_dim), -1)
        latent, k_pe = (h @ kv_a.T).split((spec.kv_lora, spec.rope_dim), -1)
        kv = F.rms_norm(latent, (spec.kv_lora,), kv_norm, _LATENT_NORM_EPS) @ kv_b.T
        k_nope, v = kv.unflatten(-1, (spec.num_heads, -1)).split((spec.nope_dim, spec.v_dim), -1)
        k_pe = rotate(k_pe[:, :, None], cos, sin).expand(-1, -1, spec.num_heads, -1)
        q, k = torch.cat((q_nope, rotate(q_pe, cos, sin)), -1), torch.cat((k_nope, k_pe), -1)
        v = F.pad(v, (0, spec.qk_dim - spec.v_dim))  # the fast kernels want one head width
        context = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=softmax_scale(spec)
        )
        yield context[..., : spec.v_dim].transpose(1, 2).flatten(2) @ o_proj.T


def _mlp_weights(weight: Weight, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
    return weight(f"{prefix}.gate_proj"), weight(f"{prefix}.up_proj"), weight(f"{prefix}.down_proj")


def _gated(h: Tensor, mlp: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    gate, up, down = mlp
    return (F.silu(h @ gate.T) * (h @ up.T)) @ down.T


def _run_experts(experts: LayerExperts, inputs: LayerInputs, gains: Tensor) -> Tensor:
    """The routed experts' weighted sum, [tokens, D]."""
    total = torch.zeros_like(inputs.hidden)
    gains = torch.zeros(len(gains), len(experts.gate), device=gains.device).scatter(1, inputs.routing, gains)
    for expert, rows in enumerate(inputs.visits(len(experts.gate))):
        _, out = expert_output(experts, expert, inputs.hidden[rows])
        total.index_add_(0, rows, out * gains[rows, expert, None])
    return total
