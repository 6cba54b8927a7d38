"""Sections with every expert in a slot: draft, plain decoding, verification, INT4 backends and agreement."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from baselines.transformers_offload import load_eager
from bench import agreement, int4
from bench.report import Report, Row, StepBytes, ms_at
from bench.streaming import SHORT_PROMPT
from specter.models.cuda.arena import open_arena
from specter.models.cuda.draft import Draft, UnfusedDraft
from specter.models.cuda.graph import Graph
from specter.models.cuda.loaded_model import DTYPE, LoadedModel
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.no_gc import no_gc
from specter.models.cuda.target import Target
from specter.models.cuda.weights import GpuKVCache
from specter.sample import MIN_REPEATS, Sample, device_ms

PROMPT_TOKENS = 48
DRAFT_TOKENS = 24  # at the end of each prompt, of the agreement
CAPACITY = 512  # KV positions
VERIFY_ROWS = 17  # K = 16
DRAFT_STEPS = 16
EAGER_STEPS, EAGER_REPEATS = 8, 9
EXPERTS = ("grouped_mm", "eager")  # transformers' implementations of routed experts: its default, and a loop


@torch.inference_mode()
def decode_eager(
    model: Any, prompt: Sequence[int], num_steps: int, experts: str, repeats: int = MIN_REPEATS, warmup: int = 3
) -> tuple[list[int], Sample]:
    """Greedy tokens of transformers' own model after `prompt`, and ms per token, everything resident.

    Each repeat is `num_steps` one-token passes in a row. A pass is thousands of launches from Python, so the host
    dominates. Warm-up passes pick kernels and grow pools.
    """
    device = model.device
    model.set_experts_implementation(experts)
    out = model(torch.tensor([list(prompt)], device=device), use_cache=True, logits_to_keep=1)
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    tokens, values = [int(token)], []
    gc.collect()
    with no_gc():
        for repeat in range(warmup + repeats):
            start = time.perf_counter()
            for _ in range(num_steps):
                token = model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
                tokens.append(int(token))
            if repeat >= warmup:
                values.append((time.perf_counter() - start) / num_steps * 1e3)
    return tokens, Sample(tuple(values))


class ResidentBench:
    """A target and its draft over one KV cache, with all experts in slots."""

    def __init__(self, model: LoadedModel, budget: DeviceBudget, report: Report, prompts: list[list[int]]) -> None:
        self.model, self.budget, self.report, self.prompts = model, budget, report, prompts
        self.spec, self.device = model.spec, budget.device
        spec, pdl = self.spec, self.device.type == "cuda"
        self.arena = open_arena(spec.num_moe_layers * spec.num_experts, model.codec, budget)
        self.table = self.arena.fill(model.plain_store, spec.num_moe_layers)
        cache = GpuKVCache(spec, CAPACITY, DTYPE, self.device)
        slots = self.arena.flat.view(DTYPE)
        self.target = Target(model.weights, slots, cache, PROMPT_TOKENS, slot_table=self.table, pdl=pdl)
        self.draft = Draft(model.weights, model.int4, cache, DRAFT_STEPS + 4, pdl=pdl)
        self._passes = {num_rows: self._capture(num_rows) for num_rows in (1, VERIFY_ROWS)}
        self._step = capture_step(self.draft)

    def resident_passes(self) -> None:
        target, prompt = self.target, self.prompts[0]
        position = PROMPT_TOKENS
        self._prefill_resident(prompt)
        sizes = StepBytes(self.spec, position + VERIFY_ROWS)

        def plain(index: int) -> None:
            target.begin(target.tokens[:1], position + index % DRAFT_STEPS, 1)
            self._passes[1].replay()

        floor = ms_at(sizes.target(self.spec.num_moe_layers * self.spec.top_k))
        note = f"graph, token fed on the device; KV {position}...{position + DRAFT_STEPS}"
        row = self.report.add(Row("plain decoding, all resident, BF16", "ms", device_ms(plain), floor, 2.5, note=note))
        self.report.summary["plain_decode_ms"] = row.sample.median

        rows, _ = self._decode(prompt, VERIFY_ROWS - 1)
        num_experts = sum(len(np.unique(layer)) for layer in self._trace(rows, position).swapaxes(0, 1))

        def verify(index: int) -> None:
            target.begin(rows, position, VERIFY_ROWS)
            self._passes[VERIFY_ROWS].replay()

        floor = ms_at(sizes.target(num_experts))
        note = f"{num_experts / self.spec.num_moe_layers:.1f} distinct experts a layer"
        name = f"verification, {VERIFY_ROWS} rows, all resident"
        row = self.report.add(Row(name, "ms", device_ms(verify), floor, 1.6 * floor, note=note))
        self.report.summary["verify17_over_floor"] = row.over_floor

    def draft_step(self) -> None:
        self._prefill_resident(self.prompts[0])
        name = "draft step, graph, 1 row, INT4"
        row = self.report.add(draft_row(name, self.draft, self._step, self.model, self.prompts[0], 1.4))
        self.report.summary["draft_step_ms"] = row.sample.median

    def prefill_equality(self, streamed: torch.Tensor | None) -> None:
        """Compares logits fp32 [V] of the streamed prefill of 16 tokens with a resident pass, bit for bit."""
        self._prefill_resident(self.prompts[0][:SHORT_PROMPT])
        same = streamed is not None and torch.equal(streamed, self.target.logits[0])
        self.report.facts["streamed prefill bit-equal to resident pass"] = same

    def bit_equality(self) -> None:
        """Compares plain decoding of 17 tokens with one verification of them: logits and KV, bit for bit."""
        target, equal = self.target, []
        entries = target.cache.entries
        for prompt in self.prompts:
            tokens, logits = self._decode(prompt, VERIFY_ROWS)
            new = slice(PROMPT_TOKENS, PROMPT_TOKENS + VERIFY_ROWS)
            plain_kv = entries[:, new].clone()
            entries[:, new] = torch.nan  # shows what the verification does not write
            target.begin(tokens[:-1], PROMPT_TOKENS, VERIFY_ROWS)
            self._passes[VERIFY_ROWS].replay()
            same = torch.equal(target.logits[:VERIFY_ROWS], logits)
            equal.append(same and torch.equal(entries[:, new], plain_kv))
            entries[:, new] = 0
        self.report.facts["bit-equal prompts"] = f"{sum(equal)} of {len(equal)}, logits and KV of {VERIFY_ROWS} rows"
        self.report.summary["bit_equal"] = all(equal)

    def peak(self) -> None:
        use = self.budget.use()
        self.report.facts["all resident"] = dataclasses.asdict(use)
        self.report.summary["peak_device_gb"] = (use.peak_reserved_bytes + use.context_bytes) / 1e9

    def int4_layer(self) -> None:
        spec, model = self.spec, self.model
        rows = int4.Rows.random(spec, DTYPE, self.device)
        backends = int4.Backends(spec, rows, model.int4, self.arena, self.table)
        chosen = [
            int4.chosen_codes(model.int4_layer(layer), rows.chosen[layer]) for layer in range(spec.num_moe_layers)
        ]
        backends.reference(chosen)
        expected = backends.out.clone()
        int4_floor = ms_at(spec.top_k * int4.int4_expert_bytes(model.int4))
        bf16_floor = ms_at(spec.top_k * model.codec.payload_bytes)
        for name, run in backends.all(chosen).items():
            backends.out.fill_(torch.nan)
            run()
            error = float((backends.out - expected).norm() / expected.norm())
            per_layer = int4.us_per_layer(Graph(run).replay, spec.num_moe_layers, per_repeat=5)
            is_int4 = name.startswith("INT4")
            floor = 1e3 * (int4_floor if is_int4 else bf16_floor)
            is_ours = name.startswith("INT4 fused, 2")
            note = f"relative difference to the INT4 reference {error:.1e}"
            row = self.report.add(
                Row(f"experts of a layer: {name}", "us", per_layer, floor, 2 * floor if is_ours else None, note=note)
            )
            if is_ours:
                self.report.summary["int4_layer_over_floor"] = row.over_floor

    def int4_prefill(self) -> None:
        for row in int4.prefill_rows(self.model, self.arena, self.table):
            self.report.add(row)

    def narrow_agreement(self) -> None:
        model = self.model
        on_cpu = agreement.narrow_model(model.checkpoint, model.codes, 64, PROMPT_TOKENS)
        narrow = [agreement.behave(on_cpu, prompt, DRAFT_TOKENS) for prompt in self.prompts]
        wide = [self._behave(prompt) for prompt in self.prompts]
        of_narrow, of_wide = agreement.agreement(narrow), agreement.agreement(wide)
        self.report.facts["inflated against narrow (fp32), teacher-forced"] = {
            "argmax_agreement": agreement.argmax_agreement(narrow, wide),
            "routing_agreement": agreement.routing_agreement(narrow, wide),
            "num_tokens": len(self.prompts) * PROMPT_TOKENS,
        }
        self.report.facts["INT4 draft, narrow (fp32)"] = dataclasses.asdict(of_narrow)
        self.report.facts["INT4 draft, inflated (BF16)"] = dataclasses.asdict(of_wide)

    def eager(self) -> None:
        """transformers' eager model, a row for each of its implementations of experts; the fastest one counts."""
        spec = self.spec
        num_bytes = DTYPE.itemsize * (spec.non_expert_params + spec.experts_params)
        if num_bytes > self.budget.left_bytes():
            self.report.skipped["transformers eager"] = "does not fit the device beside all experts in slots"
            return
        prompt, model = self.prompts[0], load_eager(self.model.source, self.device, DTYPE)
        for experts in EXPERTS:
            tokens, sample = decode_eager(model, prompt, EAGER_STEPS, experts, EAGER_REPEATS)
            ours = self._decode(prompt, len(tokens) - 1)[0].tolist()
            same = next((i for i, (a, b) in enumerate(zip(tokens, ours, strict=True)) if a != b), len(tokens))
            note = f"first {same} of {len(tokens)} greedy tokens as ours; host load {os.getloadavg()[0]:.1f}"
            self.report.add(Row(f"plain decoding, transformers eager, experts: {experts}", "ms", sample, note=note))

    # -- inside --------------------------------------------------------------------------------

    def _capture(self, num_rows: int) -> Graph:
        self.target.place(num_rows, 0, num_rows)
        return Graph(partial(self.target.run, num_rows))

    def _prefill_resident(self, prompt: list[int]) -> None:
        self.target.begin(torch.tensor(prompt, dtype=torch.int32, device=self.device), 0, 1)
        self.target.run(len(prompt), 1)

    def _decode(self, prompt: list[int], num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy tokens after `prompt`, int32 [1 + num_steps], and logits [num_steps, V] of the steps."""
        target = self.target
        self._prefill_resident(prompt)
        tokens, logits = [target.tokens[:1].clone()], []
        for index in range(num_steps):
            target.begin(tokens[-1], len(prompt) + index, 1)
            self._passes[1].replay()
            tokens.append(target.tokens[:1].clone())
            logits.append(target.logits[0].clone())
        return torch.cat(tokens), torch.stack(logits)

    def _trace(self, rows: torch.Tensor, position: int) -> np.ndarray:
        """Experts chosen in a pass, [rows, MoE layers, k]."""
        target, num_rows, routing = self.target, len(rows), list[np.ndarray]()
        target.begin(rows, position, num_rows)
        target.embed(num_rows)
        for layer in range(self.spec.num_layers):
            target.attend_and_route(layer, num_rows)
            moe = layer - self.spec.num_dense_layers
            if moe >= 0:
                target.run_experts(self.table[moe], num_rows)
                target.combine(layer, num_rows)
                routing.append(target.routing.chosen[:num_rows].cpu().numpy().astype(np.int64))
        target.choose(num_rows, num_rows)
        return np.stack(routing, axis=1)

    def _behave(self, prompt: list[int]) -> agreement.Behaviour:
        target, draft = self.target, self.draft
        rows = torch.tensor(prompt, dtype=torch.int32, device=self.device)
        routing = self._trace(rows, 0)
        tokens = target.tokens[: len(prompt)].cpu().numpy().astype(np.int64)
        draft_tokens, draft_routing = [], []
        for position in range(len(prompt) - DRAFT_TOKENS, len(prompt)):
            draft.begin(prompt[position], position)
            self._step.replay()
            draft_tokens.append(draft.tokens[:1].clone())
            draft_routing.append(draft.routing[0].clone())
        return agreement.Behaviour(
            tokens,
            routing,
            torch.cat(draft_tokens).cpu().numpy().astype(np.int64),
            torch.stack(draft_routing).cpu().numpy().astype(np.int64),
        )


def capture_step(draft: Draft) -> Graph:
    draft.begin(0, 0)
    return Graph(draft.step)


def draft_row(
    name: str, draft: Draft, step: Graph, model: LoadedModel, prompt: list[int], goal: float | None = None
) -> Row:
    """The time of a draft step, of `DRAFT_STEPS` in a row after `prompt`, beside the time of its bytes."""
    floor = ms_at(StepBytes(model.spec, PROMPT_TOKENS + 8).draft(int4.int4_expert_bytes(model.int4)))

    def steps(index: int) -> None:
        draft.begin(prompt[-1], PROMPT_TOKENS - 1)
        for _ in range(DRAFT_STEPS):
            step.replay()

    per_step = device_ms(steps, per_repeat=4).scaled(1 / DRAFT_STEPS)
    return Row(name, "ms", per_step, floor, goal, note=f"{DRAFT_STEPS} replays in a row, no host sync")


def unfused_row(model: LoadedModel, budget: DeviceBudget, prompt: list[int]) -> Row:
    """The draft step without the fused INT4 kernels."""
    cache = GpuKVCache(model.spec, CAPACITY, DTYPE, budget.device)
    draft = UnfusedDraft(model.int4_layers(), model.weights, model.int4, cache, DRAFT_STEPS + 4)
    return draft_row("draft step, graph, 1 row, INT4 unfused", draft, capture_step(draft), model, prompt)
