"""A speed-up taken apart: the parts are what was switched, and add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.jobs.decompose import explain, rows, without_overhead
from harness.plan import compose, decomposed_pairs
from specter.config import RunConfig
from specter.memory import DoesNotFit
from specter.metrics import Metrics

OVERHEAD = 5.0


def replay(config: RunConfig) -> Metrics:
    """A made-up system: time by planner, depth, draft and overhead; the link is busy half of it."""
    if config.budget.tier == "low" and config.system.name == "specmoeoff":
        raise DoesNotFit("too large", "smaller")
    tpot = {"none": 40.0, "two_plans": 35.0, "three_phase": 30.0, "deadline": 20.0}[config.system.planner]
    tpot += {0: 30.0, 3: 20.0}.get(config.draft_len, 10.0) + 4.0 * (config.system.draft != "shared")
    tpot += OVERHEAD * (config.hardware.launch_ns > 0)
    return {"tpot_ms": tpot, "draft_ms": 127 * 2.0, "num_new_tokens": 128, "link_busy_frac": 0.5}


@pytest.mark.parametrize("rival", ["lru", "lru_next_gate", "mixtral_offloading", "specmoeoff", "specmoeoff_tuned"])
@pytest.mark.parametrize("hero", ["specter", "specter_deadline"])
def test_parts_add_up_to_the_difference(rival: str, hero: str) -> None:
    baseline, ours = (compose([f"system={name}"]) for name in (rival, hero))
    parts = explain(baseline, ours, replay)
    assert sum(parts.values()) == pytest.approx(replay(baseline)["tpot_ms"] - replay(ours)["tpot_ms"])


def test_parts_are_what_was_switched() -> None:
    parts = explain(compose(["system=specmoeoff"]), compose(["system=specter"]), replay)
    assert parts["tokens"] == 10.0  # from K = 3 to 16
    assert parts["draft"] == 4.0  # shared
    assert parts["misses"] + parts["hidden"] == 5.0  # the planner
    assert parts["misses"] == 2.5  # of which half is link time
    assert parts["launches"] == 0.0  # both have the same


def test_overhead_is_all_that_is_taken_off_the_machine() -> None:
    config = compose([])
    lean = without_overhead(config).hardware
    assert (lean.launch_ns, lean.kernel_ns, lean.sync_ns) == (0, 0, 0)
    hardware = config.hardware
    kept = replace(lean, launch_ns=hardware.launch_ns, kernel_ns=hardware.kernel_ns, sync_ns=hardware.sync_ns)
    assert kept == hardware


def test_a_rival_that_does_not_fit_has_a_row_without_numbers() -> None:
    found = rows(decomposed_pairs("laptop", "deepseek_v2_lite", "gsm8k"), replay)
    misfits = [row for row in found if "part" not in row]
    assert misfits and all(row["rival"] == "specmoeoff" and row["budget"] == "low" for row in misfits)
    assert {row["hardware"] for row in misfits} == {"a100_40gb_pcie4", "a100_12gbps"}
