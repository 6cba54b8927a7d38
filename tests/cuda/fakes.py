"""What stands for the driver in tests without a device."""

from __future__ import annotations


class FakeLocker:
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
