"""Policies register where they are defined; the registries give the legal names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specter.config import from_values
from specter.errors import SpecterError
from specter.experts.policies.base import EVICTIONS, PLANNERS, PREDICTORS
from specter.experts.transfer import TRANSFERS
from specter.registry import Registry
from specter.speculation.drafts import DRAFTS
from specter.typed import to_dict
from tests.runtime.test_bad_input import values

REGISTRIES = (PLANNERS, EVICTIONS, PREDICTORS, TRANSFERS, DRAFTS)


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_a_wrong_name_lists_the_registered_ones(registry: Registry[object]) -> None:
    with pytest.raises(SpecterError, match=f"{registry.kind}='oracle' is unknown") as caught:
        from_values(values(f"{registry.kind}=oracle"))
    assert caught.value.remedy == f"use one of: {', '.join(registry.names())}"


def test_a_policy_of_an_extension_is_known_once_the_extension_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "more_policies"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "eager.py").write_text(
        "from specter.experts.policies.base import PLANNERS, Planner\nPLANNERS.register('eager')(Planner)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(PLANNERS, "_entries", dict(PLANNERS._entries))
    plain = to_dict(from_values(values()))
    plain["system"]["planner"] = "eager"
    with pytest.raises(SpecterError, match="'eager' is unknown"):
        from_values(plain)
    assert from_values(plain | {"extensions": ["baselines", "more_policies"]}).system.planner == "eager"


def test_help_lists_the_registered_names_of_the_baselines_too() -> None:
    command = [sys.executable, "-m", "specter.run", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for registry in REGISTRIES:
        assert f"{registry.kind}: {', '.join(registry.names())}" in text


def test_the_runtime_works_without_baselines() -> None:
    code = """
import sys
import specter.run, specter.session
from specter.experts.policies.base import EVICTIONS, PLANNERS
assert "baselines" not in sys.modules
print(*PLANNERS.names(), *EVICTIONS.names())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) >= {"none", "three_phase", "deadline", "lru", "retain", "resident"}
    assert not {"two_plans", "drop"} & set(done.stdout.split())
