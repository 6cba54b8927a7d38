"""Routing agreement of low-bit copies of the experts with the original, teacher-forced over whole texts.

A draft is the target with other routed experts; all other weights are shared. As in a round of K = `window`, a draft
sees the target's keys and values before its window and its own within it. All drafts go through a layer together, so a
full-size model is read once, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specter.errors import SpecterError
from specter.models.layerwise import Heads, Source, TargetHead, TargetLayer, embed
from specter.quantize.activations import load_experts, run_experts
from specter.quantize.layer import LayerExperts

ROWS_AT_ONCE = 1024  # bounds the memory of the logits
# A draft's fp32 experts of one MoE layer from the target's.
DraftExperts = Callable[[int, LayerExperts], LayerExperts]


@dataclass(frozen=True, slots=True)
class Texts:
    """A batch of texts."""

    tokens: Tensor  # int64 [N, T], padded at the end with any token
    lengths: Tensor  # int64 [N]
    first: int  # position of the first draft step, after the prompt

    def is_real(self) -> Tensor:
        """Positions from `first` on that hold text, bool [N, T - first]."""
        return torch.arange(self.first, self.tokens.shape[1]) < self.lengths[:, None]


@dataclass(frozen=True, slots=True)
class Followed:
    """One model's outcome at every position from `first` on, P = T - first."""

    routing: Tensor  # int16 [N, P, MoE layers, k], in rank order
    choices: Tensor  # int64 [N, P], the most probable next token


@dataclass(frozen=True, slots=True)
class Study:
    target: Followed
    margins: Tensor  # fp32 [N, P, MoE layers]: the k-th router logit less the next one
    drafts: dict[str, Followed]


def window_mask(num_tokens: int, first: int, window: int) -> Tensor:
    """A draft's visible keys, bool [T, 2 T]: the target's (left) before its window, its own within it."""
    position = torch.arange(num_tokens)
    start = (first + (position - first).div(window, rounding_mode="floor") * window).clamp(min=0)
    start = start.where(position >= first, 0)  # the prompt is not drafted; its rows need any keys
    of_target = position < start[:, None]
    of_draft = (position >= start[:, None]) & (position <= position[:, None])
    return torch.cat((of_target, of_draft), 1)


def study(
    source: Source,
    drafts: Mapping[str, DraftExperts],
    texts: Texts,
    window: int,
    device: torch.device | str = "cpu",
    on_layer: Callable[[], None] = lambda: None,
) -> Study:
    """Runs the target and every draft over `texts`.

    Raises SpecterError: no text is longer than its prompt, or a text is longer than the model's positions.
    """
    spec, (num, length), first = source.spec, texts.tokens.shape, texts.first
    if not bool(texts.is_real().any()) or length > spec.max_positions:
        raise SpecterError(
            f"{num} texts of at most {length} tokens, drafted from position {first} on, for {spec.name}",
            f"give texts longer than {first} and of at most {spec.max_positions} tokens",
        )
    mask = window_mask(length, first, window).to(device)
    states = embed(source, texts.tokens, device)
    drafted = dict.fromkeys(drafts, states)
    routing: dict[str, list[Tensor]] = {name: [] for name in ("", *drafts)}  # "": the target
    margins = []
    for index in range(spec.num_layers):
        layer = TargetLayer(source, index, length, device)
        heads = [layer.heads(x) for x in states]
        drafted = {
            name: [_attend_window(layer, x, seen, mask) for x, seen in zip(mine, heads, strict=True)]
            for name, mine in drafted.items()
        }
        states = [layer.attend(x, seen) for x, seen in zip(states, heads, strict=True)]
        del heads
        if layer.is_dense:
            states = [layer.dense(x) for x in states]
            drafted = {name: [layer.dense(x) for x in mine] for name, mine in drafted.items()}
        else:
            moe_layer = index - spec.num_dense_layers
            experts = load_experts(source, moe_layer, device)
            states, chosen, logits = _moe(layer, experts, states, first)
            routing[""].append(chosen)
            best = logits.topk(spec.top_k + 1).values
            margins.append((best[..., -2] - best[..., -1]).cpu())
            for name, make in drafts.items():
                drafted[name], chosen, _ = _moe(layer, make(moe_layer, experts), drafted[name], first)
                routing[name].append(chosen)
        on_layer()
    head = TargetHead(source, device)
    followed = {
        name: Followed(torch.stack(routing[name], 2), _choices(head, mine, first))
        for name, mine in {"": states, **drafted}.items()
    }
    return Study(followed.pop(""), torch.stack(margins, 2), followed)


def _attend_window(layer: TargetLayer, x: Tensor, target: Heads, mask: Tensor) -> Tensor:
    own = layer.heads(x)
    keys, values = torch.cat((target.keys, own.keys), 2), torch.cat((target.values, own.values), 2)
    return layer.attend(x, Heads(own.queries, keys, values), mask)


def _moe(
    layer: TargetLayer, experts: LayerExperts, states: list[Tensor], first: int
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The layer's output, its routing int16 [N, P, k] on the CPU, and the router's logits [N, P, E]."""
    routed = [layer.route(x) for x in states]
    routing = torch.cat([one.routing[:, first:] for one in routed]).to(torch.int16).cpu()
    logits = torch.cat([one.logits[:, first:] for one in routed])
    return run_experts(experts, routed)[1], routing, logits


def _choices(head: TargetHead, states: list[Tensor], first: int) -> Tensor:
    chosen = []
    for x in states:
        rows = x[:, first:].flatten(0, 1).split(ROWS_AT_ONCE)
        chosen.append(torch.cat([head.logits(part).argmax(-1) for part in rows]).view(len(x), -1))
    return torch.cat(chosen).cpu()


# -- measures: draft and target routing [..., k], in rank order -> [...] ---------------------------


def set_match(draft: Tensor, target: Tensor) -> Tensor:
    """Share of the target's experts that are among the draft's, at any rank."""
    return (draft[..., :, None] == target[..., None, :]).any(-2).float().mean(-1)


def order_match(draft: Tensor, target: Tensor) -> Tensor:
    """Share of ranks with equal experts."""
    return (draft == target).float().mean(-1)
