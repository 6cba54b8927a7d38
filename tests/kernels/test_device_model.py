"""The engine over the device model, in the interpreter or on a device: pinned I/O, passes, generations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specter.engine import Engine
from specter.errors import SpecterError
from specter.experts.cache import ExpertCache
from specter.experts.policies.base import PLANNERS, NextLayerPredictor, Pool, layer_quotas
from specter.experts.policies.lru import LruEviction
from specter.experts.residency import Residency
from specter.experts.transfer import Backend, Mover, Transfer
from specter.kernels import pinned_io
from specter.models.base import Proposal, TargetPass
from specter.models.cuda.draft import ByExpertDraft, Draft, UnfusedDraft
from specter.models.cuda.runner import ModelRunner, RunnerOptions
from specter.models.spec import ExpertId
from specter.recording import RecordingModel
from specter.speculation.accept import TokenSampler
from specter.speculation.depth import Depth
from specter.timeline.base import Timeline
from specter.timeline.costs import CostModel
from specter.timeline.cuda import CudaTimeline
from specter.timeline.hardware import Hardware
from specter.timeline.stress import StressedTimeline
from specter.timeline.virtual import VirtualTimeline
from tests.cuda.fakes import any_budget
from tests.kernels.test_gpu_decoder import CAPACITY, DEVICE, DRAFT, SPEC, Models, models, tokens_of

__all__ = ["models"]  # the fixture
DEV = torch.device(DEVICE)
HARDWARE = Hardware("test", 10**12, 1, 10**12, 10**9, 1000, 1000, 1000, 1000, "test")


@pytest.mark.parametrize("size", [1, 17, 1024, 2500])
def test_a_pinned_copy_arrives_whole(size: int) -> None:
    sent = torch.arange(size, dtype=torch.int16, device=DEV)
    room = pinned_io.pinned_zeros((size + 1,), torch.int16, DEV)
    pinned_io.copy_pinned(sent, room[:size])
    if DEV.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(room[:size], sent.cpu()) and room[size] == 0


def test_a_ring_keeps_its_order_however_far_the_device_lags() -> None:
    ring = pinned_io.PinnedRing(4, 5, DEV)
    received = []
    for turn in range(3):
        for index in range(3):  # ahead by three
            ring.write(-1, [index, 4], [10 * turn + index, 7])
        for index in range(3):
            ring.read_next()
            expected = [-1, -1, -1, -1, 7]
            expected[index] = 10 * turn + index
            received.append(ring.row.tolist() == expected)
        if turn == 1:
            ring.restart()
    assert received == [True] * 9


def make_runner(models: Models, num_slots: int, kv_capacity: int = CAPACITY, **options: Any) -> ModelRunner:
    return ModelRunner(
        models.loaded, any_budget(), RunnerOptions(num_slots, kv_capacity, max_rows=16, max_draft_len=8, **options)
    )


def runner_with_all(models: Models) -> tuple[ModelRunner, NDArray[np.int64]]:
    """A runner whose slots hold every expert, in a random order, and its slot table [MoE layers, E]."""
    spec = models.weights.spec
    num_slots = spec.num_moe_layers * spec.num_experts
    runner = make_runner(models, num_slots)
    table = np.random.default_rng(1).permutation(num_slots).reshape(spec.num_moe_layers, -1)
    for layer, slots in enumerate(table.tolist()):
        for expert, slot in enumerate(slots):
            runner.move(ExpertId(layer, expert), slot)
    return runner, table


def synchronize() -> None:
    if DEV.type == "cuda":
        torch.cuda.synchronize()


def test_waves_from_the_host_are_the_resident_pass(models: Models) -> None:
    tokens, spec = tokens_of(2).tolist(), models.weights.spec
    resident = make_runner(models, spec.num_moe_layers * spec.num_experts, is_resident=True)
    one: TargetPass = resident.target_pass(tokens, 0, 2)
    assert [one.attend_and_route(layer) for layer in range(SPEC.num_layers)] == [None] * SPEC.num_layers
    synchronize()
    expected = list(one.outputs())
    runner, table = runner_with_all(models)
    one = runner.target_pass(tokens, 0, 2)
    for layer in range(SPEC.num_layers):
        routing = one.attend_and_route(layer)
        assert (routing is None) == (layer < SPEC.num_dense_layers)
        if routing is None:
            continue
        runner.target.results.fill_(torch.nan)
        synchronize()
        experts = np.unique(routing).tolist()
        for wave in (experts[::2], experts[1::2]):
            one.run_experts(layer, wave, table[layer - SPEC.num_dense_layers, wave].tolist())
        one.combine(layer)
    outputs = one.outputs()
    synchronize()
    assert list(outputs) == expected
    last = resident.target_pass(tokens, 0, 1)
    last.attend_and_route(0)
    synchronize()
    assert list(last.outputs()) == expected[1:]


class RunAsGraph:
    """Stands in for a graph where there is no CUDA: capturing runs the function once, as a warm-up does."""

    def __init__(self, run: Callable[[], object]) -> None:
        run()
        self.replay = run


def test_a_short_pass_is_launched_as_a_longer_one_that_was_captured(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_short_pass(models, monkeypatch)


def check_short_pass(models: Models, monkeypatch: pytest.MonkeyPatch) -> int:
    """A pass gives the same result with and without a padding row, independent of what capturing read.

    Returns how many results of the padding row were read without having been written.
    """
    tokens, spec = tokens_of(2, seed=4).tolist(), models.weights.spec
    outputs, routings, num_left_out = [], [], 0
    for captured in ((), (1, 3)):
        runner, table = runner_with_all(models)
        if DEV.type == "cpu":
            monkeypatch.setattr("specter.models.cuda.runner.Graph", RunAsGraph)
            monkeypatch.setattr(runner, "_uses_graphs", True)
        target = runner.target
        target.results.fill_(torch.nan)  # as of slots that hold nothing yet
        runner.capture(captured)
        assert len(runner.graphs) == len(captured) * (2 + spec.num_layers + spec.num_moe_layers)
        one = runner.target_pass(tokens, 0, 2)
        for layer in range(spec.num_layers):
            routing = one.attend_and_route(layer)
            synchronize()
            if routing is not None:
                assert routing.shape == (2, spec.top_k)
                routings.append(routing.copy())
                experts = np.unique(routing).tolist()
                if captured and layer + 1 < spec.num_layers:
                    num_left_out += len(set(target.routing.chosen[2].tolist()) - set(experts))
                one.run_experts(layer, experts, table[layer - spec.num_dense_layers, experts].tolist())
                one.combine(layer)
        tokens_out = one.outputs()
        synchronize()
        outputs.append(list(tokens_out))
    assert outputs[0] == outputs[1] and len(outputs[0]) == 2
    half = len(routings) // 2
    assert all((mine == other).all() for mine, other in zip(routings[:half], routings[half:], strict=True))
    assert runner.num_launched(2, CAPACITY - 3, 2) == 3 and runner.num_launched(2, CAPACITY - 2, 2) == 2
    assert runner.num_launched(2, 0, 1) == 2, "the outputs of a graph are of all its rows"
    return num_left_out


def test_captured_parts_are_replayed_and_captured_once(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class FakeGraph:
        def __init__(self, run: Callable[[], object]) -> None:
            made.append("captured")

        def replay(self) -> None:
            made.append("replayed")

    runner = make_runner(models, 4)
    monkeypatch.setattr("specter.models.cuda.runner.Graph", FakeGraph)
    monkeypatch.setattr(runner, "_uses_graphs", True)
    runner.capture({2})
    num_parts = 2 + SPEC.num_layers + SPEC.num_moe_layers
    assert made == ["captured"] * num_parts
    runner.capture({2}, predicts_next=True)
    assert made == ["captured"] * (num_parts + SPEC.num_moe_layers - 1), "only what was missing"
    runner.capture({2}, predicts_next=True)
    made.clear()
    one = runner.target_pass([1, 2], 0, 2)
    for layer in range(SPEC.num_layers):
        one.attend_and_route(layer)
        if layer >= SPEC.num_dense_layers:
            if layer + 1 < SPEC.num_layers:
                one.predict_next(layer)
            one.run_experts(layer, [0], [0])
            one.combine(layer)
    one.outputs()
    assert made == ["replayed"] * (SPEC.num_layers + 3 * SPEC.num_moe_layers)


def test_a_pass_that_does_not_fit_is_refused(models: Models) -> None:
    with pytest.raises(SpecterError, match="17 rows"):
        make_runner(models, 4).target_pass([1] * 17, 0, 1)


def engine(
    models: Models, k: int, num_slots: int, stress_seed: int | None = None, mover: Mover | None = None
) -> Engine:
    """On the device clock where there is a device, graphs included."""
    spec = models.weights.spec
    runner = make_runner(models, num_slots)
    runner.capture({k + 1})
    timeline: Timeline = VirtualTimeline(HARDWARE)
    if DEV.type == "cuda":
        timeline = CudaTimeline() if stress_seed is None else StressedTimeline(seed=stress_seed)
    costs = CostModel(spec, 16, CAPACITY)
    pool = Pool(layer_quotas(num_slots, spec.num_moe_layers), spec.num_experts, costs.payload_bytes)
    transfer = Transfer(Backend(timeline, mover or runner.move), lambda expert: costs.payload_bytes)
    cache = ExpertCache(Residency(num_slots), LruEviction(pool), transfer)
    planner = PLANNERS["deadline" if k else "none"](pool)
    return Engine(
        RecordingModel(runner), TokenSampler(), cache, timeline, costs, planner, Depth(k), NextLayerPredictor()
    )


def test_speculation_on_the_device_is_plain_decoding(models: Models) -> None:
    prompt, num_tokens = tokens_of(2).tolist(), 3 if DEV.type == "cpu" else 24
    plain = engine(models, 0, 5).generate(prompt, num_tokens)
    speculative = engine(models, 2, 4).generate(prompt, num_tokens)
    assert speculative.tokens == plain.tokens
    assert len(speculative.rounds) < num_tokens - 1


@pytest.mark.gpu
@pytest.mark.skipif(DEV.type != "cuda", reason="no CUDA device")
@pytest.mark.parametrize("seed", range(4))
def test_copies_may_come_late_and_in_any_order(models: Models, seed: int) -> None:
    prompt = tokens_of(2).tolist()
    assert engine(models, 4, 4, seed).generate(prompt, 24).tokens == engine(models, 0, 5).generate(prompt, 24).tokens


@pytest.mark.gpu
@pytest.mark.skipif(DEV.type != "cuda", reason="no CUDA device")
def test_an_interrupted_round_leaves_an_engine_that_works(models: Models) -> None:
    prompt = tokens_of(2).tolist()
    one = engine(models, 2, 4)
    expected = one.generate(prompt, 24).tokens

    commits = []

    def interrupt(tokens: list[int]) -> None:
        commits.append(tokens)
        if len(commits) == 3:  # prefill's, and two rounds'
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.generate(prompt, 24, interrupt)
    assert one.generation is not None and len(one.generation.rounds) == 2
    assert one.generate(prompt, 24).tokens == expected


def test_an_unread_slot_table_does_not_reach_the_next_text(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(ring: pinned_io.PinnedRing) -> None:
        raise KeyboardInterrupt

    prompt = tokens_of(2).tolist()  # as many rows as no graph was captured for
    one = engine(models, 0, 5)
    expected = one.generate(prompt, 2).tokens
    with monkeypatch.context() as patch:
        patch.setattr(pinned_io.PinnedRing, "read_next", interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.generate(prompt, 2)
    assert one.generate(prompt, 2).tokens == expected


def test_a_copy_that_fails_is_named_and_the_finished_rounds_are_kept(models: Models) -> None:
    def refuse(expert: ExpertId, slot: int) -> None:
        raise SpecterError(f"payload of {expert} is gone", "get it back")

    one = engine(models, 0, 5, mover=refuse)
    with pytest.raises(SpecterError, match="payload of"):
        one.generate([1], 2)
    assert one.generation is not None and one.generation.rounds == []


def test_the_drafts_of_ablations_compute_the_same(models: Models) -> None:
    check_ablations(models)


def check_ablations(models: Models) -> None:
    """They differ in speed alone."""
    for make in (ByExpertDraft, partial(UnfusedDraft, models.loaded.int4_layers())):
        check_ablation(models, make(models.weights, models.draft.experts, models.cache, 4, pdl=False, tuning=DRAFT))


def check_ablation(models: Models, draft: Draft) -> None:
    for one in (models.draft, draft):
        one.begin(5, 0)
        one.step()
    assert torch.equal(draft.routing[0], models.draft.routing[0])
    assert torch.equal(draft.counts, models.draft.counts)
    assert (draft.logits - models.draft.logits).norm() < 2e-3 * models.draft.logits.norm()


def test_a_runner_can_draft_without_fused_kernels(models: Models) -> None:
    drafted = []
    for options in ({}, {"is_fused": False}, {"is_by_expert": True}):
        runner = make_runner(models, 4, **options)
        runner.begin_draft(5, 0, lambda output, position: Proposal(0))
        steps = [runner.draft_step() for _ in range(2)]
        synchronize()
        drafted.append([(step.proposal.token, step.routing.tolist()) for step in steps])
    assert drafted[0] == drafted[1] == drafted[2]
