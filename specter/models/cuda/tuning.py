"""Launch configurations of the kernels, found by measurement (docs/LOG.md)."""

from __future__ import annotations

from dataclasses import dataclass

from specter.kernels.device import Launch


@dataclass(frozen=True, slots=True)
class DraftTuning:
    """Kernels of one row."""

    qkv: Launch = Launch(4, 1024, num_warps=2)
    out: Launch = Launch(8, 1024, num_warps=8)
    wide: Launch = Launch(2, 2048, num_warps=2)
    dense_down: Launch = Launch(4, 1024)
    gate_up: Launch = Launch(8, 2048, num_warps=2)
    down: Launch = Launch(2, 1024, num_warps=2)
    head: Launch = Launch(2, 1024, num_warps=2)


@dataclass(frozen=True, slots=True)
class TargetTuning:
    """Tiles of 16 rows; the same for every number of rows. `block_k` is a multiple of 16 * num_warps."""

    qkv: Launch = Launch(16, 512, 4, 4)
    out: Launch = Launch(16, 512, 4, 4)
    wide: Launch = Launch(16, 256, 4, 4)
    down: Launch = Launch(16, 512, 4, 4)
    head: Launch = Launch(64, 256, 4, 4)
    experts_up: Launch = Launch(32, 128, 4, 4)
    experts_down: Launch = Launch(64, 128, 4, 4)


# Found on an NVIDIA H200 over whole steps and passes; correct on any GPU.
DRAFT = DraftTuning()
TARGET = TargetTuning()
