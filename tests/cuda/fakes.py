"""Stand-ins for the driver and the device's memory, in tests without a device."""

from __future__ import annotations

from typing import cast

import torch

from specter.errors import SpecterError
from specter.models.cuda.memory import DeviceBudget, DeviceUse
from specter.models.cuda.store import PageLocker


class FakeLocker(PageLocker):
    """Locks `num_allowed` arenas, then refuses."""

    def __init__(self, num_allowed: int = 1000) -> None:
        self.num_allowed = num_allowed
        self.locked: dict[int, int] = {}

    def register(self, address: int, num_bytes: int) -> None:
        if len(self.locked) >= self.num_allowed:
            raise OSError("out of page-locked memory")
        self.locked[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.locked[address]


class _HostBudget:
    """The part of `DeviceBudget` that runners use, over host memory."""

    device = torch.device("cpu")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def check(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.num_bytes:
            raise SpecterError(f"{what} needs {num_bytes} bytes", "raise the budget")

    def restart_peaks(self) -> None:
        pass

    def use(self) -> DeviceUse:
        return DeviceUse(0, 0, 0, 0, 0)


def host_budget(num_bytes: int = 2**40) -> DeviceBudget:
    return cast(DeviceBudget, _HostBudget(num_bytes))


def any_budget() -> DeviceBudget:
    """The device's memory where there is a device."""
    return DeviceBudget() if torch.cuda.is_available() else host_budget()
