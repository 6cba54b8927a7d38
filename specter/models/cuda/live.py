"""A model on this machine's GPU that serves inputs under any budget; the counterpart of `specter.models.cpu.live`."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from specter.config import SystemConfig
from specter.experts.transfer import Backend
from specter.models.cuda.bed import Bed
from specter.models.cuda.full_size import FullSize, load_full_size
from specter.models.cuda.memory import DeviceBudget
from specter.models.cuda.no_gc import no_gc
from specter.models.cuda.own_draft import OwnMemory
from specter.models.cuda.sampling import DeviceSampling
from specter.models.cuda.target import OUTPUT_ROWS
from specter.resolve import ResolvedRun, resolve
from specter.session import OnCommit, RunResult, run_input
from specter.speculation.accept import TokenSampler
from specter.speculation.drafts import DRAFTS
from specter.timeline.cuda import CudaTimeline

LRU = SystemConfig(name="lru")  # plain decoding through the expert cache: it runs where the model does not fit, too


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
    def load(cls, run: ResolvedRun, console: Console) -> DeviceLive:
        """Loads the target, and the draft if the run speculates, within the memory of `config.hardware`, with progress
        on `console`.

        Raises:
            SpecterError: sampling that the device cannot do, no device, too little memory on either side, or anything
                wrong with the checkpoint.
        """
        config = run.config
        DeviceSampling.of(config.sampling)
        budget = DeviceBudget("cuda", min(config.hardware.device_memory_bytes, DeviceBudget("cuda").cap_bytes))
        budget.check(int(run.fit()["device_total_bytes"]), f"{config.system.name} at this budget")
        full = load_full_size(
            Path(config.model.checkpoint), Path(config.model.quantized), run.spec, budget, "prefer", console,
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
        self, run: ResolvedRun, prompt: Sequence[int], warmup: Sequence[int], on_commit: OnCommit = lambda tokens: None
    ) -> RunResult:
        """Runs one input; see `session.run_input`. Runs that differ in policy alone use the same slots and graphs."""
        config = run.config
        bed = self._bed_for(run, max(len(prompt), len(warmup)))
        bed.poison()  # or the last run's experts would stand in for copies that have not arrived
        row_counts = {1, config.depth + 1}
        if len(prompt) <= OUTPUT_ROWS:  # a longer one is launched kernel by kernel
            row_counts.add(len(prompt))
        bed.capture(row_counts, foresees=config.system.predictor != "none")
        model = DRAFTS[config.system.draft].join(bed.model, bed.own_draft)
        timeline = CudaTimeline(self.budget.device, trace=config.trace)
        backend = Backend(timeline, bed.move, bed.open_write_back)
        with no_gc():
            result = run_input(run, model, TokenSampler(), prompt, warmup, backend, on_commit)
        use = self.budget.use()
        result.metrics["device_peak_bytes"] = use.peak_reserved_bytes + use.context_bytes
        result.metrics["store_is_page_locked"] = self.full.load.is_pinned
        result.metrics.update(allocated(bed.own_memory, config.system))
        return result

    def _bed_for(self, run: ResolvedRun, longest: int) -> Bed:
        """The last run's bed if it serves this one, and a new one in its place otherwise."""
        config, slots = run.config, run.num_slots
        sampling, depth = DeviceSampling.of(config.sampling), config.depth
        max_rows = max(depth + 1, longest)
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
        self, run: ResolvedRun, result: RunResult, on_commit: OnCommit = lambda tokens: None
    ) -> bool | None:
        """Whether plain decoding yields the same tokens."""
        config = run.config
        budget = dataclasses.replace(config.budget, policy="same_experts")  # the draft's bytes are taken
        plain = resolve(dataclasses.replace(config, system=LRU, budget=budget, warmup_tokens=0, trace=False))
        return self.run(plain, result.recording.prompt, (), on_commit).generation.tokens == result.generation.tokens


def allocated(own: OwnMemory | None, system: SystemConfig) -> dict[str, int | str]:
    """What an own draft really takes, beside what the budget charges for it (`device_draft_shared_bytes`)."""
    kind = DRAFTS[system.draft]
    if own is None or not kind.is_own:
        return {}
    charged = "BF16" if kind.weight_bits is None else "INT4"
    return {
        **{f"allocated_{part}_bytes": num_bytes for part, num_bytes in own.bytes_by_part.items()},
        "draft_copy": f"BF16 on the device, charged to the budget as {charged}",
    }
