"""Every rival on the device's runtime, in Triton's interpreter or on the device: bits, hits, bytes, swaps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from specter.config import BudgetConfig, DatasetConfig, ModelConfig, RunConfig, SamplingConfig
from specter.errors import SpecterError
from specter.experts.transfer import Backend, SendBack
from specter.models.base import Model
from specter.models.cuda import model as cuda_model
from specter.models.cuda.arena import DeviceArena, WriteBack
from specter.models.cuda.draft import Draft
from specter.models.cuda.loaded_model import DTYPE, LoadedModel
from specter.models.cuda.model import CudaModel, allocated
from specter.models.cuda.runner import ModelRunner
from specter.models.cuda.weights import GpuKVCache, OwnMemory, tensors_in
from specter.models.spec import ExpertId
from specter.resolve import resolve
from specter.session import Replayer, RunResult, build_engine
from specter.speculation.accept import TokenSampler
from specter.timeline.base import Timeline, Work
from specter.timeline.cuda import CudaTimeline
from specter.timeline.hardware import Hardware
from specter.timeline.virtual import VirtualTimeline
from specter.typed import load_typed
from tests.cuda.fakes import any_budget, host_budget
from tests.helpers import CONF, load_system, open_live, write_random
from tests.kernels.test_device_model import runner_with_all
from tests.kernels.test_gpu_decoder import CAPACITY, DEVICE, DRAFT, SPEC, Models, load_tiny, models, tokens_of

__all__ = ["models"]  # the fixture
DEV = torch.device(DEVICE)
IS_CUDA = DEV.type == "cuda"
HARDWARE = load_typed(Hardware, CONF / "hardware" / "h200_pcie5.yaml")
PREDICTING = ("lru_next_gate", "mixtral_speculative_loading")
OWN_DRAFT = ("specmoeoff", "specmoeoff_tuned")
BASELINES = (*PREDICTING, "mixtral_offloading", "specmoeoff")
PROMPT = [11]  # the interpreter pays per row


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    directory = tmp_path_factory.mktemp("tiny")
    write_random(directory, SPEC)
    return RunConfig(
        model=ModelConfig("tiny", str(directory), "standin", "", "itself", "", {"low": 2.5, "high": 5}),
        system=load_system("lru"),
        budget=BudgetConfig("low", policy="same_experts"),
        dataset=DatasetConfig("none", "shipped", "", ""),
        sampling=SamplingConfig("greedy"),
        hardware=HARDWARE,
        clock="device",
        k=2,
        max_new_tokens=3,
        warmup_tokens=0,
        kv_capacity=CAPACITY,
    )


@pytest.fixture(scope="module")
def loaded(config: RunConfig) -> LoadedModel:
    directory = Path(config.model.checkpoint)
    return load_tiny(directory, open_live(directory), DTYPE)


@pytest.fixture
def device(served: CudaModel, monkeypatch: pytest.MonkeyPatch) -> CudaModel:
    """On the device clock where there is a device."""
    if not IS_CUDA:
        monkeypatch.setattr(cuda_model, "make_timeline", lambda config, device: VirtualTimeline(HARDWARE, config.trace))
        monkeypatch.setattr(ModelRunner, "link_bytes_per_s", lambda runner: 10**9)
    return served


@pytest.fixture(scope="module")
def served(loaded: LoadedModel) -> CudaModel:
    return CudaModel(loaded, any_budget(), {})


@pytest.fixture(scope="module")
def results() -> dict[str, RunResult]:
    """What has run. Not run in here: a fixture of a module has no exact product from the interpreter."""
    return {}


def configured(config: RunConfig, name: str) -> RunConfig:
    num_tokens = 3 if name in (*PREDICTING, "mixtral_offloading") else 4  # a round with both plans
    return dataclasses.replace(config, system=load_system(name), max_new_tokens=num_tokens)


def run(name: str, device: CudaModel, config: RunConfig, results: dict[str, RunResult]) -> RunResult:
    if name not in results:
        results[name] = device.run(resolve(configured(config, name)), PROMPT, ())
    return results[name]


@pytest.mark.parametrize("name", BASELINES)
def test_a_rival_is_plain_decoding_and_loads_what_it_loads_on_the_virtual_clock(
    device: CudaModel, config: RunConfig, results: dict[str, RunResult], name: str
) -> None:
    result, plain = run(name, device, config, results), run("lru", device, config, results)
    tokens = result.generation.tokens
    assert tokens == plain.generation.tokens[: len(tokens)]
    replayed = Replayer().replay(resolve(configured(config, name)), result.recording, result.recording)
    if IS_CUDA:  # what is prefetched depends on when copies arrive
        assert name != "mixtral_offloading" or loads(replayed) == loads(result)
    else:  # on one clock, to the last nanosecond
        assert replayed.generation == result.generation
    assert (result.recording.passes[0].predicted is not None) == (name in PREDICTING)
    assert (loads(result)["writeback"] > 0) == name.startswith("mixtral")
    assert (sum(one.num_prefetched for one in result.generation.rounds) > 0) == (name != "mixtral_offloading")


def loads(result: RunResult) -> dict[str, int]:
    rounds = result.generation.rounds
    return {
        "hits": sum(one.num_hits + one.num_late_hits for one in rounds),
        "misses": sum(one.num_misses for one in rounds),
        "fetched": sum(one.fetch_bytes for one in rounds),
        "writeback": sum(one.writeback_bytes for one in rounds),
    }


def test_an_own_draft_works_on_a_copy_and_reads_the_prompt_itself(
    device: CudaModel, loaded: LoadedModel, config: RunConfig, results: dict[str, RunResult]
) -> None:
    result = run("specmoeoff", device, config, results)
    assert result.metrics["allocated_draft_shared_bytes"] == loaded.weights.num_bytes
    assert result.metrics["allocated_draft_kv_bytes"] == SPEC.num_layers * CAPACITY * SPEC.kv_width * 2
    one = result.recording.passes[1]
    draft = Draft(loaded.weights, loaded.int4, GpuKVCache(SPEC, CAPACITY, DTYPE, DEV), 8, pdl=False, tuning=DRAFT)
    for position, token in enumerate([*PROMPT, one.tokens[0]]):
        draft.begin(token, position)
        draft.step()
    for _ in one.tokens[2:]:
        draft.step()
    num_drafts = len(one.tokens) - 1
    assert num_drafts > 1 and draft.tokens[:num_drafts].tolist() == one.tokens[1:]
    assert np.array_equal(draft.routing[:num_drafts].cpu().numpy(), one.draft_routing)


@pytest.mark.parametrize(("name", "charged"), [("specmoeoff", "BF16"), ("specmoeoff_tuned", "INT4")])
def test_a_record_says_what_the_draft_takes_and_what_it_is_charged(
    loaded: LoadedModel, name: str, charged: str
) -> None:
    own = OwnMemory.allocate(loaded.weights, CAPACITY, host_budget())
    said = allocated(own, load_system(name))
    assert said["draft_copy"] == f"BF16 on the device, charged to the budget as {charged}"
    assert allocated(None, load_system("lru")) == {}


def test_an_own_draft_needs_memory_of_its_own(loaded: LoadedModel) -> None:
    budget = host_budget(loaded.weights.num_bytes)
    with pytest.raises(SpecterError, match="the draft's own weights and KV cache needs"):
        OwnMemory.allocate(loaded.weights, CAPACITY, budget)
    own = OwnMemory.allocate(loaded.weights, CAPACITY, host_budget())
    pairs = list(zip(own.weights.tensors(), loaded.weights.tensors(), strict=True))
    assert len(pairs) > len(loaded.weights.layers)
    for copied, tensor in pairs:
        assert torch.equal(copied, tensor) and copied.data_ptr() != tensor.data_ptr()


def test_the_predicted_routing_is_the_cpu_decoders_and_disturbs_nothing(models: Models) -> None:
    check_prediction(models)


def check_prediction(models: Models) -> None:
    """One pass layer by layer beside the CPU decoder's, predicting after every MoE layer but the last."""
    runner, table = runner_with_all(models)
    tokens, target, decoder = tokens_of(3).tolist(), runner.target, models.cpu.decoder
    spec = target.weights.spec
    decoder.reset()
    one, reference = runner.target_pass(tokens, 0, 3), decoder.target_pass(tokens, 0, 3)
    for layer in range(spec.num_layers - 1):
        routing, expected = one.attend_and_route(layer), reference.attend_and_route(layer)
        moe = layer - spec.num_dense_layers
        if routing is None or expected is None:
            continue
        state = list(tensors_in([target.x, target.scaled, target.scales, target.router, target.shared, target.routing]))
        before = [tensor.clone() for tensor in state]
        predicted = one.predict_next(layer)
        if IS_CUDA:
            torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(state, before, strict=True))
        assert np.array_equal(routing, expected)
        assert np.array_equal(predicted, reference.predict_next(layer))
        assert not np.array_equal(predicted, routing)
        experts = np.unique(routing).tolist()
        for expert in experts:
            decoder.arena.write(expert, models.cpu.store.payload(ExpertId(moe, expert)))
        reference.run_experts(layer, experts, experts)
        reference.combine(layer)
        one.run_experts(layer, experts, table[moe, experts].tolist())
        one.combine(layer)


class _Dimensions:
    """A model that computes nothing, with all calls of the engine."""

    num_layers, num_dense_layers, num_experts, top_k = (
        SPEC.num_layers, SPEC.num_dense_layers, SPEC.num_experts, SPEC.top_k
    )  # fmt: skip


@pytest.mark.parametrize("name", ["mixtral_offloading", "mixtral_speculative_loading"])
def test_what_a_swap_sends_back_arrives_on_the_host(loaded: LoadedModel, config: RunConfig, name: str) -> None:
    config = dataclasses.replace(config, system=load_system(name))
    arena = DeviceArena(5, loaded.codec, DEV)
    content: dict[int, ExpertId] = {}
    left: list[ExpertId] = []
    opened: list[WriteBack] = []

    def move(expert: ExpertId, slot: int) -> None:
        arena.write(slot, loaded.store.payload(expert))
        content[slot] = expert

    def open_write_back(num_buffers: int) -> SendBack:
        opened.append(WriteBack(arena, num_buffers))

        def write_back(slot: int) -> None:
            opened[0](slot)
            left.append(content[slot])

        return write_back

    timeline: Timeline = CudaTimeline(DEV) if IS_CUDA else VirtualTimeline(HARDWARE)
    model = cast(Model, _Dimensions())
    backend = Backend(timeline, move, open_write_back)
    engine = build_engine(resolve(config), model, TokenSampler(), backend)
    rng, work = np.random.default_rng(0), Work("none", 0, 0, 1, 1)
    for turn in range(20):
        layer = turn % SPEC.num_moe_layers
        _, known = timeline.compute(work, lambda: None)
        timeline.wait(known)
        if engine.predictor.is_active:
            predicted = rng.integers(0, SPEC.num_experts, (1, SPEC.top_k), dtype=np.int16)
            plan = engine.predictor.plan(layer, predicted, SPEC.num_experts, engine.cache.is_present)
            engine.cache.submit(plan, known)
            engine.cache.feed()
        counts = np.zeros(SPEC.num_experts, np.int64)
        counts[rng.choice(SPEC.num_experts, SPEC.top_k, replace=False)] = 1
        for wave in engine.cache.waves(layer, counts, known):
            _, ran = timeline.compute(work, lambda: None, after=wave.after)
            engine.cache.release(wave, ran)
    timeline.drain()
    num_loads = engine.cache.counters.num_misses + engine.cache.counters.num_prefetched
    assert len(left) == num_loads - arena.num_slots > 2 * config.system.num_buffers
    assert (engine.cache.counters.num_prefetched > 0) == (engine.predictor.is_active)
    assert timeline.totals().copied_bytes == (num_loads + len(left)) * engine.costs.payload_bytes
    [way] = opened
    assert len(way.buffers) == config.system.num_buffers == 4
    for number, expert in list(enumerate(left))[-4:]:
        assert torch.equal(way.buffers[number % 4], loaded.store.payload(expert))


def test_a_way_back_needs_a_buffer(loaded: LoadedModel) -> None:
    with pytest.raises(SpecterError, match="without a buffer"):
        WriteBack(DeviceArena(1, loaded.codec, DEV), 0)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("tier", ["low", "high", "smallest"])
@pytest.mark.parametrize("name", [*BASELINES, "specmoeoff_tuned", "on_demand"])
def test_rivals_on_the_device_are_plain_decoding(device: CudaModel, config: RunConfig, name: str, tier: str) -> None:
    config = dataclasses.replace(
        config, system=load_system(name), budget=BudgetConfig(tier, policy="same_experts"), max_new_tokens=24,
        warmup_tokens=4,
    )  # fmt: skip
    result = device.run(resolve(config), PROMPT, [3, 1])
    assert result.generation.clock == "device"
    assert device.agrees_with_plain(resolve(config), result)
    assert (loads(result)["writeback"] > 0) == name.startswith("mixtral")
    if name in OWN_DRAFT:
        assert any(one.accepted_len for one in result.generation.rounds)
