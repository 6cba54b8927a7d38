"""Compares the full-size model with the narrow one that it was inflated from, token by token on given text.

For both: the target's token and experts after every token of a prompt, and the draft's at the last positions of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from specter.codecs.int4 import Int4Experts
from specter.errors import SpecterError
from specter.experts.slots import SlotArena
from specter.experts.store import ExpertStore, RawCodec
from specter.models.checkpoint import Checkpoint
from specter.models.cpu.decoder import Decoder
from specter.models.cpu.live import LiveModel
from specter.models.weights import DecoderWeights
from specter.probes.teacher import run_pass
from specter.prompts import shipped_texts
from specter.text.tokenizer import load_tokenizer

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Tokens and routing of one model on a prompt of n tokens, with draft steps at its last m positions."""

    tokens: Ints  # [n], the target's argmax after each token
    routing: Ints  # [n, MoE layers, k]
    draft_tokens: Ints  # [m]
    draft_routing: Ints  # [m, MoE layers, k]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares, over all positions and layers."""

    acceptance: float  # draft tokens equal to the target's
    draft_match: float  # share of the target's experts that the draft chooses too
    num_draft_tokens: int


def agreement(behaviours: Sequence[Behaviour]) -> Agreement:
    """A model's draft against its target."""
    same = np.concatenate([b.draft_tokens == b.tokens[-len(b.draft_tokens) :] for b in behaviours])
    match = [expert_match(b.routing[-len(b.draft_tokens) :], b.draft_routing) for b in behaviours]
    return Agreement(float(same.mean()), float(np.mean(match)), len(same))


def argmax_agreement(narrow: Sequence[Behaviour], wide: Sequence[Behaviour]) -> float:
    """Share of positions at which both targets choose the same token."""
    return float(np.concatenate([a.tokens == b.tokens for a, b in zip(narrow, wide, strict=True)]).mean())


def routing_agreement(narrow: Sequence[Behaviour], wide: Sequence[Behaviour]) -> float:
    """Share of the narrow target's experts that the wide one chooses too."""
    return float(np.mean([expert_match(a.routing, b.routing) for a, b in zip(narrow, wide, strict=True)]))


def expert_match(target: Ints, draft: Ints) -> float:
    """Share of the experts in target [..., k] that are in draft [..., k] too."""
    return float((target[..., :, None] == draft[..., None, :]).any(-1).mean())


def narrow_model(checkpoint: Checkpoint, draft: Int4Experts, capacity: int, tile: int) -> LiveModel:
    """The narrow target and its INT4 draft on the CPU, in fp32."""
    spec = checkpoint.spec
    codec = RawCodec(torch.float32, spec.expert_inter, spec.hidden)
    store = ExpertStore.read(codec, checkpoint, range(spec.num_moe_layers))
    arena = SlotArena(spec.num_experts, codec)
    return LiveModel(Decoder(spec, DecoderWeights.load(checkpoint), arena, draft, tile, capacity), store, {})


def behave(model: LiveModel, prompt: Sequence[int], num_draft: int) -> Behaviour:
    """Runs the target over the prompt, then a draft step on each of its last `num_draft` tokens."""
    decoder = model.decoder
    decoder.reset()
    outputs, routing = run_pass(model, prompt, 0)
    steps = [decoder.draft_row(prompt[position], position) for position in range(len(prompt) - num_draft, len(prompt))]
    return Behaviour(
        tokens=torch.stack(list(outputs)).argmax(-1).numpy(),
        routing=routing.astype(np.int64),
        draft_tokens=torch.stack([step.output for step in steps]).argmax(-1).numpy(),
        draft_routing=np.stack([step.routing for step in steps]).astype(np.int64),
    )


def load_prompts(paths: Iterable[Path], tokenizer_file: Path, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """The first `num_tokens` tokens of the first texts that are long enough, as many from each file.
    Raises SpecterError: a file is missing, or there are too few texts."""
    files = sorted(paths)
    if not tokenizer_file.is_file():
        raise SpecterError(f"{tokenizer_file} does not exist", "run from the root of the repository")
    tokenizer = load_tokenizer(tokenizer_file)
    found: list[list[int]] = []
    for path in files:
        texts = shipped_texts(path)
        prompts = [ids[:num_tokens] for text in texts if len(ids := tokenizer.encode(text)) >= num_tokens]
        found += prompts[: -(-num_prompts // len(files))]
    if len(found) < num_prompts:
        raise SpecterError(
            f"{len(found)} prompts of {num_tokens} tokens found, {num_prompts} wanted", "use fewer or shorter prompts"
        )
    return found[:num_prompts]
