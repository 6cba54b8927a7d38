"""Where Specter's speed-up over a rival comes from, by switching one thing at a time (docs/decisions/0008).

From the rival to Specter, each step a replay of its own, in ms per token; the parts add up to the whole difference:
    launches  what launches, kernels and syncs cost the rival, less what they cost Specter (a clock that charges none)
    tokens    the rival's policy at Specter's K, with the rival's draft, or with one that costs neither time nor memory
    draft     that draft becomes Specter's: its time, and the slots that it frees or takes
    misses    Specter's planner and eviction: time that copies hold the link
    hidden    the same: how much of that time is covered by other work
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from harness.jobs import progress_bar, run_job, steps
from harness.plan import DecompositionPlan, Live, decomposition_plan, live_of
from harness.recordings import load_entry, read_manifest
from specter.build import build_costs
from specter.config import SHARED, BudgetConfig, RunConfig, SystemConfig
from specter.memory import DoesNotFit, num_slots
from specter.metrics import Metrics
from specter.recording import Recording
from specter.session import replay_input

Replay = Callable[[RunConfig], Metrics]


@dataclass(frozen=True, slots=True)
class Parts:
    """Milliseconds per token that Specter saves, by cause; negative: what it costs."""

    launches: float
    tokens: float
    draft: float
    misses: float
    hidden: float


def without_overhead(config: RunConfig) -> RunConfig:
    """The same on a machine on which launches, kernels and syncs cost nothing but their bytes and flops."""
    return replace(config, hardware=replace(config.hardware, launch_ns=0, kernel_ns=0, sync_ns=0))


def explain(rival: RunConfig, hero: RunConfig, replay: Replay) -> Parts:
    """The parts of the difference between two runs of one input; `replay` gives a run's metrics."""
    full, lean = replay(rival), replay(without_overhead(rival))
    target, lean_target = replay(hero), replay(without_overhead(hero))
    switched = replace(hero, system=_with_policy_of(rival.system, hero.system))
    ours = replay(without_overhead(switched))
    if rival.system.speculative:
        deep = replace(rival, system=replace(rival.system, draft_len=hero.depth))
        at_depth = replay(without_overhead(deep))["tpot_ms"]
    else:
        costs = build_costs(rival)
        slots = BudgetConfig("custom", num_bytes=num_slots(rival, costs) * costs.payload_bytes, policy="same_experts")
        free = replay(without_overhead(replace(switched, budget=slots)))
        # Nothing is copied while this system drafts, so without its draft's time it would be that much faster.
        at_depth = free["tpot_ms"] - free["draft_ms"] / (free["num_new_tokens"] - 1)
    misses = _link_ms(ours) - _link_ms(lean_target)
    return Parts(
        launches=(full["tpot_ms"] - lean["tpot_ms"]) - (target["tpot_ms"] - lean_target["tpot_ms"]),
        tokens=lean["tpot_ms"] - at_depth,
        draft=at_depth - ours["tpot_ms"],
        misses=misses,
        hidden=ours["tpot_ms"] - lean_target["tpot_ms"] - misses,
    )


def _with_policy_of(rival: SystemConfig, hero: SystemConfig) -> SystemConfig:
    """The hero's draft and memory under the rival's planner, eviction and transfers."""
    return replace(
        hero, planner=rival.planner, eviction=rival.eviction, transfer=rival.transfer, num_staging=0, draft=SHARED
    )


def _link_ms(metrics: Metrics) -> float:
    """Time per token that copies hold the link."""
    return float(metrics["link_busy_frac"] * metrics["tpot_ms"])


def rows(plan: DecompositionPlan, replay: Replay) -> list[dict[str, Any]]:
    """One row per pair of runs and part; a rival that does not fit has one row without numbers."""
    found: list[dict[str, Any]] = []
    with progress_bar() as progress:
        for rival, hero in steps(plan.pairs(), "decompose", progress):
            named = {
                "model": rival.model.name,
                "rival": rival.system.name,
                "hero": hero.system.name,
                "rival_k": rival.depth,
                "hero_k": hero.depth,
                "policy": rival.budget.policy,
                "budget": rival.budget.tier,
                "hardware": rival.hardware.name,
                "dataset": rival.dataset.name,
                "input": rival.input,
            }
            try:
                times = {"rival_ms": replay(rival)["tpot_ms"], "hero_ms": replay(hero)["tpot_ms"]}
            except DoesNotFit:
                found.append(named)
                continue
            parts = asdict(explain(rival, hero, replay))
            found += [named | times | {"part": part, "ms": ms} for part, ms in parts.items()]
    return found


def cached(recordings: dict[Live, tuple[Recording, Recording]]) -> Replay:
    """Replays from these recordings, each configuration once."""
    known: dict[str, Metrics] = {}

    def replay(config: RunConfig) -> Metrics:
        key = repr(config)
        if key not in known:
            known[key] = replay_input(config, *recordings[live_of(config)]).metrics
        return known[key]

    return replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--scale", "--model", "--dataset"):
        parser.add_argument(name, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("manifest", type=Path)
    arguments = parser.parse_args()
    plan = decomposition_plan(arguments.scale, arguments.model, arguments.dataset)
    entries, _ = read_manifest(arguments.manifest)
    replay = cached({live: load_entry(entry) for live, entry in entries.items()})
    frame = pd.DataFrame(rows(plan, replay))
    frame.to_parquet(arguments.out, index=False)
    print(f"{len(frame)} rows")


if __name__ == "__main__":
    run_job(main)
