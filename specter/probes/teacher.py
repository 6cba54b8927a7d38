"""Agreement of draft and target on a given text, which, unlike generated text, does not loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specter.experts.slots import SlotArena
from specter.models.base import Output
from specter.models.cpu.live import LiveModel
from specter.models.spec import ExpertId


@dataclass(frozen=True, slots=True)
class Forced:
    """The outcome at every position of a text after its first window."""

    agrees: NDArray[np.bool_]  # [T], same next token
    draft_routing: NDArray[np.int16]  # [T, MoE layers, k]
    target_routing: NDArray[np.int16]  # [T, MoE layers, k]


def force(model: LiveModel, tokens: Sequence[int], window: int) -> Forced:
    """Runs the draft on `tokens`, `window` at a time, and then the target, which rewrites the KV.

    The draft sees the target's KV before its window and its own within it, as in a round of K = `window`.
    """
    decoder = model.decoder
    decoder.reset()
    decoder.arena = SlotArena(decoder.num_experts, model.store.codec)
    run_pass(model, tokens[:window], 0)
    agrees, drafts, targets = [], [], []
    for start in range(window, len(tokens) - window + 1, window):
        part = tokens[start : start + window]
        steps = [decoder.draft_row(token, start + index) for index, token in enumerate(part)]
        outputs, routing = run_pass(model, part, start)
        agrees += [int(step.output.argmax()) == int(out.argmax()) for step, out in zip(steps, outputs, strict=True)]
        drafts += [step.routing for step in steps]
        targets.append(routing)
    return Forced(np.array(agrees), np.stack(drafts), np.concatenate(targets))


def run_pass(model: LiveModel, tokens: Sequence[int], position: int) -> tuple[list[Output], NDArray[np.int16]]:
    """One target pass, each expert in the slot of its id. Returns outputs and routing [rows, MoE layers, k]."""
    decoder = model.decoder
    one = decoder.target_pass(tokens, position, num_outputs=len(tokens))
    layers = []
    for layer in range(decoder.num_layers):
        routing = one.attend_and_route(layer)
        if routing is None:
            continue
        experts = np.unique(routing).tolist()
        for expert in experts:
            decoder.arena.write(expert, model.store.payload(ExpertId(layer - decoder.num_dense_layers, expert)))
        one.run_experts(layer, experts, experts)
        one.combine(layer)
        layers.append(routing)
    return one.outputs(), np.stack(layers, axis=1)
