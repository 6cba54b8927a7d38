"""Every rival on the device's runtime, in Triton's interpreter or on the device: bits, hits, bytes, swaps."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from rich.console import Console

from specter.build import build_engine
from specter.config import BudgetConfig, DatasetConfig, ModelConfig, RunConfig, SamplingConfig
from specter.errors import SpecterError
from specter.experts.store import RawCodec
from specter.experts.transfer import Backend, SendBack
from specter.kernels.int4_moe import PackedExperts
from specter.models.base import Model
from specter.models.checkpoint import Checkpoint
from specter.models.cuda import bed, live
from specter.models.cuda.arena import DeviceArena
from specter.models.cuda.bed import Bed
from specter.models.cuda.device_pass import DevicePasses
from specter.models.cuda.draft import Draft
from specter.models.cuda.full_size import DTYPE, FullSize
from specter.models.cuda.live import DeviceLive, allocated
from specter.models.cuda.loading import load_store
from specter.models.cuda.memory import DeviceBudget, DeviceUse
from specter.models.cuda.own_draft import OwnMemory
from specter.models.cuda.store import PinnedStore
from specter.models.cuda.target import OUTPUT_ROWS, Target
from specter.models.cuda.weights import GpuKVCache, GpuWeights, tensors_in
from specter.models.cuda.write_back import WriteBack
from specter.models.spec import ExpertId
from specter.resolve import resolve
from specter.session import Replayer, RunResult
from specter.speculation.accept import TokenSampler
from specter.timeline.base import Timeline, Work
from specter.timeline.cuda import CudaTimeline
from specter.timeline.hardware import load_hardware
from specter.timeline.virtual import VirtualTimeline
from tests.cuda.fakes import FakeLocker
from tests.helpers import CONF, load_system, open_live, quantize, write_random
from tests.kernels.test_gpu_decoder import CAPACITY, DEVICE, DRAFT, SPEC, TARGET, Models, _layer, models, tokens_of

__all__ = ["models"]  # the fixture
DEV = torch.device(DEVICE)
IS_CUDA = DEV.type == "cuda"
HARDWARE = load_hardware(CONF / "hardware" / "h200_pcie5.yaml")
FORESEEING = ("lru_next_gate", "mixtral_speculative_loading")
OWN_DRAFT = ("specmoeoff", "specmoeoff_tuned")
RIVALS = (*FORESEEING, "mixtral_offloading", "specmoeoff")
PROMPT = [11]  # the interpreter pays per row


class HostBudget:
    """Stands for a device's memory where there is none."""

    device = DEV

    def __init__(self, num_bytes: int = 2**40) -> None:
        self.num_bytes = num_bytes

    def check(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.num_bytes:
            raise SpecterError(f"{what} needs {num_bytes} bytes", "raise the budget")

    def restart_peaks(self) -> None:
        pass

    def use(self) -> DeviceUse:
        return DeviceUse(0, 0, 0, 0, 0)


def host_budget(num_bytes: int = 2**40) -> DeviceBudget:
    return cast(DeviceBudget, HostBudget(num_bytes))


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
def full(config: RunConfig) -> FullSize:
    directory = Path(config.model.checkpoint)
    checkpoint = Checkpoint.open(directory)
    codec = RawCodec(DTYPE, SPEC.expert_inter, SPEC.hidden)
    store = None
    if not IS_CUDA:
        store = PinnedStore(codec, SPEC.num_moe_layers, SPEC.num_experts, "require", FakeLocker(), lambda: 2**40)
    store, load = load_store(checkpoint, codec, Console(file=io.StringIO()), store=store)
    weights = GpuWeights.load(SPEC, checkpoint.tensor, DEV, DTYPE)
    codes = quantize(SPEC, open_live(directory).store)
    packed = PackedExperts.empty(SPEC, 128, DEV)
    for layer in range(SPEC.num_moe_layers):
        packed.set_layer(layer, *(_layer(part, layer) for part in (codes.gate, codes.up, codes.down)))
    return FullSize(SPEC, checkpoint, codes, "same", checkpoint, codec, store, load, weights, packed)


@pytest.fixture(scope="module")
def device(full: FullSize) -> Iterator[DeviceLive]:
    """On the device clock where there is a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bed, "Target", partial(Target, tuning=TARGET))
        patch.setattr(live, "Bed", partial(Bed, make_draft=partial(Draft, tuning=DRAFT)))
        if not IS_CUDA:
            patch.setattr(live, "CudaTimeline", lambda device, trace: VirtualTimeline(HARDWARE, trace))
        yield DeviceLive(full, DeviceBudget() if IS_CUDA else host_budget(), {})


@pytest.fixture(scope="module")
def results() -> dict[str, RunResult]:
    """What has run. Not run in here: a fixture of a module has no exact product from the interpreter."""
    return {}


def configured(config: RunConfig, name: str) -> RunConfig:
    num_tokens = 3 if name in (*FORESEEING, "mixtral_offloading") else 4  # a round with both plans
    return dataclasses.replace(config, system=load_system(name), max_new_tokens=num_tokens)


def run(name: str, device: DeviceLive, config: RunConfig, results: dict[str, RunResult]) -> RunResult:
    if name not in results:
        results[name] = device.run(resolve(configured(config, name)), PROMPT, ())
    return results[name]


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_is_plain_decoding_and_loads_what_it_loads_on_the_virtual_clock(
    device: DeviceLive, config: RunConfig, results: dict[str, RunResult], name: str
) -> None:
    result, plain = run(name, device, config, results), run("lru", device, config, results)
    tokens = result.generation.tokens
    assert tokens == plain.generation.tokens[: len(tokens)]
    replayed = Replayer().replay(resolve(configured(config, name)), result.recording, result.recording)
    if IS_CUDA:  # what is prefetched depends on when copies arrive
        assert name != "mixtral_offloading" or loads(replayed) == loads(result)
    else:  # on one clock, to the last nanosecond
        assert replayed.generation == result.generation
    assert (result.recording.passes[0].predicted is not None) == (name in FORESEEING)
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
    device: DeviceLive, full: FullSize, config: RunConfig, results: dict[str, RunResult]
) -> None:
    result = run("specmoeoff", device, config, results)
    assert result.metrics["allocated_draft_shared_bytes"] == full.weights.num_bytes
    assert result.metrics["allocated_draft_kv_bytes"] == SPEC.num_layers * CAPACITY * SPEC.kv_width * 2
    one = result.recording.passes[1]
    draft = Draft(full.weights, full.int4, GpuKVCache(SPEC, CAPACITY, DTYPE, DEV), 8, pdl=False, tuning=DRAFT)
    for position, token in enumerate([*PROMPT, one.tokens[0]]):
        draft.begin(token, position)
        draft.step()
    for _ in one.tokens[2:]:
        draft.step()
    num_drafts = len(one.tokens) - 1
    assert num_drafts > 1 and draft.tokens[:num_drafts].tolist() == one.tokens[1:]
    assert np.array_equal(draft.routing[:num_drafts].cpu().numpy(), one.draft_routing)


@pytest.mark.parametrize(("name", "charged"), [("specmoeoff", "BF16"), ("specmoeoff_tuned", "INT4")])
def test_a_record_says_what_the_draft_takes_and_what_it_is_charged(full: FullSize, name: str, charged: str) -> None:
    own = OwnMemory.allocate(full.weights, CAPACITY, host_budget())
    said = allocated(own, load_system(name))
    assert said["draft_copy"] == f"BF16 on the device, charged to the budget as {charged}"
    assert allocated(None, load_system("lru")) == {}


def test_an_own_draft_needs_memory_of_its_own(full: FullSize) -> None:
    budget = host_budget(full.weights.num_bytes)
    with pytest.raises(SpecterError, match="the draft's own weights and KV cache needs"):
        OwnMemory.allocate(full.weights, CAPACITY, budget)
    own = OwnMemory.allocate(full.weights, CAPACITY, host_budget())
    pairs = list(zip(own.weights.tensors(), full.weights.tensors(), strict=True))
    assert len(pairs) > len(full.weights.layers)
    for copied, tensor in pairs:
        assert torch.equal(copied, tensor) and copied.data_ptr() != tensor.data_ptr()


def test_what_the_next_router_foresees_is_the_cpu_decoders_word_and_disturbs_nothing(models: Models) -> None:
    check_foresight(models)


def check_foresight(models: Models) -> None:
    """One pass layer by layer beside the CPU decoder's, foreseeing behind every MoE layer but the last."""
    tokens, target, decoder = tokens_of(3).tolist(), models.target, models.cpu.decoder
    assert target.slot_table is not None
    table, spec = target.slot_table.cpu().numpy(), target.weights.spec
    decoder.reset()
    one, reference = DevicePasses(target).begin(tokens, 0, 3), decoder.target_pass(tokens, 0, 3)
    for layer in range(spec.num_layers - 1):
        routing, expected = one.attend_and_route(layer), reference.attend_and_route(layer)
        moe = layer - spec.num_dense_layers
        if routing is None or expected is None:
            continue
        state = list(tensors_in([target.x, target.scaled, target.scales, target.router, target.shared, target.routing]))
        before = [tensor.clone() for tensor in state]
        foreseen = one.predict_next(layer)
        if IS_CUDA:
            torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(state, before, strict=True))
        assert np.array_equal(routing, expected)
        assert np.array_equal(foreseen, reference.predict_next(layer))
        assert not np.array_equal(foreseen, routing)
        experts = np.unique(routing).tolist()
        for expert in experts:
            decoder.arena.write(expert, models.cpu.store.payload(ExpertId(moe, expert)))
        reference.run_experts(layer, experts, experts)
        reference.combine(layer)
        one.run_experts(layer, experts, table[moe, experts].tolist())
        one.combine(layer)


@pytest.mark.parametrize(("prompt_len", "captured"), [(OUTPUT_ROWS, {1, OUTPUT_ROWS}), (OUTPUT_ROWS + 1, {1})])
def test_a_prompts_pass_is_captured_only_where_prefill_can_launch_it(
    device: DeviceLive, config: RunConfig, monkeypatch: pytest.MonkeyPatch, prompt_len: int, captured: set[int]
) -> None:
    asked: list[set[int]] = []

    def capture(bed: Bed, row_counts: Iterable[int], foresees: bool) -> None:
        asked.append(set(row_counts))
        raise KeyboardInterrupt

    monkeypatch.setattr(Bed, "capture", capture)
    with pytest.raises(KeyboardInterrupt):
        device.run(resolve(dataclasses.replace(config, kv_capacity=128)), [1] * prompt_len, ())
    assert asked == [captured]


class _Dimensions:
    """All that an engine asks of a model while nothing is computed."""

    num_layers, num_dense_layers, num_experts, top_k = (
        SPEC.num_layers, SPEC.num_dense_layers, SPEC.num_experts, SPEC.top_k
    )  # fmt: skip


@pytest.mark.parametrize("name", ["mixtral_offloading", "mixtral_speculative_loading"])
def test_what_a_swap_sends_back_arrives_on_the_host(full: FullSize, config: RunConfig, name: str) -> None:
    config = dataclasses.replace(config, system=load_system(name))
    arena = DeviceArena(5, full.codec, DEV)
    content: dict[int, ExpertId] = {}
    left: list[ExpertId] = []
    opened: list[WriteBack] = []

    def move(expert: ExpertId, slot: int) -> None:
        arena.write(slot, full.store.payload(expert))
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
        assert torch.equal(way.buffers[number % 4], full.store.payload(expert))


def test_a_way_back_needs_a_buffer(full: FullSize) -> None:
    with pytest.raises(SpecterError, match="without a buffer"):
        WriteBack(DeviceArena(1, full.codec, DEV), 0)


def test_runs_alike_share_slots_and_no_run_sees_the_last_ones_experts(
    device: DeviceLive, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(config, max_new_tokens=2)
    tokens = device.run(resolve(config), PROMPT, ()).generation.tokens
    assert device._bed is not None
    bed = device._bed[1]
    assert device.run(resolve(config), PROMPT, ()).generation.tokens == tokens
    assert device._bed[1] is bed
    monkeypatch.setattr(bed, "move", lambda expert, slot: None)
    assert device.run(resolve(config), PROMPT, ()).generation.tokens != tokens
    device.run(resolve(dataclasses.replace(config, budget=BudgetConfig("high", policy="same_experts"))), PROMPT, ())
    assert device._bed[1] is not bed


def test_what_does_not_draft_needs_no_draft_on_the_device(
    device: DeviceLive, full: FullSize, config: RunConfig
) -> None:
    config = dataclasses.replace(config, max_new_tokens=2)
    no_layers = dataclasses.replace(SPEC, num_layers=SPEC.num_dense_layers)
    bare = dataclasses.replace(full, int4=PackedExperts.empty(no_layers, 128, DEV))
    assert full.has_draft and not bare.has_draft
    alone = DeviceLive(bare, device.budget, {})
    assert (
        alone.run(resolve(config), PROMPT, ()).generation.tokens
        == device.run(resolve(config), PROMPT, ()).generation.tokens
    )
    with pytest.raises(SpecterError, match="no draft"):
        alone.run(resolve(dataclasses.replace(config, system=load_system("specter"), max_new_tokens=3)), PROMPT, ())


@pytest.mark.gpu
@pytest.mark.skipif(not IS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("tier", ["low", "high", "smallest"])
@pytest.mark.parametrize("name", [*RIVALS, "specmoeoff_tuned", "on_demand"])
def test_rivals_on_the_device_are_plain_decoding(device: DeviceLive, config: RunConfig, name: str, tier: str) -> None:
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
