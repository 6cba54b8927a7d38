"""The two lists of pins, and what else must agree with them."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import yaml
from packaging.requirements import Requirement


def lock() -> dict[str, str]:
    lines = Path("requirements.lock").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower(): pinned for name, pinned in pins}


def test_environment_yml_carries_the_same_pins() -> None:
    dependencies = yaml.safe_load(Path("environment.yml").read_text())["dependencies"]
    (block,) = [entry["pip"] for entry in dependencies if isinstance(entry, dict)]
    pins = [entry.split("==") for entry in block if not entry.startswith("--")]
    assert {name.lower(): pinned for name, pinned in pins} == lock()


def test_declared_ranges_admit_the_pins() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *extras["dev"], *extras["gpu"], *extras["paper"], *extras["serve"]]
    pins = lock()
    for requirement in map(Requirement, declared):
        assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement


def test_this_environment_is_the_locked_one() -> None:
    for name in ("torch", "numpy", "snakemake", "hydra-core", "pandas"):
        assert re.sub(r"\+.*", "", version(name)) == lock()[name], name
