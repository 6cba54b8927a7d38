"""What outputs are held against, on either clock, is the rival of that name."""

from __future__ import annotations

import pytest

from specter.config import SystemConfig
from specter.models.cpu.live import PLAIN
from specter.models.cuda.live import PLAIN_CACHED
from tests.helpers import load_system


@pytest.mark.parametrize(("constant", "name"), [(PLAIN, "resident"), (PLAIN_CACHED, "lru")])
def test_plain_decoding_is_the_rival_of_that_name(constant: SystemConfig, name: str) -> None:
    assert constant == load_system(name)
