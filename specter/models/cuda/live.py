"""A model on this machine's GPU that serves inputs under any budget; the counterpart of `specter.models.cpu.live`."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from specter.build import build_costs, build_model
from specter.config import OWN_INT4, SHARED, RunConfig, SystemConfig
from specter.memory import device_bytes, num_slots
from specter.models.cuda.bed import Bed
from specter.models.cuda.full_size import FullSize, load_full_size
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.no_gc import no_gc
from specter.models.cuda.own_draft import OwnMemory
from specter.models.cuda.sampling import DeviceSampling
from specter.models.cuda.target import OUTPUT_ROWS
from specter.session import OnCommit, RunResult, run_input
from specter.speculation.accept import TokenSampler
from specter.timeline.cuda import CudaTimeline

# Plain decoding without a draft, through the expert cache: it runs where the model does not fit, too.
PLAIN_CACHED = SystemConfig(name="lru", speculative=False, planner="none", eviction="lru")


@dataclasses.dataclass(slots=True)
class DeviceLive:
    """Weights on the device and in page-locked host memory once, whatever runs on them.

    Attributes:
        notes: provenance and whatever degraded, for every run's env.json.
    """

    full: FullSize
    budget: DeviceBudget
    notes: dict[str, str]
    _bed: tuple[tuple[Any, ...], Bed] | None = None  # of the last run, and what it was made for

    @classmethod
    def load(cls, config: RunConfig, console: Console) -> DeviceLive:
        """Loads the target, and the draft if `config` speculates, within the memory of `config.hardware`, with progress
        on `console`.

        Raises:
            SpecterError: sampling that the device cannot do, no device, too little memory on either side, or anything
                wrong with the checkpoint.
        """
        DeviceSampling.of(config.sampling)
        costs = build_costs(config)
        budget = DeviceBudget("cuda", min(config.hardware.device_memory_bytes, DeviceBudget("cuda").cap_bytes))
        parts = device_bytes(costs, config.system, num_slots(config, costs))
        budget.check(sum(parts.values()), f"{config.system.name} at this budget")
        full = load_full_size(
            Path(config.model.checkpoint), Path(config.model.quantized), costs.spec, budget, "prefer", console,
            config.system.speculative,
        )  # fmt: skip
        notes = {
            "checkpoint_digest": full.checkpoint.digest(),
            "draft_origin": full.draft_origin,
            "inflated": str(full.source is not full.checkpoint),
            "store_is_page_locked": str(full.load.is_pinned),
            "store_gb_per_s": f"{full.load.gb_per_s:.2f}",
        }
        return cls(full, budget, notes)

    def run(
        self, config: RunConfig, prompt: Sequence[int], warmup: Sequence[int], on_commit: OnCommit = lambda tokens: None
    ) -> RunResult:
        """Runs one input; see `session.run_input`. Runs that differ in policy alone use the same slots and graphs."""
        bed = self._bed_for(config, max(len(prompt), len(warmup)))
        bed.poison()  # or the last run's experts would stand in for copies that have not arrived
        row_counts = {1, config.depth + 1}
        if len(prompt) <= OUTPUT_ROWS:  # a longer one is launched kernel by kernel
            row_counts.add(len(prompt))
        bed.capture(row_counts, foresees=config.system.foresight != "none")
        model = build_model(config, bed.model, bed.own_draft)
        timeline = CudaTimeline(self.budget.device, trace=config.trace)
        with no_gc():
            result = run_input(
                config, model, TokenSampler(), prompt, warmup, bed.move, on_commit, timeline, bed.open_write_back
            )
        use = self.budget.use()
        result.metrics["device_peak_bytes"] = use.peak_reserved_bytes + use.context_bytes
        result.metrics["store_is_page_locked"] = self.full.load.is_pinned
        result.metrics.update(allocated(bed.own_memory, config.system))
        return result

    def _bed_for(self, config: RunConfig, longest: int) -> Bed:
        """The last run's bed if it serves this one, and a new one in its place otherwise."""
        sampling, depth = DeviceSampling.of(config.sampling), config.depth
        slots, max_rows = num_slots(config, build_costs(config)), max(depth + 1, longest)
        key = (slots, config.kv_capacity, max_rows, max(depth, 1), sampling, config.system.draft)
        if self._bed is None or self._bed[0] != key:
            self._bed = None  # its slots and the new ones need not fit side by side
            gc.collect()
            torch.cuda.empty_cache()
            self.budget.restart_peaks()
            self._bed = (
                key,
                Bed(
                    self.full,
                    slots,
                    self.budget,
                    config.kv_capacity,
                    max_rows,
                    max(depth, 1),
                    sampling.temperature,
                    sampling.seed,
                ),
            )
        return self._bed[1]

    def agrees_with_plain(
        self, config: RunConfig, result: RunResult, on_commit: OnCommit = lambda tokens: None
    ) -> bool | None:
        """Whether plain decoding yields the same tokens."""
        budget = dataclasses.replace(config.budget, policy="same_experts")  # the draft's bytes are taken
        plain = dataclasses.replace(config, system=PLAIN_CACHED, budget=budget, warmup_tokens=0, trace=False)
        return self.run(plain, result.recording.prompt, (), on_commit).generation.tokens == result.generation.tokens


def allocated(own: OwnMemory | None, system: SystemConfig) -> dict[str, int | str]:
    """What an own draft really takes, beside what the budget charges for it (`device_draft_shared_bytes`)."""
    if own is None or system.draft == SHARED:
        return {}
    charged = "INT4" if system.draft == OWN_INT4 else "BF16"
    return {
        **{f"allocated_{part}_bytes": num_bytes for part, num_bytes in own.bytes_by_part.items()},
        "draft_copy": f"BF16 on the device, charged to the budget as {charged}",
    }
