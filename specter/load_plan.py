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
class Part:
    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Host memory by part, for a checkpoint whose structure has been checked."""

    source: str
    num_files: int
    stored_bytes: dict[str, int]  # in the files, by type
    parts: tuple[Part, ...]
    available_bytes: int

    @classmethod
    def build(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        has_draft: bool,
        slot_bytes: int,
        kv_capacity: int,
        available: Callable[[], int] = lambda: psutil.virtual_memory().available,
    ) -> LoadPlan:
        """For a model that runs on the host: store, shared weights, slots and KV in `dtype`, the draft dequantized."""
        spec, size = checkpoint.spec, dtype.itemsize
        name = str(dtype).removeprefix("torch.")
        experts = spec.experts_params * size
        parts = [Part(f"store: {spec.num_moe_layers} x {spec.num_experts} experts, {name}", experts)]
        parts += [Part(f"draft: the same from INT4, dequantised to {name}", experts)] if has_draft else []
        parts += [
            Part(f"shared weights, {name}", spec.non_expert_params * size),
            Part("slots", slot_bytes),
            Part(f"KV cache of {kv_capacity} positions", spec.num_layers * kv_capacity * spec.kv_width * size),
        ]
        source = f"{spec.name} ({spec.family}) from {checkpoint.directory}"
        return cls(source, checkpoint.num_files, checkpoint.stored_bytes, tuple(parts), available())

    @property
    def needed_bytes(self) -> int:
        return round(MARGIN * sum(part.num_bytes for part in self.parts))

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
        stored = ", ".join(f"{size / 1e9:.2f} GB {dtype}" for dtype, size in sorted(self.stored_bytes.items()))
        table = Table(title=self.source, show_header=False, title_justify="left")
        table.add_row("on disk, all tensors there", f"{stored} in {self.num_files} files")
        for part in self.parts:
            table.add_row(part.what, f"{part.num_bytes / 1e9:.2f} GB")
        table.add_row("host memory needed", f"{self.needed_bytes / 1e9:.2f} of {self.available_bytes / 1e9:.2f} GB")
        return table
