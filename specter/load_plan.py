"""Host memory that loading a checkpoint needs, computed before it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
from rich.table import Table

from specter.errors import SpecterError
from specter.models.checkpoint import Checkpoint

MARGIN = 1.1  # one expert while loading, the folding of one layer, the allocator


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Host memory by part, for a checkpoint whose structure has been checked."""

    checkpoint: Checkpoint
    part_bytes: dict[str, int]
    available_bytes: int

    @classmethod
    def build(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        *,
        has_draft: bool,
        slot_bytes: int,
        kv_capacity: int,
        available: Callable[[], int] = lambda: psutil.virtual_memory().available,
    ) -> LoadPlan:
        """For a model that runs on the host: store, shared weights, slots and KV in `dtype`, the draft dequantized."""
        spec, size, name = checkpoint.spec, dtype.itemsize, str(dtype).removeprefix("torch.")
        experts = spec.experts_params * size
        draft = {f"draft: the same from INT4, dequantized to {name}": experts} if has_draft else {}
        parts = {
            f"store: {spec.num_moe_layers} x {spec.num_experts} experts, {name}": experts,
            **draft,
            f"shared weights, {name}": spec.non_expert_params * size,
            "slots": slot_bytes,
            f"KV cache of {kv_capacity} positions": spec.num_layers * kv_capacity * spec.kv_width * size,
        }
        return cls(checkpoint, parts, available())

    @property
    def source(self) -> str:
        spec = self.checkpoint.spec
        return f"{spec.name} ({spec.family}) from {self.checkpoint.directory}"

    @property
    def needed_bytes(self) -> int:
        return round(MARGIN * sum(self.part_bytes.values()))

    def check(self) -> None:
        """Raises SpecterError if the host has too little memory."""
        if self.needed_bytes > self.available_bytes:
            raise SpecterError(
                f"{self.source} needs {self.needed_bytes / 1e9:.1f} GB of host memory, "
                f"{self.available_bytes / 1e9:.1f} GB are available",
                "use a machine with more memory, a smaller checkpoint, or a stand-in (model=deepseek_v2_lite)",
            )

    def table(self) -> Table:
        """The plan as a table to print."""
        sizes = self.checkpoint.stored_bytes.items()
        stored = ", ".join(f"{size / 1e9:.2f} GB {dtype}" for dtype, size in sorted(sizes))
        table = Table(title=self.source, show_header=False, title_justify="left")
        table.add_row("on disk, all tensors there", f"{stored} in {self.checkpoint.num_files} files")
        for part, num_bytes in self.part_bytes.items():
            table.add_row(part, f"{num_bytes / 1e9:.2f} GB")
        table.add_row("host memory needed", f"{self.needed_bytes / 1e9:.2f} of {self.available_bytes / 1e9:.2f} GB")
        return table
