"""Losslessness on the device: every policy, depth and budget against plain decoding, copies as bad as they may be.

Runs on the first layers of the full-size model, whose payloads are the real ones: a round takes a tenth of the
time, and the draft is wrong more often, so that more of what can go wrong does.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.progress import Progress

from bench.cells import SAMPLINGS, SLOTS_PER_LAYER, Beds, Cell, run_cell
from specter.models.cuda.full_size import FullSize
from specter.models.cuda.memory import DeviceBudget
from specter.timeline.cuda import CudaTimeline
from specter.timeline.stress import StressedTimeline

NUM_LAYERS = 3  # one dense, two MoE
DEPTHS = (4, 8, 16, 32)
POLICIES = ("specter", "specter_retain", "specter_deadline_lru", "specter_deadline")  # planner x eviction
NUM_TOKENS = 18


@dataclass(slots=True)
class Outcome:
    """How many generations were compared, and which differed."""

    num_compared: int = 0
    num_stressed: int = 0
    different: list[str] = dataclasses.field(default_factory=list)

    @property
    def all_equal(self) -> bool:
        return self.num_compared > 0 and not self.different

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "all_equal": self.all_equal,
            "what": f"first {NUM_LAYERS} layers at full size, {NUM_TOKENS} tokens or K + 3; against plain "
            f"decoding, resident; {' '.join(POLICIES)}; K {' '.join(map(str, DEPTHS))}",
        }


def compare(full: FullSize, budget: DeviceBudget, prompts: Sequence[Sequence[int]], progress: Progress) -> Outcome:
    """Every combination on every prompt; every other prompt under stress."""
    beds = Beds(full.first_layers(NUM_LAYERS), budget)

    def generate(cell: Cell, chosen: Sequence[int], is_stressed: bool) -> list[list[int]]:
        seed = len(outcome.different) + outcome.num_compared

        def timeline() -> CudaTimeline:
            return StressedTimeline(budget.device, seed) if is_stressed else CudaTimeline(budget.device)

        bed = beds.get(cell, len(prompts[0]))
        bed.poison()
        texts = [prompts[index] for index in chosen]
        num_tokens = max(NUM_TOKENS, (cell.k or max(DEPTHS)) + 3)  # so that a round drafts all K
        generations = run_cell(cell, bed, texts, (), timeline, num_tokens, warmup_tokens=0)
        return [generation.tokens for generation, _, _ in generations.texts]

    outcome = Outcome()
    combinations = list(itertools.product(SAMPLINGS, SLOTS_PER_LAYER, DEPTHS, POLICIES))
    expected = {
        sampling: generate(Cell("resident", "high", sampling, 0), range(len(prompts)), False) for sampling in SAMPLINGS
    }
    for sampling, tier, depth, system in progress.track(combinations, description="bit for bit"):
        cell = Cell(system, tier, sampling, depth)
        for is_stressed in (False, True):
            chosen = range(int(is_stressed), len(prompts), 2)
            tokens = generate(cell, chosen, is_stressed)
            outcome.num_compared += len(tokens)
            outcome.num_stressed += len(tokens) * is_stressed
            outcome.different += [
                f"{cell.name}, prompt {index}{', stressed' * is_stressed}"
                for index, generated in zip(chosen, tokens, strict=True)
                if generated != expected[sampling][index][: len(generated)]
            ]
    return outcome
