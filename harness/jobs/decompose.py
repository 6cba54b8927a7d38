"""Splits our speed-up over a baseline into parts, by switching one thing at a time (docs/decisions/0008).

Each step from the baseline to our system is a replay of its own, in ms per token; the parts sum to the difference:
    launches  launches, kernels and syncs: their cost to the baseline less their cost to ours
    tokens    the baseline's policy at our K, with the baseline's draft, or with one that costs neither time nor memory
    draft     that draft becomes ours: its time, and the slots that it frees or takes
    misses    our planner and eviction: time that copies hold the link
    hidden    our planner and eviction: the share of that time that other work covers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from harness.jobs import progress_bar, steps, write_table
from harness.plan import decomposed_pairs, text_key
from harness.recordings import load_files, read_manifest
from specter.arguments import run_command
from specter.config import BudgetConfig, RunConfig
from specter.memory import DoesNotFit
from specter.metrics import Metrics
from specter.resolve import resolve
from specter.session import Replayer
from specter.speculation.drafts import SHARED

Replay = Callable[[RunConfig], Metrics]


@dataclass(frozen=True)
class Options:
    """Explains our speed-up over every baseline on one model and data set."""

    scale: str
    model: str
    dataset: str
    manifest: Path  # of the experiment `main`
    out: Path


def without_overhead(config: RunConfig) -> RunConfig:
    """The same run on a machine where launches, kernels and syncs cost only their bytes and flops."""
    return replace(config, hardware=replace(config.hardware, launch_ns=0, kernel_ns=0, sync_ns=0))


def explain(baseline: RunConfig, ours: RunConfig, replay: Replay) -> dict[str, float]:
    """The parts of the difference between two runs of one input, in ms per token; negative: what ours costs.

    Args:
        replay: returns a run's metrics.
    """
    full, lean = replay(baseline), replay(without_overhead(baseline))
    full_ours, lean_ours = replay(ours), replay(without_overhead(ours))
    theirs = baseline.system  # whose planner, eviction and transfers run with our draft and memory
    policy: dict[str, Any] = {"planner": theirs.planner, "eviction": theirs.eviction, "transfer": theirs.transfer}
    switched = replace(ours, system=replace(ours.system, **policy, num_staging=0, draft=SHARED))
    at_ours = replay(without_overhead(switched))
    if theirs.speculative:
        deep = replace(baseline, system=replace(theirs, draft_len=ours.draft_len))
        at_depth = replay(without_overhead(deep))["tpot_ms"]
    else:
        slots = BudgetConfig("custom", num_bytes=resolve(baseline).slots.total_bytes, policy="same_experts")
        free = replay(without_overhead(replace(switched, budget=slots)))
        # This system copies nothing while it drafts, so a draft that takes no time shortens it by the draft's time.
        at_depth = free["tpot_ms"] - free["draft_ms"] / (free["num_new_tokens"] - 1)
    misses = _link_ms(at_ours) - _link_ms(lean_ours)
    return {
        "launches": (full["tpot_ms"] - lean["tpot_ms"]) - (full_ours["tpot_ms"] - lean_ours["tpot_ms"]),
        "tokens": lean["tpot_ms"] - at_depth,
        "draft": at_depth - at_ours["tpot_ms"],
        "misses": misses,
        "hidden": at_ours["tpot_ms"] - lean_ours["tpot_ms"] - misses,
    }


def _link_ms(metrics: Metrics) -> float:
    """Time per token that copies hold the link."""
    return float(metrics["link_busy_frac"] * metrics["tpot_ms"])


def rows(pairs: Sequence[tuple[RunConfig, RunConfig]], replay: Replay) -> list[dict[str, Any]]:
    """One row per pair of runs and part; a baseline that does not fit has one row without numbers."""
    found: list[dict[str, Any]] = []
    with progress_bar() as progress:
        for baseline, ours in steps(pairs, "decompose", progress):
            named: dict[str, Any] = {
                "model": baseline.model.name,
                "rival": baseline.system.name,
                "hero": ours.system.name,
                "rival_k": baseline.draft_len,
                "hero_k": ours.draft_len,
                "policy": baseline.budget.policy,
                "budget": baseline.budget.tier,
                "hardware": baseline.hardware.name,
                "dataset": baseline.dataset.name,
                "input": baseline.input,
            }
            try:
                named |= {"rival_ms": replay(baseline)["tpot_ms"], "hero_ms": replay(ours)["tpot_ms"]}
            except DoesNotFit:
                found.append(named)
            else:
                parts = explain(baseline, ours, replay).items()
                found += [named | {"part": part, "ms": ms} for part, ms in parts]
    return found


def main(options: Options) -> None:
    pairs = decomposed_pairs(options.scale, options.model, options.dataset)
    recordings = {key: load_files(pair) for key, pair in read_manifest(options.manifest)[0].items()}
    known: dict[str, Metrics] = {}

    def replay(config: RunConfig) -> Metrics:
        key = repr(config)
        if key not in known:
            known[key] = Replayer().replay(resolve(config), *recordings[text_key(config)]).metrics
        return known[key]

    frame = pd.DataFrame(rows(pairs, replay))
    write_table(options.out, frame)
    print(f"{len(frame)} rows")


if __name__ == "__main__":
    run_command(main, Options)
