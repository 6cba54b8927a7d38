"""transformers' own model with everything resident, launched kernel by kernel: decoding without this runtime."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.report import MIN_REPEATS, Sample
from specter.models.cuda.no_gc import no_gc

EXPERTS = ("grouped_mm", "eager")  # transformers' implementations of routed experts
WARMUP = 3  # repeats


@torch.inference_mode()
def decode_eager(
    model: Any, prompt: Sequence[int], num_steps: int, experts: str, repeats: int = MIN_REPEATS, warmup: int = WARMUP
) -> tuple[list[int], Sample]:
    """Greedy tokens after `prompt`, and ms per token: each repeat is `num_steps` one-token passes in a row.

    A pass is thousands of launches from Python, so the host dominates. Warm-up passes pick kernels and grow pools.
    `experts` is one of `EXPERTS`: "grouped_mm" is transformers' default, "eager" a loop.
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
