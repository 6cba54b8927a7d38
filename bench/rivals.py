"""The rivals that foresee, swap or draft by themselves, on the device beside `specter_deadline` and plain decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bench.cells import SLOTS_PER_LAYER, Beds, Cell, CellResult, mean, measure, run_cell
from bench.cells import WARMUP_TOKENS as LONG_WARMUP_TOKENS
from bench.report import Report
from specter.config import SystemConfig
from specter.models.cuda.live import allocated
from specter.models.cuda.memory import DeviceBudget
from specter.timeline.cuda import CudaTimeline
from specter.timeline.hardware import Hardware

OURS = Cell("specter_deadline", "", "greedy", 16)
RIVALS = (
    Cell("mixtral_offloading", "", "greedy", 0),
    Cell("mixtral_speculative_loading", "", "greedy", 0),
    Cell("lru_next_gate", "", "greedy", 0),
    Cell("specmoeoff", "", "greedy", 3),  # the published depth
    Cell("specmoeoff_tuned", "", "greedy", 16),  # its best on the virtual clock
)
NUM_TOKENS = 64
WARMUP_TOKENS = 4  # with the warm-up's prompt they fill every slot
NOTES = {
    "memory": "same_experts: every system has the slots of its tier, whatever else it allocates",
    "write back": "copied to page-locked buffers on the host and dropped: the host keeps every expert",
    "own draft": "non-expert weights and KV a second time, in BF16, also where a budget charges INT4 "
    "(specmoeoff_tuned); what a wholly accepted round leaves out is caught up by a step of its own",
    "warm-up": f"{WARMUP_TOKENS} tokens behind the warm-up's prompt; the other sections' is of {LONG_WARMUP_TOKENS}",
    "inputs": "systems that swap take a tenth of a second a token: they and their ratios have the first prompt only",
}


def num_prompts(system: SystemConfig) -> int:
    return 1 if system.transfer == "swap" else 2


def compare(
    beds: Beds, budget: DeviceBudget, machine: Hardware, prompts: Sequence[Sequence[int]], warmup: Sequence[int],
    report: Report,
) -> None:  # fmt: skip
    """Runs every rival at both budgets on the same prompts as ours and as plain decoding with everything resident.

    Leaves in the report: `facts["rivals"]`, with every cell; and in the summary `rivals_bit_equal` and, by rival and
    tier, the TPOT of ours over its own.

    Args:
        machine: whose rates the floors are held against.
    """
    facts: dict[str, Any] = {"notes": NOTES, "num_tokens": NUM_TOKENS, "cells": []}
    report.facts["rivals"] = facts
    plain = _run(Cell("resident", "high", "greedy", 0), beds, budget, machine, prompts, warmup)
    are_equal = []
    for tier in SLOTS_PER_LAYER:
        ours = _run(dataclasses.replace(OURS, tier=tier), beds, budget, machine, prompts, warmup)
        for rival in RIVALS:
            result = _run(dataclasses.replace(rival, tier=tier), beds, budget, machine, prompts, warmup)
            tpots_ms = result.values("tpot_ms")
            ratio = mean(ours.values("tpot_ms")[: len(tpots_ms)]) / mean(tpots_ms)
            are_equal.append(result.tokens == plain.tokens[: len(result.tokens)])
            facts["cells"].append(
                {**result.as_json(), "bit_equal": are_equal[-1], "tpot_of_ours_over_this": ratio}
                | allocated(beds.get(result.cell, len(prompts[0])).own_memory, result.cell.config().system)
            )
            report.summary[f"tpot_of_ours_over.{result.cell.system}.{tier}"] = ratio
            report.write()
        are_equal.append(ours.tokens == plain.tokens)
        facts["cells"].append({**ours.as_json(), "bit_equal": are_equal[-1]})
    report.summary["rivals_bit_equal"] = all(are_equal)


def _run(
    cell: Cell, beds: Beds, budget: DeviceBudget, machine: Hardware, prompts: Sequence[Sequence[int]],
    warmup: Sequence[int],
) -> CellResult:  # fmt: skip
    system, prompt_len = cell.config().system, len(prompts[0])
    bed = beds.get(cell, prompt_len)
    bed.capture({1, prompt_len}, foresees=system.predictor != "none")
    texts = prompts[: num_prompts(system)]
    generations = run_cell(cell, bed, texts, warmup, lambda: CudaTimeline(budget.device), NUM_TOKENS, WARMUP_TOKENS)
    return measure(generations, machine)
