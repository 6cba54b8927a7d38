"""What a user has without this runtime: transformers' own model, everything resident, launched kernel by kernel."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bench.measure import MIN_REPEATS, Sample
from specter.models.cuda.no_gc import no_gc
from specter.models.hub_config import config_of
from specter.models.names import canonical
from specter.models.spec import ModelSpec

EXPERTS = ("grouped_mm", "eager")  # transformers' ways with routed experts
WARMUP = 3  # repeats


class Weights(Protocol):
    """`Checkpoint` or `InflatedCheckpoint`."""

    spec: ModelSpec

    def tensor(self, name: str) -> Tensor: ...

    def experts(self, layer: int) -> tuple[Tensor, Tensor]: ...


def load_eager(weights: Weights, device: torch.device | str, dtype: torch.dtype) -> Any:
    """transformers' model of the family on the same weights, built without memory and then given them."""
    import transformers  # seconds to import

    spec = weights.spec
    values = {**config_of(spec), "attn_implementation": "sdpa"}
    model_class: Any = getattr(transformers, values["architectures"][0])
    config = model_class.config_class.from_dict(values)
    with torch.device("meta"):
        model = model_class(config)
    state: dict[str, Tensor] = {}
    for stored in model.state_dict():
        name = canonical(spec.family, stored)
        if name.endswith(".experts.gate_up_proj"):
            gate_up, down = weights.experts(int(name.split(".")[2]) - spec.num_dense_layers)
            state[stored] = gate_up.to(device, dtype)
            state[stored.replace("gate_up_proj", "down_proj")] = down.to(device, dtype)
        elif ".experts." not in name:
            source = "model.embed_tokens.weight" if name == "lm_head.weight" and spec.tied else name
            state[stored] = weights.tensor(source).to(device, dtype)
    model.load_state_dict(state, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its buffers are in no checkpoint
    return model.eval()


@torch.inference_mode()
def decode_eager(
    model: Any, prompt: Sequence[int], num_steps: int, experts: str, repeats: int = MIN_REPEATS, warmup: int = WARMUP
) -> tuple[list[int], Sample]:
    """Greedy tokens after `prompt`, and ms per token: each repeat is `num_steps` one-token passes in a row.

    A pass is some thousands of launches from Python, so that what is measured is the host. Its first passes pick
    kernels and grow pools, and a full garbage collection walks every module: neither is let into a repeat.

    Args:
        experts: transformers' way with routed experts: "grouped_mm" (its default) or "eager" (a loop).
    """
    device = model.device
    model.set_experts_implementation(experts)
    out = model(torch.tensor([list(prompt)], device=device), use_cache=True, logits_to_keep=1)
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    tokens, values = [int(token)], []
    gc.collect()
    with no_gc():
        for repeat in range(warmup + repeats):
            start = time.perf_counter()
            for _ in range(num_steps):
                token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
                tokens.append(int(token))
            if repeat >= warmup:
                values.append((time.perf_counter() - start) / num_steps * 1e3)
    return tokens, Sample(tuple(values))
