"""The budget of device memory, checked before allocations.

The device budget covers all allocations of the framework on the device, but not the driver's context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specter.errors import SpecterError


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Device memory now; peaks since the budget was made, or since `restart_peaks`."""

    peak_allocated_bytes: int  # tensors
    peak_reserved_bytes: int  # tensors and the allocator's free blocks: what a cap limits
    context_bytes: int  # taken by the driver, libraries and other processes
    total_bytes: int
    cap_bytes: int


class DeviceBudget:
    """A cap on one device's memory, enforced by the allocator and checked before large allocations."""

    def __init__(self, device: torch.device | str = "cuda", cap_bytes: int | None = None) -> None:
        """`cap_bytes` None: all that is free now. Raises SpecterError: no such device, or a cap above that."""
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
        """Checks that an allocation fits.
        Raises SpecterError: it does not; names `what`, its bytes and the bytes left."""
        check_fits(num_bytes, self.left_bytes(), what, self.cap_bytes)

    def left_bytes(self) -> int:
        """Bytes of the budget that are not allocated."""
        return self.cap_bytes - torch.cuda.memory_allocated(self.device)

    def restart_peaks(self) -> None:
        """Resets the peaks."""
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
