"""Sections with experts in host memory and device memory capped; the link, and the host's time per call.

The host issues a copy faster than the link carries it, or the link idles.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from bench.report import HBM_BYTES_PER_S, Report, Row
from specter.errors import SpecterError
from specter.models.cuda.arena import DeviceArena, make_mover, open_arena
from specter.models.cuda.loaded_model import LoadedModel
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.prefill import LayerStream
from specter.models.cuda.runner import ModelRunner, RunnerOptions
from specter.models.cuda.store import PinnedStore
from specter.models.spec import ExpertId
from specter.sample import MIN_REPEATS, Sample, device_ms, host_ms
from specter.timeline.base import difference
from specter.timeline.cuda import CudaTimeline

SHORT_PROMPT = 16
LONG_PROMPT = 2000
KV_CAPACITY = 2048
_CALLS = 40  # of the host in a row: fewer than a driver queues before it blocks


class StreamingBench:
    """Loading, the machine's rates, and prefill with nothing resident."""

    def __init__(self, model: LoadedModel, budget: DeviceBudget, report: Report, prompts: list[list[int]]) -> None:
        self.model, self.budget, self.report, self.prompts = model, budget, report, prompts
        self.spec, self.device = model.spec, budget.device
        self.link_bytes_per_s = 0.0
        self.short_logits: torch.Tensor | None = None  # fp32 [V], after the first 16 tokens of the first prompt

    def loading(self) -> None:
        load, layer_bytes = self.model.load, self.model.plain_store.layer_bytes
        rates = Sample(load.layer_s).rate(layer_bytes / 1e9)
        note = f"per layer; all {load.num_bytes / 1e9:.1f} GB: {load.gb_per_s:.2f} GB/s"
        note += "" if load.is_pinned else "; NOT page-locked"
        self.report.add(Row("load experts into the store", "GB/s", rates, goal=3.0, is_rate=True, note=note))
        self.report.summary["store_load_gb_per_s"] = load.gb_per_s
        self.report.facts["store"] = {k: v for k, v in dataclasses.asdict(load).items() if k != "layer_s"}

    def rates(self) -> None:
        note = f"read + written; floors use {HBM_BYTES_PER_S / 1e12} TB/s"
        self.report.add(Row("device memory, copy", "TB/s", copy_tb_per_s(self.device), note=note))
        store = self.model.plain_store
        arena = open_arena(2 * store.num_experts, self.model.codec, self.budget)

        def copy(index: int) -> None:
            arena.write_run(index % 2 * store.num_experts, store.arena(index % store.num_layers))

        link = device_ms(copy, per_repeat=4).rate(store.layer_bytes / 1e6)
        self.report.add(Row("link, pinned host to device", "GB/s", link, note="one MoE layer per copy"))
        self.link_bytes_per_s = link.median * 1e9

    def prefill(self) -> None:
        store = self.model.plain_store
        options = RunnerOptions(2 * store.num_experts, KV_CAPACITY, max_rows=LONG_PROMPT)
        runner = ModelRunner(self.model, self.budget, options)
        timeline = CudaTimeline(self.device)
        assert isinstance(runner.arena, DeviceArena)
        stream = LayerStream(store, runner.arena, timeline)
        text = [token for prompt in self.prompts for token in prompt]
        floor = store.num_bytes / self.link_bytes_per_s * 1e3
        for num_tokens in (SHORT_PROMPT, LONG_PROMPT):
            tokens = (text * 3)[:num_tokens]

            def once(tokens: list[int] = tokens) -> None:
                stream.prefill(self.spec, runner.target_pass(tokens, 0, 1))

            sample = host_ms(once)
            row = Row(
                f"prefill, {num_tokens} tokens, nothing resident", "ms", sample, floor, 1.3 * floor,
                note=f"one pass over {store.num_bytes / 1e9:.1f} GB at the link's rate",
            )  # fmt: skip
            self.report.add(row)
            self.report.summary[f"prefill{num_tokens}_over_floor"] = row.over_floor
            if num_tokens == SHORT_PROMPT:
                self.short_logits = runner.target.logits[0].clone()
            before = timeline.totals()
            once()
            torch.cuda.synchronize()
            lanes = difference(timeline.totals(), before)
            self.report.facts[f"prefill {num_tokens}: lanes"] = dataclasses.asdict(lanes)

    def cap(self) -> None:
        """Checks that the cap has held so far, and that more than the cap is refused."""
        use = self.budget.use()
        self.report.facts["capped"] = dataclasses.asdict(use) | {
            "honoured": use.peak_reserved_bytes <= use.cap_bytes,
            "what": "weights, INT4 experts, streaming prefill of 2000 tokens",
        }
        num_slots = use.cap_bytes // self.model.codec.payload_bytes + 1
        try:
            open_arena(num_slots, self.model.codec, self.budget)
        except SpecterError as refusal:
            self.report.facts["refused beyond the cap"] = refusal.what
            return
        raise AssertionError(f"{num_slots} slots were allocated under a cap of {use.cap_bytes} bytes")


def copy_tb_per_s(device: torch.device) -> Sample:
    """The rate of copies of 4 GB on the device, read and written bytes."""
    source, target = (torch.empty(4 * 10**9, dtype=torch.uint8, device=device) for _ in range(2))
    source.random_()
    return device_ms(lambda _: target.copy_(source), per_repeat=5).rate(8)


def link_rows(model: LoadedModel, budget: DeviceBudget) -> list[Row]:
    """Plain pinned copies, expert by expert and a whole layer at once, and the host's time per call."""
    store = model.plain_store
    arena = open_arena(store.num_experts, model.codec, budget)
    move = make_mover(arena, store)
    single = device_ms(lambda index: move(_expert(store, index), index % 2), per_repeat=100)
    layers = device_ms(lambda index: arena.write_run(0, store.arena(index % store.num_layers)), per_repeat=4)
    one, whole = single.rate(store.codec.payload_bytes / 1e6), layers.rate(store.layer_bytes / 1e6)
    return [
        Row("link, one expert per copy", "GB/s", one, note="pinned host to device, back to back"),
        *host_rows(arena, store),
        Row("link, one layer per copy", "GB/s", whole, note=f"{store.num_experts} adjacent experts"),
    ]


def host_rows(arena: DeviceArena, store: PinnedStore) -> list[Row]:
    """The host's time per call, calls in a row while copies are in flight; µs."""
    stream, compute = torch.cuda.Stream(), torch.cuda.current_stream()
    move = make_mover(arena, store)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_CALLS)]

    num_slots = arena.num_slots

    def copies(index: int) -> None:
        move(_expert(store, index), index % num_slots)

    calls: dict[str, Callable[[int], object]] = {
        "one expert's copy, issued": copies,
        "one expert's copy, issued by Tensor.copy_": lambda index: arena.write(
            index % num_slots, store.payload(_expert(store, index))
        ),
        "an event, recorded": lambda index: events[index].record(stream),
        "an event, asked": lambda index: events[index].query(),
        "an event, waited for by another stream": lambda index: compute.wait_event(events[index]),
    }
    rows = []
    with torch.cuda.stream(stream):
        for name, call in calls.items():
            values = []
            for repeat in range(-1, MIN_REPEATS):
                copies(0)
                start = time.perf_counter()
                for index in range(_CALLS):
                    call(index)
                if repeat >= 0:
                    values.append((time.perf_counter() - start) / _CALLS * 1e6)
                torch.cuda.synchronize()
            rows.append(Row(f"host, {name}", "us", Sample(tuple(values)), note="host clock"))
    return rows


def _expert(store: PinnedStore, index: int) -> ExpertId:
    layer, expert = divmod(index, store.num_experts)
    return ExpertId(layer % store.num_layers, expert)
