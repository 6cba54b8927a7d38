"""Published models by the name that `model.charged_as` gives them: the config.json files beside this module.

`specter_name` is the model's name in messages, `specter_source` the origin of the values.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from specter.models.hub_config import read_spec
from specter.models.spec import ModelSpec


def _read(path: Path) -> ModelSpec:
    return dataclasses.replace(read_spec(path.parent), name=json.loads(path.read_text())["specter_name"])


FULL_SIZE = {path.parent.name: _read(path) for path in sorted(Path(__file__).parent.glob("*/config.json"))}
