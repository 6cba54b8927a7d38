"""The samples of a profile, measured on this machine's GPU: the link and the device alone, then the runtime's own
graphs on the first layers of a full-size model."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from specter.calibrate.residual_inputs import Source, Timed
from specter.codecs.residual.encode import encode_layer
from specter.config import RunConfig
from specter.kernels.pinned_io import pinned_zeros
from specter.memory import buy_slots
from specter.models.cuda.draft import Draft
from specter.models.cuda.graph import Graph
from specter.models.cuda.loaded_model import LoadedModel, load_model
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.model import CudaModel
from specter.models.cuda.no_gc import no_gc
from specter.models.cuda.runner import ModelRunner, RunnerOptions
from specter.models.full_size import FULL_SIZE
from specter.resolve import ResolvedRun
from specter.sample import MIN_REPEATS, Sample, device_ms
from specter.session import Replayer
from specter.timeline.base import Work
from specter.timeline.costs import CostModel
from specter.timeline.cuda import CudaTimeline
from specter.timeline.hardware import Hardware

LINK_BYTES = (10**6, 4 * 10**6, 17_301_504, 64 * 10**6, 157_286_400)  # 17.3 and 157 MB: an expert of DeepSeek, of Phi
HBM_BYTES = 2 * 10**9
FLOPS_SIZE = 8192
NUM_KERNELS = 64  # of the longer graph of small kernels
NUM_CALLS = 40  # of the host in a row: fewer than a driver queues before it blocks
NUM_LAYERS = 3  # of the model: one dense and two MoE layers of DeepSeek-V2-Lite
ROWS = 1
NUM_WAVES = 20  # in a row
WAVE_EXPERTS = (1, 2, 4, 6)
DRAFT_STEPS = 16
NUM_DECODED = 16  # residual experts a launch
KV_CAPACITY = 256
AMOUNTS = {"device copy": 2 * HBM_BYTES, "product": 2 * FLOPS_SIZE**3}  # bytes, operations
PROMPT, WARMUP = range(1, 17), range(17, 33)  # any tokens


def host_us(run: Callable[[], object], repeats: int = MIN_REPEATS) -> Sample:
    """The host's time of one call, `NUM_CALLS` in a row while the device works through them, us."""
    values = []
    for repeat in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(NUM_CALLS):
            run()
        if repeat:
            values.append((time.perf_counter() - start) / NUM_CALLS * 1e6)
    torch.cuda.synchronize()
    return Sample(tuple(values))


def copies(device: torch.device) -> dict[str, dict[int, Sample]]:
    """ms of copies by bytes: page-locked to the device and back, and from ordinary memory."""
    largest = max(LINK_BYTES)
    on_device = torch.zeros(largest, dtype=torch.uint8, device=device)
    locked, ordinary = pinned_zeros((largest,), torch.uint8, device), torch.zeros(largest, dtype=torch.uint8)

    def timed(target: Tensor, source: Tensor, size: int) -> Sample:
        per_repeat = max(4, 500_000_000 // size)
        return device_ms(
            lambda _: target[:size].copy_(source[:size], non_blocking=True), per_repeat=min(per_repeat, 60)
        )

    return {
        "to the device": {size: timed(on_device, locked, size) for size in LINK_BYTES},
        "to the host": {size: timed(locked, on_device, size) for size in LINK_BYTES},
        "to the device, not page-locked": {size: timed(on_device, ordinary, size) for size in LINK_BYTES[:3]},
    }


def device_alone(device: torch.device) -> dict[str, Sample]:
    """ms of a device copy, a BF16 product, and graphs of one and of `NUM_KERNELS` kernels of a few values."""

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    source, target = (zeros(HBM_BYTES, dtype=torch.uint8) for _ in range(2))
    left, right, out = (zeros(FLOPS_SIZE, FLOPS_SIZE).normal_() for _ in range(3))
    values = zeros(32)

    def adds(count: int) -> None:
        for _ in range(count):
            values.add_(1.0)

    one, many = Graph(lambda: adds(1)), Graph(lambda: adds(NUM_KERNELS))
    return {
        "device copy": device_ms(lambda _: target.copy_(source), per_repeat=5),
        "product": device_ms(lambda _: torch.mm(left, right, out=out), per_repeat=5),
        "graph of one kernel": device_ms(lambda _: one.replay(), per_repeat=NUM_CALLS),
        "graph of many": device_ms(lambda _: many.replay(), per_repeat=NUM_CALLS),
    }


def host_calls(device: torch.device) -> dict[str, Sample]:
    """us of the host: an eager launch, a captured operation and a copy through the device clock, and a small read."""
    values, few = torch.zeros(32, device=device), torch.zeros(8, dtype=torch.int32, device=device)
    graph = Graph(lambda: values.add_(1.0))
    work = Work("calibrate", 0, 0, 1, 1)
    timeline = CudaTimeline(device)
    target, source = torch.zeros(64, dtype=torch.uint8, device=device), pinned_zeros((64,), torch.uint8, device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    with no_gc():
        found = {
            "eager launch": host_us(lambda: values.add_(1.0)),
            "issue": host_us(lambda: timeline.compute(work, graph.replay)),
            "copy": host_us(lambda: timeline.copy(64, copy)),
            "read": host_us(lambda: few.cpu()),
        }
    timeline.drain()
    return found


@dataclass
class RuntimeRates:
    """The runtime's graphs on the first layers of a loaded model."""

    model: LoadedModel
    budget: DeviceBudget

    @classmethod
    def load(cls, config: RunConfig, console: Console) -> RuntimeRates:
        """Raises SpecterError: too little memory, or a faulty checkpoint or draft."""
        budget, model = DeviceBudget("cuda"), config.model
        spec = FULL_SIZE[model.charged_as]
        loaded = load_model(Path(model.checkpoint), Path(model.quantized), spec, budget, console, pin="prefer")
        return cls(loaded.first_layers(NUM_LAYERS), budget)

    def graphs(self) -> dict[str, Sample]:
        """ms of each captured operation, of a draft step of all its layers, and of waves by experts."""
        spec = self.model.spec
        num_slots = spec.num_moe_layers * spec.num_experts
        options = RunnerOptions(num_slots, KV_CAPACITY, max_rows=16, max_draft_len=DRAFT_STEPS + 4)
        runner = ModelRunner(self.model, self.budget, options)
        runner.arena.flat.zero_()  # values do not matter, but NaN would not route
        runner.capture([ROWS])
        runner.target.place(ROWS, 0, ROWS)

        def replay(part: str, at: int) -> Sample:
            return device_ms(lambda _: runner.graphs[part, at, ROWS].replay())

        found = {
            "attend_and_route": replay("attend", spec.num_dense_layers),
            "combine": replay("combine", spec.num_dense_layers),
            "head": replay("outputs", 0),
        }
        chosen = [int(expert) for expert in runner.target.routing.chosen[0].tolist()]
        for count in (count for count in WAVE_EXPERTS if count <= len(chosen)):
            found[f"wave {count}"] = self._wave(runner, chosen[:count])
        draft = runner._draft
        if draft is not None:
            found["draft_step"] = self._draft(runner, draft)
        return found

    def _draft(self, runner: ModelRunner, draft: Draft) -> Sample:
        """A draft step of these layers, `DRAFT_STEPS` in a row."""

        def steps(_: int) -> None:
            draft.begin(0, 0)
            for _ in range(DRAFT_STEPS):
                runner.draft_step()

        runner._num_drafted = 0
        return device_ms(steps, per_repeat=4).scaled(1 / DRAFT_STEPS)

    def _wave(self, runner: ModelRunner, experts: list[int]) -> Sample:
        """Waves of these experts, in different slots from wave to wave so that no cache holds them."""
        num_slots = runner.options.num_slots
        values = []
        for repeat in range(MIN_REPEATS + 1):
            runner.tables.restart()
            for wave in range(NUM_WAVES):
                first = (wave + repeat) * len(experts)
                runner.tables.write(-1, experts, [(first + index) % num_slots for index in range(len(experts))])
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(NUM_WAVES):
                runner.graphs["experts", 0, ROWS].replay()
            end.record()
            end.synchronize()
            if repeat:
                values.append(start.elapsed_time(end) / NUM_WAVES)
        return Sample(tuple(values))

    def waves_of(
        self, graphs: Mapping[str, Sample], hardware: Hardware, config: RunConfig
    ) -> tuple[dict[int, Sample], dict[int, int]]:
        """Of `graphs`, the waves by number of experts; and the ns that `hardware` charges for them."""
        costs = CostModel(self.model.spec, config.tile_rows, config.kv_capacity)
        waves = {count: graphs[f"wave {count}"] for count in WAVE_EXPERTS if f"wave {count}" in graphs}
        return waves, {count: hardware.compute_ns(costs.experts(count)) for count in waves}

    def plain(self, config: RunConfig, hardware: Hardware) -> dict[str, float]:
        """ms per token of plain decoding of these layers through the cache: measured, and charged by `hardware`."""
        costs = CostModel(self.model.spec, config.tile_rows, config.kv_capacity)
        config = dataclasses.replace(config, hardware=hardware)
        run = ResolvedRun(config, costs, buy_slots(config.model, config.budget, config.system, costs))
        result = CudaModel(self.model, self.budget, {}).run(run, list(PROMPT), list(WARMUP))
        assert result.warmup is not None
        virtual = dataclasses.replace(run, config=dataclasses.replace(config, clock="virtual"))
        charged = Replayer().replay(virtual, result.recording, result.warmup)
        return {
            name: float(metrics["tpot_ms"] or 0)
            for name, metrics in (("measured", result.metrics), ("charged", charged.metrics))
        }


def decode_us(config: RunConfig, device: torch.device) -> dict[str, Any]:
    """`us` per residual expert, `NUM_DECODED` a launch, and the `weights` of one."""
    model = config.model
    source = Source(model.charged_as, Path(model.checkpoint), "gptq", Path(model.quantized), device)
    data = source.layer(0)
    timed = Timed.of([(data, encode_layer(data.weights, data.codes))], 2 * NUM_DECODED)
    return {"us": timed.decode_us(timed.decoder, NUM_DECODED), "weights": timed.decoder.layout.num_weights}


def as_json(samples: dict[str, Any]) -> dict[str, Any]:
    """Samples as median, spread and repeats, nested as given."""
    return {
        str(name): {"median": one.median, "spread": one.spread, "values": list(one.values)}
        if isinstance(one, Sample)
        else as_json(one)
        if isinstance(one, dict)
        else one
        for name, one in samples.items()
    }
