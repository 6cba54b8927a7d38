"""A model on this machine's GPU, ready to serve inputs under any budget: `specter.live` on the device clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from specter.build import build_costs
from specter.config import SHARED, RunConfig, SystemConfig
from specter.errors import SpecterError
from specter.gpu.bed import Bed
from specter.gpu.full_size import FullSize, load_full_size
from specter.gpu.memory import DeviceBudget
from specter.gpu.sampling import DeviceSampling
from specter.gpu.target import OUTPUT_ROWS
from specter.memory import num_slots
from specter.session import OnCommit, RunResult, run_input
from specter.speculation.accept import TokenSampler
from specter.timeline.cuda import CudaTimeline

# Plain decoding without a draft, through the expert cache: it runs where the model does not fit, too.
PLAIN_CACHED = SystemConfig(name="lru", speculative=False, planner="none", eviction="lru")


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceLive:
    """Weights on the device and in page-locked host memory once, whatever runs on them.

    Attributes:
        notes: provenance and whatever degraded, for every run's env.json.
    """

    full: FullSize
    budget: DeviceBudget
    notes: dict[str, str]

    @classmethod
    def load(cls, config: RunConfig, console: Console) -> DeviceLive:
        """Loads target and draft within the memory of `config.hardware`, with progress on `console`.

        Raises:
            SpecterError: sampling that the device cannot do, no device, too little memory on either side, or anything
                wrong with the checkpoint.
        """
        DeviceSampling.of(config.sampling)
        system = config.system
        if system.draft != SHARED or system.foresight != "none" or system.transfer != "copy_stream":
            raise SpecterError(
                f"{system.name} cannot run on a device yet: system.draft={system.draft}, "
                f"system.foresight={system.foresight}, system.transfer={system.transfer}",
                "run it on the virtual clock, or choose a system whose draft shares the target's weights, "
                "without foresight or swaps",
            )
        costs = build_costs(config)
        budget = DeviceBudget("cuda", min(config.hardware.device_memory_bytes, DeviceBudget("cuda").cap_bytes))
        budget.check(num_slots(config, costs) * costs.payload_bytes, "the slots of this budget")
        full = load_full_size(
            Path(config.model.checkpoint), Path(config.model.quantized), costs.spec, budget, "prefer", console
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
        """Runs one input with slots of its own; see `session.run_input`."""
        sampling = DeviceSampling.of(config.sampling)
        draft_len = config.depth
        bed = Bed(
            self.full,
            num_slots(config, build_costs(config)),
            self.budget,
            config.kv_capacity,
            max(draft_len + 1, len(prompt), len(warmup)),
            max(draft_len, 1),
            sampling.temperature,
            sampling.seed,
        )
        bed.capture({1, draft_len + 1, min(len(prompt), OUTPUT_ROWS)})  # longer ones are launched kernel by kernel
        timeline = CudaTimeline(self.budget.device, trace=config.trace)
        result = run_input(config, bed.model, TokenSampler(), prompt, warmup, bed.move, on_commit, timeline)
        use = self.budget.use()
        result.metrics["device_peak_bytes"] = use.peak_reserved_bytes + use.context_bytes
        result.metrics["store_is_page_locked"] = self.full.load.is_pinned
        return result

    def agrees_with_plain(
        self, config: RunConfig, result: RunResult, on_commit: OnCommit = lambda tokens: None
    ) -> bool | None:
        """Whether plain decoding yields the same tokens."""
        budget = dataclasses.replace(config.budget, policy="same_experts")  # the draft's bytes are taken
        plain = dataclasses.replace(config, system=PLAIN_CACHED, budget=budget, warmup_tokens=0, trace=False)
        return self.run(plain, result.recording.prompt, (), on_commit).generation.tokens == result.generation.tokens
