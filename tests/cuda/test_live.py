"""What outputs are held against, on either clock, is the rival of that name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specter.config import SystemConfig
from specter.models.cpu.live import RESIDENT
from specter.models.cuda.model import LRU
from tests.helpers import load_system


@pytest.mark.parametrize(("constant", "name"), [(RESIDENT, "resident"), (LRU, "lru")])
def test_plain_decoding_is_the_rival_of_that_name(constant: SystemConfig, name: str) -> None:
    assert constant == replace(load_system(name), title="", colour="")
