"""What the device clock refuses, before a device is looked for."""

from __future__ import annotations

import pytest
from rich.console import Console

from harness.plan import compose
from specter.errors import SpecterError
from specter.gpu.live import DeviceLive


@pytest.mark.parametrize("system", ["specmoeoff", "lru_next_gate", "mixtral_offloading"])
def test_systems_that_a_device_would_flatter_are_refused(system: str) -> None:
    """A swap's way back has no copy behind it here: measured, it would take no time."""
    with pytest.raises(SpecterError, match="cannot run on a device yet"):
        DeviceLive.load(compose(["clock=device", f"system={system}"]), Console())
