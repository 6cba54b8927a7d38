"""A DeepSeek-V2 network for training: weights stacked over layers, routed experts as one tensor per layer.

Same function as transformers' DeepseekV2ForCausalLM (checked in tests/standin), written so that a whole training
step is a few hundred kernels of static shape: it fits one CUDA graph and is not launch-bound.

Dims: B sequences of T tokens, D hidden, F expert intermediate, E experts, L layers, V vocabulary (docs/structure.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.model.rope import rotary_table, rotate, softmax_scale
from specter.model.spec import ModelSpec

Weights = dict[str, Tensor]  # fp32, stacked over the layers that have them: [L or L_dense or L_moe, ...]
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

ATTENTION = ("attn_norm", "q", "kv_a", "kv_norm", "kv_b", "o", "mlp_norm")
DENSE = ("dense_gate", "dense_up", "dense_down")
MOE = ("router", "shared_gate", "shared_up", "shared_down", "gate_up", "down")
ROUTED = ("gate_up", "down")  # what the draft keeps in INT4


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every stacked weight."""
    layers, dense, moe, dim = spec.num_layers, spec.num_dense_layers, spec.num_moe_layers, spec.hidden
    return {
        "embed": (spec.vocab, dim),
        "norm": (dim,),
        "head": (spec.vocab, dim),
        "attn_norm": (layers, dim),
        "q": (layers, spec.num_heads * spec.qk_dim, dim),
        "kv_a": (layers, spec.kv_lora + spec.rope_dim, dim),
        "kv_norm": (layers, spec.kv_lora),
        "kv_b": (layers, spec.num_heads * (spec.nope_dim + spec.v_dim), spec.kv_lora),
        "o": (layers, dim, spec.num_heads * spec.v_dim),
        "mlp_norm": (layers, dim),
        "dense_gate": (dense, spec.dense_inter, dim),
        "dense_up": (dense, spec.dense_inter, dim),
        "dense_down": (dense, dim, spec.dense_inter),
        "router": (moe, spec.num_experts, dim),
        "shared_gate": (moe, spec.shared_inter, dim),
        "shared_up": (moe, spec.shared_inter, dim),
        "shared_down": (moe, dim, spec.shared_inter),
        "gate_up": (moe, spec.num_experts, 2 * spec.expert_inter, dim),
        "down": (moe, spec.num_experts, dim, spec.expert_inter),
    }


def init_weights(spec: ModelSpec, seed: int, device: str = "cpu") -> Weights:
    """Random fp32 weights; whatever writes to the residual stream starts small (1 / sqrt(2 L))."""
    generator = torch.Generator(device=device).manual_seed(seed)
    weights: Weights = {}
    for name, shape in weight_shapes(spec).items():
        if "norm" in name:
            weights[name] = torch.ones(shape, device=device)
            continue
        std = {"embed": 0.5, "head": 0.04, "router": 0.06}.get(name, 0.7 / math.sqrt(shape[-1]))
        if name == "o" or name.endswith("down"):
            std /= math.sqrt(2 * spec.num_layers)
        weights[name] = torch.randn(shape, generator=generator, device=device) * std
    return weights


class MoeOutput(NamedTuple):
    """x [B, T, D] fp32; ids [B * T, k] of the chosen experts, unordered; balance: the load loss, 1 at best."""

    x: Tensor
    ids: Tensor
    balance: Tensor


class NetworkOutput(NamedTuple):
    """hidden [B, T, D] after the last norm; ids [L_moe, B * T, k]; balance: mean load loss of the MoE layers."""

    hidden: Tensor
    ids: Tensor
    balance: Tensor


def experts_dense(h: Tensor, gains: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """All experts for all tokens, the unselected ones weighted 0: E/k times the arithmetic, but three plain products.

    h [T, D]; gains, ids [T, k]; gate_up [E, 2F, D]; down [E, D, F]; returns [T, D].
    """
    num_experts, dim, inter = down.shape
    mix = torch.zeros(len(h), num_experts, dtype=h.dtype, device=h.device).scatter(1, ids, gains.to(h.dtype))
    both = (h @ gate_up.flatten(0, 1).T).view(-1, num_experts, 2, inter)
    act = F.silu(both[:, :, 0]) * both[:, :, 1] * mix[..., None]
    return act.flatten(1) @ down.transpose(1, 2).reshape(num_experts * inter, dim)


class _Permute(torch.autograd.Function):
    """Rows in a given order; the backward pass gathers too, where plain indexing would scatter with atomics."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def experts_grouped(h: Tensor, gains: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Only the selected experts: rows sorted by expert, two grouped products. Shapes as in `experts_dense`."""
    num_rows, top_k = ids.shape
    num_experts, dim, inter = down.shape
    ordered, order = ids.flatten().to(torch.uint8).sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    bounds = torch.arange(num_experts, device=h.device, dtype=torch.int32)
    ends = torch.searchsorted(ordered.int(), bounds, right=True, out_int32=True)
    rows = _Permute.apply(h[:, None].expand(num_rows, top_k, dim).reshape(-1, dim), order, inverse)
    both = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends)
    act = F.silu(both[:, :inter]) * both[:, inter:]
    out = _Permute.apply(F.grouped_mm(act, down.transpose(1, 2), offs=ends), inverse, order)
    return (out.view(num_rows, top_k, dim) * gains[..., None].to(out.dtype)).sum(1)


class Network:
    """The forward pass over working copies of the weights (matrices in the compute type, norms and routers fp32).

    Args:
        spec: the model.
        num_positions: T of every batch.
        experts: `experts_dense` or `experts_grouped`.
        compiled: fuse each kind of layer with torch.compile (one compilation serves all layers).
    """

    def __init__(
        self, spec: ModelSpec, num_positions: int, device: str, experts: Experts = experts_dense, compiled: bool = False
    ) -> None:
        self.spec = spec
        self._experts = experts
        cos, sin = rotary_table(spec, num_positions)
        self._cos, self._sin = cos.to(device), sin.to(device)
        wrap: Callable = torch.compile if compiled else lambda function: function
        self._dense_layer, self._moe_layer = wrap(self._run_dense_layer), wrap(self._run_moe_layer)
        self.head_loss, self.head_losses = wrap(self._run_head_loss), wrap(self._run_head_losses)

    def __call__(self, work: Weights, tokens: Tensor) -> NetworkOutput:
        """tokens int64 [B, T]; the norm before lm_head is applied."""
        # index_select, not F.embedding: its backward pass needs no host synchronisation, so it can be captured.
        x = work["embed"].index_select(0, tokens.flatten()).view(*tokens.shape, -1).float()
        attention = list(zip(*(work[name].unbind(0) for name in ATTENTION), strict=True))
        dense = list(zip(*(work[name].unbind(0) for name in DENSE), strict=True))
        moe = list(zip(*(work[name].unbind(0) for name in MOE), strict=True))
        routing, balance = [], []
        for layer in range(self.spec.num_layers):
            if layer < len(dense):
                x = self._dense_layer(x, attention[layer], dense[layer])
            else:
                out = self._moe_layer(x, attention[layer], moe[layer - len(dense)])
                x = out.x
                routing.append(out.ids)
                balance.append(out.balance)
        hidden = self._norm(x, work["norm"])
        return NetworkOutput(hidden, torch.stack(routing), torch.stack(balance).mean())

    def logits(self, work: Weights, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 logits [B, T, V] and routing [L_moe, B * T, k]."""
        out = self(work, tokens)
        return F.linear(out.hidden.to(work["head"].dtype), work["head"]).float(), out.ids

    def _run_head_loss(self, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden.to(head.dtype), head).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _run_head_losses(self, hidden: Tensor, noisy: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy of `hidden`, and the KL divergence of what `noisy` predicts from it (its own side fixed)."""
        log_probs = F.linear(hidden.to(head.dtype), head).float().log_softmax(-1)
        noisy_log_probs = F.linear(noisy.to(head.dtype), head).float().log_softmax(-1)
        cross_entropy = F.nll_loss(log_probs.flatten(0, 1), targets.flatten())
        fixed = log_probs.detach()
        return cross_entropy, (fixed.exp() * (fixed - noisy_log_probs)).sum(-1).mean()

    def _run_dense_layer(self, x: Tensor, attention: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> Tensor:
        x, h = self._attend(x, attention)
        return x + self._gated(h, *weights).float()

    def _run_moe_layer(self, x: Tensor, attention: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> MoeOutput:
        router, shared_gate, shared_up, shared_down, gate_up, down = weights
        x, h = self._attend(x, attention)
        rows = h.flatten(0, 1)
        probs = F.linear(rows.float(), router).softmax(-1)
        gains, ids = probs.topk(self.spec.top_k, dim=-1)
        with torch.no_grad():
            load = torch.zeros_like(probs).scatter(1, ids, 1.0).mean(0) / self.spec.top_k
        balance = self.spec.num_experts * (load * probs.mean(0)).sum()
        routed = self._experts(rows, gains * self.spec.routed_scaling, ids, gate_up, down).view_as(h)
        shared = self._gated(h, shared_gate, shared_up, shared_down)
        return MoeOutput(x + routed.float() + shared.float(), ids, balance)

    def _attend(self, x: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Adds attention to the residual x [B, T, D] fp32; returns it and its normed copy for the MLP."""
        attn_norm, q_proj, kv_a, kv_norm, kv_b, o_proj, mlp_norm = weights
        spec, dtype = self.spec, q_proj.dtype
        batch, length, _ = x.shape
        h = self._norm(x, attn_norm).to(dtype)
        q = F.linear(h, q_proj).view(batch, length, spec.num_heads, spec.qk_dim)
        q_nope, q_rope = q.split([spec.nope_dim, spec.rope_dim], dim=-1)
        latent, k_rope = F.linear(h, kv_a).split([spec.kv_lora, spec.rope_dim], dim=-1)
        kv = F.linear(self._norm(latent.float(), kv_norm).to(dtype), kv_b)
        k_nope, v = kv.view(batch, length, spec.num_heads, -1).split([spec.nope_dim, spec.v_dim], dim=-1)
        cos, sin = self._cos[:length, None], self._sin[:length, None]
        q_rope = rotate(q_rope.float(), cos, sin).to(dtype)
        k_rope = rotate(k_rope[:, :, None].float(), cos, sin).to(dtype).expand(-1, -1, spec.num_heads, -1)
        q = torch.cat((q_nope, q_rope), dim=-1).transpose(1, 2)
        k = torch.cat((k_nope, k_rope), dim=-1).transpose(1, 2)
        # Flash attention wants one head width: v is padded with zeros to that of q and k.
        v = F.pad(v, (0, spec.qk_dim - spec.v_dim)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=softmax_scale(spec))
        out = out[..., : spec.v_dim].transpose(1, 2).reshape(batch, length, -1)
        x = x + F.linear(out, o_proj).float()
        return x, self._norm(x, mlp_norm).to(dtype)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), gain, self.spec.norm_eps)

    @staticmethod
    def _gated(h: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)


def int4_step(weight: Tensor) -> Tensor:
    """Step of symmetric INT4 rounding with one group per row, [..., 1]: 16 levels, -8 … 7, span the row."""
    return (weight.abs().amax(-1, keepdim=True) / 7.5).clamp(min=1e-8)


def round_to_int4(weight: Tensor) -> Tensor:
    """Round-to-nearest INT4 and back, one group per row; the stand-ins' measuring draft."""
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
