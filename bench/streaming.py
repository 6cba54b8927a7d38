"""Sections with experts in host memory, and device memory capped."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

from bench.measure import HBM_BYTES_PER_S, Sample, device_ms, host_ms
from bench.report import Report, Row
from specter.errors import SpecterError
from specter.models.cuda.arena import open_arena
from specter.models.cuda.loaded_model import LoadedModel
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.prefill import LayerStream, prefill
from specter.models.cuda.runner import ModelRunner, RunnerOptions
from specter.timeline.base import difference
from specter.timeline.cuda import CudaTimeline

SHORT_PROMPT = 16
LONG_PROMPT = 2000
KV_CAPACITY = 2048


class StreamingBench:
    """Loading, the machine's rates, and prefill with nothing resident."""

    def __init__(self, model: LoadedModel, budget: DeviceBudget, report: Report, prompts: list[list[int]]) -> None:
        self.model, self.budget, self.report, self.prompts = model, budget, report, prompts
        self.spec, self.device = model.spec, budget.device
        self.link_bytes_per_s = 0.0
        self.short_logits: torch.Tensor | None = None  # fp32 [V], after the first 16 tokens of the first prompt

    def loading(self) -> None:
        load, layer_bytes = self.model.load, self.model.store.layer_bytes
        rates = Sample(tuple(layer_bytes / seconds / 1e9 for seconds in load.layer_s))
        note = f"per layer; all {load.num_bytes / 1e9:.1f} GB: {load.gb_per_s:.2f} GB/s" + (
            "" if load.is_pinned else "; NOT page-locked"
        )
        self.report.add(Row("load experts into the store", "GB/s", rates, goal=3.0, is_rate=True, note=note))
        self.report.summary["store_load_gb_per_s"] = load.gb_per_s
        self.report.facts["store"] = {k: v for k, v in dataclasses.asdict(load).items() if k != "layer_s"}

    def rates(self) -> None:
        source, target = (torch.empty(4 * 10**9, dtype=torch.uint8, device=self.device) for _ in range(2))
        source.random_()
        sample = device_ms(partial(_copy, target, source), per_repeat=5)
        rate = Sample(tuple(8 / ms for ms in sample.values))
        note = f"read + written; floors use {HBM_BYTES_PER_S / 1e12} TB/s"
        self.report.add(Row("device memory, copy", "TB/s", rate, note=note))
        del source, target
        store = self.model.store
        arena = open_arena(2 * store.num_experts, self.model.codec, self.budget)

        def copy(index: int) -> None:
            arena.write_run(index % 2 * store.num_experts, store.arena(index % store.num_layers))

        sample = device_ms(copy, per_repeat=4)
        link = Sample(tuple(store.layer_bytes / ms / 1e6 for ms in sample.values))
        self.report.add(Row("link, pinned host to device", "GB/s", link, note="one MoE layer per copy"))
        self.link_bytes_per_s = link.median * 1e9

    def prefill(self) -> None:
        store = self.model.store
        options = RunnerOptions(2 * store.num_experts, KV_CAPACITY, max_rows=LONG_PROMPT)
        runner = ModelRunner(self.model, self.budget, options)
        timeline = CudaTimeline(self.device)
        stream = LayerStream(store, runner.arena, timeline)
        text = [token for prompt in self.prompts for token in prompt]
        floor = store.num_bytes / self.link_bytes_per_s * 1e3
        for num_tokens in (SHORT_PROMPT, LONG_PROMPT):
            tokens = (text * 3)[:num_tokens]

            def once(tokens: list[int] = tokens) -> None:
                prefill(self.spec, runner.target_pass(tokens, 0, 1), stream, timeline)

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


def _copy(target: torch.Tensor, source: torch.Tensor, index: int) -> None:
    target.copy_(source)
