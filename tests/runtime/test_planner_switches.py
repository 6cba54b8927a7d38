"""The switches of the experiment `planner`: phases of plans, routes, order of verification, and a copied KV."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from harness.plan import compose, text_key
from specter.config import validate
from specter.errors import SpecterError
from specter.execution import ROUTES
from specter.experts.policies.base import PLANNERS, Plan, Planner, Pool
from specter.memory import fixed_bytes
from specter.models.full_size import FULL_SIZE
from specter.recording import Recording
from specter.records import PlanRecord
from specter.resolve import resolve
from specter.session import Replayer, RunResult, run_input, with_routes
from specter.timeline.costs import CostModel
from tests.runtime.test_replayer import NUM_TOKENS, K, record

SPEC = FULL_SIZE["deepseek_v2_lite"]
LAYERS, EXPERTS, PAYLOAD = 2, 8, 12 * 10**6  # a copy takes a millisecond at the planner's first estimate


def planner(name: str, residents: int = 4) -> Planner:
    return PLANNERS[name](Pool([residents] * LAYERS, EXPERTS, PAYLOAD))


def plans(name: str, draft_len: int, num_new: int, residents: int = 4) -> list[tuple[int, Plan]]:
    """The plans of a round in which every token names `num_new` experts per layer that no token before it named."""
    one, counts = planner(name, residents), np.zeros((LAYERS, EXPERTS), np.int32)
    one.begin_round(draft_len)
    made = []
    for num_drafted in range(1, draft_len + 1):
        counts[:, (num_drafted - 1) * num_new : num_drafted * num_new] = 1
        if one.is_boundary(num_drafted):
            made.append((num_drafted, one.plan(num_drafted, counts, np.zeros(counts.shape, np.bool_))))
    return made


def test_prefetch_overlap_happens_where_the_copies_end_before_the_draft() -> None:
    """One expert of two layers after one token of ten is two milliseconds of copies: the next plan is after the third,
    for three experts per layer, whose copies end with the ninth; there every layer has its residents."""
    found = [(at, plan.phase, len(plan.loads), plan.chunk_len) for at, plan in plans("three_phase_early", 10, 1)]
    assert found == [(1, "initial", 2, 2), (3, "overlap", 6, 6), (9, "overlap", 8, 8)]
    # After token 2 as published: four copies; after token 6 every layer has counted its four.
    found = [(at, plan.phase, len(plan.loads), plan.chunk_len) for at, plan in plans("three_phase", 10, 1)]
    assert found == [(2, "initial", 4, 4), (6, "overlap", 8, 8)]


def test_there_is_one_plan_where_its_copies_outlast_the_draft() -> None:
    assert [(at, plan.chunk_len) for at, plan in plans("three_phase", 5, 4, residents=5)] == [(1, 8)]


def test_early_and_late_plans_are_at_the_first_and_the_last_token() -> None:
    assert plans("three_phase_early", 4, 8)[0][0] == 1
    [(at, plan)] = plans("three_phase_late", 4, 2)
    assert (at, plan.phase) == (4, "initial")


def replayed(system: str, *more: str) -> tuple[RunResult, Recording]:
    config = compose([f"system={system}", "budget=high", f"k={K}", *more])
    run = resolve(replace(config, warmup_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS))
    recording = record(1, K)
    return Replayer().replay(run, recording, record(0, K)), recording


def test_a_round_records_its_plans() -> None:
    result, _ = replayed("specter")
    by_round = [one.plans for one in result.generation.rounds]
    assert all(len(found) <= 1 for found in by_round)
    assert isinstance(by_round[0][0], PlanRecord) and by_round[0][0].phase == "initial"
    assert result.metrics["num_plans"] == sum(map(len, by_round)) > 0 == result.metrics["num_overlap_plans"]
    assert replayed("specter_no_prefetch")[0].metrics["num_plans"] == 0


def test_perfect_routes_are_the_targets_and_wrong_ones_are_others() -> None:
    recording = record(1, K)
    config = compose(["system=specter"])
    of = {name: with_routes(recording, resolve(compose([f"execution.routes={name}"]))) for name in ROUTES}
    assert of["drafted"] is recording and config.execution.routes == "drafted"
    for plain, perfect, wrong in zip(recording.passes, of["perfect"].passes, of["wrong"].passes, strict=True):
        num_drafts = len(plain.draft_routing)
        assert perfect.draft_routing.shape == plain.draft_routing.shape == wrong.draft_routing.shape
        for step in range(num_drafts):
            assert (perfect.draft_routing[step] == plain.target_routing[:, step]).all()
        assert ((wrong.draft_routing - plain.draft_routing) % SPEC.num_experts == SPEC.num_experts // 2).all()
        assert perfect.target_routing is plain.target_routing and wrong.tokens == plain.tokens


def test_perfect_routes_never_miss_what_was_planned() -> None:
    """By chance routed, so that the draft's own predictions are worth little."""
    used = {
        name: replayed("specter_no_barrier", f"execution.routes={name}")[0].metrics["frac_prefetched_used"]
        for name in ("drafted", "perfect")
    }
    assert used["perfect"] == 1 > used["drafted"]


def test_verification_by_token_needs_each_expert_once_per_token() -> None:
    grouped, recording = replayed("specter_no_prefetch")
    by_token, _ = replayed("specter_no_prefetch", "execution.by_token=true")
    assert by_token.generation.tokens == grouped.generation.tokens
    for one, recorded in zip(by_token.generation.rounds, recording.passes[1:], strict=True):
        assert one.union_mean == SPEC.top_k * len(recorded.tokens)
    assert by_token.metrics["tpot_ms"] > grouped.metrics["tpot_ms"]


def test_a_copied_kv_takes_memory_and_time_and_the_same_recordings() -> None:
    costs = CostModel(SPEC, tile_rows=16, kv_capacity=256)
    shared, copied = (compose([f"system={name}"]) for name in ("specter", "specter_copied_kv"))
    more = fixed_bytes(costs, copied.system)["draft_kv"] - fixed_bytes(costs, shared.system)["draft_kv"]
    assert more == fixed_bytes(costs, shared.system)["kv"] > 0
    assert text_key(shared) == text_key(copied)
    assert costs.copy_kv(10).hbm_bytes == 2 * 10 * SPEC.num_layers * SPEC.kv_width * 2


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("execution.routes=perfect", "perfect_routes"),
        ("execution.by_token=true", "by_token"),
        ("system.draft=copied_kv", "copied_kv"),
    ],
)
def test_what_is_only_charged_is_refused_on_a_device(setting: str, named: str) -> None:
    config = compose(["system=specter", setting])
    with pytest.raises(SpecterError, match=named):
        validate(replace(config, clock="device"))


def test_other_routes_are_refused_live_and_unknown_ones_always() -> None:
    run = resolve(compose(["system=specter", "execution.routes=perfect"]))
    with pytest.raises(SpecterError, match="replaces the routing of a recording"):
        run_input(run, None, None, [1], [1])  # type: ignore[arg-type]
    with pytest.raises(SpecterError, match="unknown"):
        compose(["execution.routes=best"])
