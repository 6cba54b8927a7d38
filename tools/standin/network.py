"""A training network of any family: weights stacked over layers, routed experts as one tensor per layer.

A training step is a few hundred kernels of static shape, which fit one CUDA graph.

Dims: B sequences of T tokens, D hidden, F expert intermediate, E experts, L layers, V vocabulary (docs/structure.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.models.elementwise import norm
from specter.models.names import expected_shapes
from specter.models.rope import rotary_table
from specter.models.routing import sparsemixer
from specter.models.spec import ModelSpec
from tools.standin.attention import causal_attention, gated

Weights = dict[str, Tensor]  # fp32, stacked over the layers that have them: [L or L_dense or L_moe, ...]
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

ROUTED = ("gate_up", "down")  # INT4 in the draft
NEAR_TIE = 0.2  # a lead below this share of the logit is nearly a tie (sparsemixer's mask ends at 0.02)


# Weight -> Specter's name (see specter/models/names.py), of the model or within a layer
MODEL = {
    "embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
    "norm_bias": "model.norm.bias", "head_bias": "lm_head.bias",
}  # fmt: skip
ATTENTION = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_norm": "self_attn.kv_a_layernorm.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in ("kv_b", "k", "v")},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkv"},
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "o_bias": "self_attn.o_proj.bias",
    "attn_norm_bias": "input_layernorm.bias",
    "mlp_norm_bias": "post_attention_layernorm.bias",
}
DENSE = {f"dense_{name}": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
MOE = {
    "router": "mlp.gate.weight",
    **{f"shared_{name}": f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")},
    "shared_sigmoid": "mlp.shared_expert_gate.weight",
    "gate_up": "mlp.experts.gate_up_proj",
    "down": "mlp.experts.down_proj",
}


def hub_names(spec: ModelSpec) -> dict[str, list[str]]:
    """The tensors of a checkpoint that each weight of a model stacks, by layer."""
    shapes = expected_shapes(spec, fused=True)
    names = {
        weight: [name for layer in range(spec.num_layers) if (name := f"model.layers.{layer}.{within}") in shapes]
        for weight, within in (ATTENTION | DENSE | MOE).items()
    }
    return {weight: [name] for weight, name in MODEL.items() if name in shapes} | {
        weight: layers for weight, layers in names.items() if layers
    }


def init_weights(spec: ModelSpec, seed: int, device: str = "cpu") -> Weights:
    """Random fp32 weights; matrices that write to the residual stream are scaled by 1 / sqrt(2 L)."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = expected_shapes(spec, fused=True)
    weights: Weights = {}
    for name, stacked in hub_names(spec).items():
        shape = shapes[stacked[0]] if name in MODEL else (len(stacked), *shapes[stacked[0]])
        if name.endswith("bias") or "norm" in name:
            weights[name] = torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device=device)
            continue
        std = {"embed": 0.5, "head": 0.04, "router": 0.06}.get(name, 0.7 / math.sqrt(shape[-1]))
        if name == "o" or name.endswith("down"):
            std /= math.sqrt(2 * spec.num_layers)
        weights[name] = torch.randn(shape, generator=generator, device=device) * std
    return weights


class Output(NamedTuple):
    """Of a MoE layer, or of the network (ids stacked over its MoE layers, balance their mean)."""

    x: Tensor  # [B, T, D] fp32; of the network after the last norm
    ids: Tensor  # [B * T, k] of the chosen experts, unordered
    balance: Tensor  # the load loss, 1 at best
    near_ties: Tensor  # `near_tie_loss` of its routers, 0 at best


def experts_dense(h: Tensor, gains: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """All experts for all tokens, unselected ones weighted 0: E/k times the arithmetic in three plain products.

    h [T, D]; gains, ids [T, k]; gate_up [E, 2F, D]; down [E, D, F]; returns [T, D].
    """
    num_experts, dim, inter = down.shape
    mix = torch.zeros(len(h), num_experts, dtype=h.dtype, device=h.device).scatter(1, ids, gains.to(h.dtype))
    both = (h @ gate_up.flatten(0, 1).T).view(-1, num_experts, 2, inter)
    act = F.silu(both[:, :, 0]) * both[:, :, 1] * mix[..., None]
    return act.flatten(1) @ down.transpose(1, 2).reshape(num_experts * inter, dim)


class _Permute(torch.autograd.Function):
    """Reorders rows; the backward pass gathers instead of scattering with atomics."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def _permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    permuted: Tensor = _Permute.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return permuted


def experts_grouped(h: Tensor, gains: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Selected experts only: rows sorted by expert, two grouped products. Shapes as in `experts_dense`."""
    num_rows, top_k = ids.shape
    num_experts, dim, inter = down.shape
    ordered, order = ids.flatten().to(torch.uint8).sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    bounds = torch.arange(num_experts, device=h.device, dtype=torch.int32)
    ends = torch.searchsorted(ordered.int(), bounds, right=True, out_int32=True)
    rows = _permute(h[:, None].expand(num_rows, top_k, dim).reshape(-1, dim), order, inverse)
    both = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
    act = F.silu(both[:, :inter]) * both[:, inter:]
    out: Tensor = _permute(F.grouped_mm(act, down.transpose(1, 2), offs=ends), inverse, order)
    return (out.view(num_rows, top_k, dim) * gains[..., None].to(out.dtype)).sum(1)


def train_route(spec: ModelSpec, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and ids [rows, k] as `route` returns them, differentiable.

    Sparsemixer's weight is exactly 1 if the mask leaves no other expert, which has no gradient: the gradient is that of
    its two softmaxes without the mask.
    """
    if spec.router == "sparsemixer":
        gains, ids = sparsemixer(logits, spec.router_jitter)
        first, second = ids.split(1, dim=1)
        others = logits.scatter(1, first, float("-inf"))
        soft = torch.cat((logits.softmax(-1).gather(1, first), others.softmax(-1).gather(1, second)), dim=1)
        return gains.detach() + soft - soft.detach(), ids
    gains, ids = logits.softmax(-1).topk(spec.top_k, dim=-1)
    if spec.norm_top_k:
        gains = gains / gains.sum(-1, keepdim=True)
    return gains * spec.routed_scaling, ids


def near_tie_loss(spec: ModelSpec, logits: Tensor) -> Tensor:
    """Mean share of `NEAR_TIE` by which sparsemixer's choices miss it as their lead over the next expert; 0 at best.

    A weight of sparsemixer jumps from 1 to about 1/2 where the next expert's logit comes within 2 * jitter of the
    chosen one's, relatively. An INT4 copy crosses such edges: they, and changed choices, are four fifths of the KL
    divergence of Phi's (docs/LOG.md). The loss moves logits [rows, E] away from them. Other routers have no edge: 0.
    """
    if spec.router != "sparsemixer":
        return logits.new_zeros(())
    best = logits.topk(3, dim=-1)[0]
    scale = best[:, :2].detach().abs().maximum(best[:, 1:].detach().abs())
    lead = (best[:, :2] - best[:, 1:]) / scale.clamp(min=1e-3)
    return (1 - lead / NEAR_TIE).clamp(min=0).mean()


class Network:
    """The forward pass over working copies of the weights (matrices in the compute type, norms and routers fp32).

    Args:
        num_positions: T of every batch.
        compiled: fuse each kind of layer with torch.compile (one compilation serves all layers).
    """

    def __init__(
        self, spec: ModelSpec, num_positions: int, device: str, experts: Experts = experts_dense, compiled: bool = False
    ) -> None:
        self.spec = spec
        self._experts = experts
        present = hub_names(spec)
        self._attention, self._dense, self._moe = (
            tuple(name for name in group if name in present) for group in (ATTENTION, DENSE, MOE)
        )
        cos, sin = rotary_table(spec, num_positions)
        self._cos, self._sin = cos.to(device), sin.to(device)
        wrap: Callable[[Any], Any] = torch.compile if compiled else lambda function: function
        self._dense_layer, self._moe_layer = wrap(self._run_dense_layer), wrap(self._run_moe_layer)
        self.head_loss, self.head_losses = wrap(self._run_head_loss), wrap(self._run_head_losses)

    def __call__(self, work: Weights, tokens: Tensor) -> Output:
        """tokens int64 [B, T]; the norm before lm_head is applied."""
        # The backward pass of index_select, unlike that of F.embedding, does not synchronise: it can be captured.
        x = work["embed"].index_select(0, tokens.flatten()).view(*tokens.shape, -1).float()
        attention, dense, moe = (_by_layer(work, names) for names in (self._attention, self._dense, self._moe))
        routing, balance, near_ties = [], [], []
        for layer in range(self.spec.num_layers):
            if layer < len(dense):
                x = self._dense_layer(x, attention[layer], dense[layer])
            else:
                x, ids, load, ties = self._moe_layer(x, attention[layer], moe[layer - len(dense)])
                routing.append(ids)
                balance.append(load)
                near_ties.append(ties)
        x = norm(self.spec, x, work["norm"], work.get("norm_bias"))
        return Output(x, torch.stack(routing), torch.stack(balance).mean(), torch.stack(near_ties).mean())

    def logits(self, work: Weights, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 logits [B, T, V] and routing [L_moe, B * T, k]."""
        out = self(work, tokens)
        return _head(out.x, work["head"], work.get("head_bias")), out.ids

    def _run_head_loss(self, hidden: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        return F.cross_entropy(_head(hidden, head, bias).flatten(0, 1), targets.flatten())

    def _run_head_losses(
        self, hidden: Tensor, noisy: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of `hidden`, and the KL divergence of `noisy` predictions from it (`hidden` detached)."""
        log_probs = _head(hidden, head, bias).log_softmax(-1)
        noisy_log_probs = _head(noisy, head, bias).log_softmax(-1)
        cross_entropy = F.nll_loss(log_probs.flatten(0, 1), targets.flatten())
        fixed = log_probs.detach()
        return cross_entropy, (fixed.exp() * (fixed - noisy_log_probs)).sum(-1).mean()

    def _run_dense_layer(self, x: Tensor, attention: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> Tensor:
        x, h = self._attend(x, attention)
        return x + gated(h, *weights).float()

    def _run_moe_layer(self, x: Tensor, attention: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> Output:
        named = dict(zip(self._moe, weights, strict=True))
        x, h = self._attend(x, attention)
        rows = h.flatten(0, 1)
        logits = F.linear(rows.float(), named["router"])
        probs = logits.softmax(-1)
        gains, ids = train_route(self.spec, logits)
        with torch.no_grad():
            load = torch.zeros_like(probs).scatter(1, ids, 1.0).mean(0) / self.spec.top_k
        balance = self.spec.num_experts * (load * probs.mean(0)).sum()
        x = x + self._experts(rows, gains, ids, named["gate_up"], named["down"]).view_as(h).float()
        if self.spec.shared_inter:
            shared = gated(h, named["shared_gate"], named["shared_up"], named["shared_down"])
            if self.spec.shared_gate:
                shared = shared * F.linear(h, named["shared_sigmoid"]).sigmoid()
            x = x + shared.float()
        return Output(x, ids, balance, near_tie_loss(self.spec, logits))

    def _attend(self, x: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Adds attention to the residual x [B, T, D] fp32; returns it and its normed copy for the MLP."""
        named = dict(zip(self._attention, weights, strict=True))
        h = norm(self.spec, x, named["attn_norm"], named.get("attn_norm_bias")).to(named["q"].dtype)
        x = x + causal_attention(self.spec, named, h, self._cos, self._sin).float()
        return x, norm(self.spec, x, named["mlp_norm"], named.get("mlp_norm_bias")).to(h.dtype)


def _head(hidden: Tensor, head: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(hidden.to(head.dtype), head, bias).float()


def _by_layer(work: Weights, names: Sequence[str]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(work[name].unbind(0) for name in names), strict=True))


def int4_step(weight: Tensor) -> Tensor:
    """Step of symmetric INT4 rounding with one group per row, [..., 1], levels -8 … 7."""
    return (weight.abs().amax(-1, keepdim=True) / 7.5).clamp(min=1e-8)


def round_to_int4(weight: Tensor) -> Tensor:
    """Round-to-nearest INT4 and back, one group per row."""
    step = int4_step(weight)
    return (weight / step).round().clamp(-8, 7) * step


def working_copy(weights: Weights, dtype: torch.dtype) -> Weights:
    """Weights in the compute type (norms and routers stay fp32), differentiable."""
    return {
        name: weight if "norm" in name or name == "router" else weight.to(dtype) for name, weight in weights.items()
    }


def noisy_experts(weights: Weights, dtype: torch.dtype) -> Weights:
    """The routed experts' weights with fresh uniform noise of one INT4 step, differentiable."""
    noisy: Weights = {}
    for name in ROUTED:
        with torch.no_grad():
            noise = (torch.rand_like(weights[name]) - 0.5) * int4_step(weights[name])
        noisy[name] = (weights[name] + noise).to(dtype)
    return noisy
