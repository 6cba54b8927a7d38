"""What the host and the device have to give, asked before it is taken.

The device budget covers everything that the framework allocates on the device (weights, slots, KV cache, graphs);
the driver's own context comes on top and is recorded beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from specter.errors import SpecterError

_MEMINFO = Path("/proc/meminfo")


def host_available_bytes(meminfo: Path = _MEMINFO) -> int:
    """Host memory that can be taken now without swapping (Linux's MemAvailable).

    Raises:
        SpecterError: the system does not tell.
    """
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    raise SpecterError(f"{meminfo} does not tell the available memory", "run on Linux")


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Device memory at one moment; peaks since the budget was opened, or `restart_peaks`."""

    peak_allocated_bytes: int  # tensors
    peak_reserved_bytes: int  # tensors and the allocator's free blocks: what a cap is held against
    context_bytes: int  # taken by the driver, libraries and other processes
    total_bytes: int
    cap_bytes: int


class DeviceBudget:
    """A cap on one device's memory, enforced by the allocator and checked before large allocations."""

    def __init__(self, device: torch.device | str = "cuda", cap_bytes: int | None = None) -> None:
        """
        Args:
            cap_bytes: most bytes that may be allocated; None is all that is free now.
        Raises:
            SpecterError: no such device, or a cap above what is free.
        """
        if not torch.cuda.is_available():
            raise SpecterError(f"device {device} is not available", "run on a machine with a CUDA device")
        index = torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        free, self.total_bytes = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device)
        if cap_bytes is not None and cap_bytes > free:
            raise SpecterError(
                f"a device budget of {cap_bytes} bytes is more than the {free} that are free",
                f"give a budget of at most {free} bytes, or end what else runs on the device",
            )
        self.cap_bytes = free if cap_bytes is None else cap_bytes
        torch.cuda.set_per_process_memory_fraction(self.cap_bytes / self.total_bytes, self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def check(self, num_bytes: int, what: str) -> None:
        """Refuses an allocation that would not fit.

        Raises:
            SpecterError: naming `what`, its bytes and what is left.
        """
        check_fits(num_bytes, self.cap_bytes - torch.cuda.memory_allocated(self.device), what, self.cap_bytes)

    def restart_peaks(self) -> None:
        """Peaks count from now on."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def use(self) -> DeviceUse:
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceUse(
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self.device),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(self.device),
            context_bytes=total - free - torch.cuda.memory_reserved(self.device),
            total_bytes=total,
            cap_bytes=self.cap_bytes,
        )


def check_fits(num_bytes: int, left_bytes: int, what: str, cap_bytes: int) -> None:
    """Raises SpecterError unless `num_bytes` for `what` are left of a budget of `cap_bytes`."""
    if num_bytes > left_bytes:
        raise SpecterError(
            f"{what} needs {num_bytes} bytes of device memory; {left_bytes} of the budget of {cap_bytes} are left",
            f"raise the device budget by {num_bytes - left_bytes} bytes, or hold fewer experts on the device",
        )
