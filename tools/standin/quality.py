"""Quality of a trained stand-in: loss, expert load, and agreement with an INT4 copy of its routed experts.

Measured on the int8-decoded weights, with symmetric round-to-nearest INT4 (one group per row).
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specter.metrics import distinct_4grams
from specter.models.spec import ModelSpec
from specter.probes.fidelity import set_match
from tools.standin.network import ROUTED, Network, Weights, round_to_int4, working_copy

UNION_SIZES = (1, 2, 4, 8, 16, 32)


def union_sizes(ids: Tensor, num_windows: int = 3) -> dict[int, float]:
    """Mean number of distinct experts in K consecutive tokens of a layer; ids [L_moe, B, T, k] (CPU)."""
    unions = {}
    for size in (size for size in UNION_SIZES if size <= ids.shape[2]):
        windows = ids[:, :, : size * min(num_windows, ids.shape[2] // size)].unflatten(2, (-1, size)).flatten(3)
        hit = torch.zeros(*windows.shape[:3], int(ids.max()) + 1).scatter(3, windows, 1.0)
        unions[size] = round(float(hit.sum(-1).mean()), 2)
    return unions


class QualityMeter:
    """Measures one set of weights; `length` is the number of positions of its batches."""

    def __init__(self, spec: ModelSpec, weights: Weights, length: int, device: str) -> None:
        self.spec, self.device = spec, device
        self._network = Network(spec, length, device)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        detached = {name: weight.detach().to(device) for name, weight in weights.items()}
        self._target = working_copy(detached, dtype)
        rounded = {name: round_to_int4(detached[name]) for name in ROUTED}  # all other weights are shared
        self._draft = working_copy(detached | rounded, dtype)

    @torch.no_grad()
    def teacher_forced(self, tokens: Tensor) -> dict[str, Any]:
        """Acceptance and match on a given text, int64 [B, T]."""
        target, target_ids = self._network.logits(self._target, tokens)
        draft, draft_ids = self._network.logits(self._draft, tokens)
        return _agreement(target.argmax(-1) == draft.argmax(-1), target_ids, draft_ids)

    @torch.no_grad()
    def loss_and_load(self, batches: list[Tensor]) -> tuple[float, Tensor]:
        """Mean cross-entropy (nats per token) and each expert's share of the routed rows [L_moe, E] (CPU)."""
        losses, counts = [], torch.zeros(self.spec.num_moe_layers, self.spec.num_experts)
        for tokens in batches:
            logits, ids = self._network.logits(self._target, tokens[:, :-1])
            losses.append(float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())))
            ids = ids.flatten(1).cpu()
            counts.scatter_add_(1, ids, torch.ones(ids.shape))
        return sum(losses) / len(losses), counts / counts.sum(1, keepdim=True)

    @torch.no_grad()
    def generated(self, prompts: Tensor, num_new: int, temperature: float, seed: int) -> tuple[Tensor, dict[str, Any]]:
        """Continues prompts int64 [B, P] greedily (temperature 0) or seeded (argmax of logits / T + Gumbel noise).

        Returns the tokens [B, P + num_new] and acceptance, match, unions and distinct 4-grams on the new part.
        """
        batch, num_prompt = prompts.shape
        generator = torch.Generator(device=self.device).manual_seed(seed)
        uniform = torch.rand(batch, num_new, self.spec.vocab, generator=generator, device=self.device)
        gumbel = -torch.log(-torch.log(uniform.clamp(1e-9, 1 - 1e-7)))
        tokens = F.pad(prompts, (0, num_new))

        def choose(logits: Tensor, noise: Tensor) -> Tensor:
            return logits.argmax(-1) if temperature == 0 else (logits / temperature + noise).argmax(-1)

        for new in range(num_new):  # whole sequences: attention is causal, so later positions have no effect
            logits, _ = self._network.logits(self._target, tokens[:, :-1])
            tokens[:, num_prompt + new] = choose(logits[:, num_prompt + new - 1], gumbel[:, new])
        target, target_ids = self._network.logits(self._target, tokens[:, :-1])
        draft, draft_ids = self._network.logits(self._draft, tokens[:, :-1])
        new_part = slice(num_prompt - 1, None)
        same = choose(target[:, new_part], gumbel) == choose(draft[:, new_part], gumbel)
        target_ids = target_ids.unflatten(1, (batch, -1))[:, :, new_part]
        draft_ids = draft_ids.unflatten(1, (batch, -1))[:, :, new_part]
        result = _agreement(same, target_ids.flatten(1, 2), draft_ids.flatten(1, 2))
        result["union"] = union_sizes(target_ids.cpu())
        result["frac_distinct_4grams"] = round(fmean(map(distinct_4grams, tokens[:, num_prompt:].tolist())), 3)
        return tokens, result


def load_summary(load: Tensor) -> dict[str, Any]:
    """Per MoE layer: entropy of the load (1 is even), the largest share, experts under 1/50 of an even share."""
    num_experts = load.shape[1]
    entropy = -(load * load.clamp(min=1e-12).log()).sum(1) / torch.log(torch.tensor(float(num_experts)))
    return {
        "entropy_frac": [round(value, 3) for value in entropy.tolist()],
        "max_share": [round(value, 4) for value in load.amax(1).tolist()],
        "num_dead": (load < 0.02 / num_experts).sum(1).tolist(),
    }


def _agreement(same: Tensor, target_ids: Tensor, draft_ids: Tensor) -> dict[str, Any]:
    """An INT4 copy against its target on the same text; matches are shares of the target's experts."""
    match = set_match(draft_ids, target_ids).mean(-1)  # [L_moe]
    found = {"acceptance": same.float().mean(), "match_mean": match.mean(), "match_worst_layer": match.min()}
    return {name: round(float(value), 4) for name, value in found.items()}
