"""`k=auto`: the expected time per token decides, from measurements alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.plan import compose
from specter.errors import SpecterError
from specter.recording import DENSE, RecordingModel, ReplayModel
from specter.records import Generation
from specter.speculation.accept import FirstToken
from specter.speculation.depth import CANDIDATES, Acceptance, AutoDepth, Depth
from specter.timeline.virtual import VirtualTimeline
from tests.runtime.fakes import COSTS, MACHINE, TINY, FakeModel, make_engine
from tests.runtime.test_engine import PROMPT, never, plain, sometimes

NUM_TOKENS = 60


def generate(drafts: Callable[..., int], link_slowdown: int = 1) -> Generation:
    machine = replace(MACHINE, link_bytes_per_s=MACHINE.link_bytes_per_s // link_slowdown)
    engine = make_engine(
        FakeModel(drafts), 12, 1, planner="deadline", timeline=VirtualTimeline(machine), depth=AutoDepth(COSTS, machine)
    )
    return engine.generate(PROMPT, NUM_TOKENS)


def lens(generation: Generation) -> list[int]:
    return [record.draft_len for record in generation.rounds]


@pytest.mark.parametrize("drafts", [plain, sometimes, never])
def test_the_text_is_plain_decodings(drafts: Callable[..., int]) -> None:
    assert generate(drafts).tokens == make_engine(FakeModel(), 12, 0).generate(PROMPT, NUM_TOKENS).tokens


def test_the_time_of_decoding_counts() -> None:
    """Rows share few experts here: the more each costs to decode, the more rows share it. BF16 decodes nothing."""
    present = np.ones((TINY.num_moe_layers, TINY.num_experts), np.bool_)
    chosen = []
    for int_ops in (10**16, 10**11):
        machine = replace(MACHINE, int_ops=int_ops)
        depths = [AutoDepth(costs, machine) for costs in (COSTS, replace(COSTS, coded_bytes=COSTS.expert_bytes // 2))]
        for depth in depths:
            depth.begin()
            for layer in range(TINY.num_moe_layers):
                depth.demand(layer, np.full(TINY.num_experts, 1), num_rows=4)
        chosen.append([depth.choose(32, lambda: present) for depth in depths])
    (plain_fast, coded_fast), (plain_slow, coded_slow) = chosen
    assert plain_fast == plain_slow
    assert coded_slow > coded_fast


def test_drafts_that_are_never_accepted_stop() -> None:
    assert lens(generate(never))[-1] == 0


def test_plain_rounds_are_interrupted_by_a_probe() -> None:
    """Else a draft that has become good would never be measured again."""
    found = lens(generate(never))
    probes = [index for index, length in enumerate(found) if length][-3:]
    assert [found[index] for index in probes] == [2, 2, 2]
    assert [b - a for a, b in itertools.pairwise(probes)] == [9, 9]


def test_a_slow_link_and_good_drafts_make_long_rounds() -> None:
    assert max(lens(generate(plain, link_slowdown=100))) == 32
    assert len(generate(plain, link_slowdown=100).rounds) < len(generate(never, link_slowdown=100).rounds) / 4


def test_a_replay_on_a_dense_recording_chooses_as_the_live_run_did() -> None:
    fake = FakeModel(sometimes)
    recorder = RecordingModel(fake)
    engine = make_engine(fake, 12, 32)
    engine.model, engine.sampler = recorder, FirstToken(engine.sampler)
    dense = recorder.finish(engine.generate(PROMPT, NUM_TOKENS), {DENSE: "every position"})

    engine = make_engine(fake, 12, 1, planner="deadline", depth=AutoDepth(COSTS, MACHINE))
    engine.model = ReplayModel([dense], TINY.num_dense_layers, TINY.num_experts)
    assert engine.generate(PROMPT, NUM_TOKENS) == generate(sometimes)


def test_a_generation_after_an_interrupted_one_has_its_own_forecasts() -> None:
    depth = AutoDepth(COSTS, MACHINE)
    everything = np.ones((TINY.num_moe_layers, TINY.num_experts), np.bool_)
    depth.choose(8, lambda: everything)  # the round is never recorded
    depth.begin()
    engine = make_engine(FakeModel(sometimes), 12, 1, planner="deadline", depth=depth)
    assert engine.generate(PROMPT, NUM_TOKENS).rounds


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_a_choice_is_a_candidate_within_the_limit(data: st.DataObject) -> None:
    depth = AutoDepth(COSTS, MACHINE)
    shape = TINY.num_moe_layers, TINY.num_experts
    for _ in range(data.draw(st.integers(0, 3))):
        for layer in range(TINY.num_moe_layers):
            rows = data.draw(st.integers(1, 33))
            counts = data.draw(st.lists(st.integers(0, rows), min_size=shape[1], max_size=shape[1]))
            depth.demand(layer, np.array(counts), rows)
        drafted = data.draw(st.sampled_from(CANDIDATES))
        depth.verified(drafted, data.draw(st.integers(0, drafted)))
    present = np.array(data.draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])))
    limit = data.draw(st.integers(0, 64))
    chosen = depth.choose(limit, lambda: present.reshape(shape))
    assert chosen in CANDIDATES and chosen <= limit


@given(st.lists(st.tuples(st.integers(0, 32), st.integers(0, 32)), max_size=20))
def test_expected_tokens_grow_with_the_depth_and_never_beyond_it(rounds: list[tuple[int, int]]) -> None:
    acceptance = Acceptance()
    for draft_len, accepted_len in rounds:
        acceptance.add(draft_len, min(draft_len, accepted_len))
    tokens = acceptance.expected_tokens(np.arange(33))
    assert abs(tokens[0] - 1) < 1e-9 and (np.diff(tokens) >= 0).all() and (tokens <= np.arange(33) + 1 + 1e-9).all()


def test_acceptance_forgets_failures_faster_than_success() -> None:
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.add(8, 0)
    assert acceptance.expected_tokens(np.array([8]))[0] < 1.5
    for _ in range(4):
        acceptance.add(8, 8)
    assert acceptance.expected_tokens(np.array([8]))[0] > 6
    acceptance.add(8, 0)
    assert acceptance.expected_tokens(np.array([8]))[0] > 5


def test_a_fixed_depth_ends_with_the_text() -> None:
    assert [Depth(8).choose(limit, lambda: np.ones((1, 1), np.bool_)) for limit in (0, 3, 20)] == [0, 3, 8]


def test_a_name_that_is_no_depth_is_refused() -> None:
    with pytest.raises(SpecterError, match="k='many' is not a depth"):
        compose(["k=many"])
    assert compose(["k=auto"]).is_auto
