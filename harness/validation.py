"""Checks all of conf/ when the Snakefile loads: errors of input functions are dropped where outputs exist, so that a
broken file would otherwise show old results as new.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.scales import CONF, Experiment, Probe, Scale, load, load_scale
from specter.config import BudgetConfig, DatasetConfig, ModelConfig, SamplingConfig, SystemConfig
from specter.errors import SpecterError
from specter.execution import ExecutionConfig
from specter.timeline.hardware import Hardware

GROUPS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "system": SystemConfig,
    "budget": BudgetConfig,
    "dataset": DatasetConfig,
    "sampling": SamplingConfig,
    "hardware": Hardware,
    "execution": ExecutionConfig,
    "experiment": Experiment,
    "scale": Scale,
    "probe": Probe,
}
# Lists of an experiment that name files of a group, and lists that may be empty.
NAMED = {"systems": "system", "samplings": "sampling", "hardware": "hardware"}
MAY_BE_EMPTY = {"ks", "payload_bits"}


def check_all() -> None:
    """Raises SpecterError naming the first file of conf/ that is broken, and the remedy."""
    for group, schema in GROUPS.items():
        for name in names(group):
            load(schema, group, name)
    for name in names("experiment"):
        _check_experiment(load(Experiment, "experiment", name))
    for name in names("scale"):
        _check_scale(load_scale(name))


def names(group: str) -> list[str]:
    return [path.stem for path in sorted((CONF / group).glob("*.yaml"))]


def _check_experiment(one: Experiment) -> None:
    path = CONF / "experiment" / f"{one.name}.yaml"
    for key, value in vars(one).items():
        if isinstance(value, list) and not value and key not in MAY_BE_EMPTY:
            raise SpecterError(f"{path}: {key} is empty", f"name at least one of {key}")
    for key, group in NAMED.items():
        _check_known(path, key, getattr(one, key), group)
    for key in ("depths", "executions"):
        _check_known(path, key, getattr(one, key), "system")
    _check_known(path, "executions", {name for listed in one.executions.values() for name in listed}, "execution")
    for budget in one.budgets:
        if not _is_positive(budget):
            _check_known(path, "budgets", [budget], "budget")
    depths = [*one.ks, *(k for listed in one.depths.values() for k in listed)]
    _check_least(path, "ks", depths, 1)
    _check_least(path, "prompt_tokens", one.prompt_tokens, 0)
    _check_least(path, "payload_bits", one.payload_bits, 1)
    for key in ("num_inputs", "num_datasets", "kv_capacity"):
        _check_least(path, key, [getattr(one, key)], 1)


def _check_scale(one: Scale) -> None:
    path = CONF / "scale" / f"{one.name}.yaml"
    groups = {"models": "model", "datasets": "dataset", "experiments": "experiment", "hardware": "hardware"}
    for key, group in groups.items():
        value = getattr(one, key)
        if not value and key != "hardware":
            raise SpecterError(f"{path}: {key} is empty", f"name at least one of {key}")
        _check_known(path, key, value, group)
    if one.others is not None:
        _check_known(path, "others.experiments", one.others.experiments, "experiment")
        _check_least(path, "others", [one.others.num_datasets, one.others.num_inputs], 1)
    for key in ("max_inputs", "max_k", "max_new_tokens", "num_repeats"):
        _check_least(path, key, [getattr(one, key)], 1)
    for key in ("warmup_tokens", "num_probe_texts"):
        _check_least(path, key, [getattr(one, key)], 0)


def _check_known(path: Path, key: str, values: Iterable[str], group: str) -> None:
    known = names(group)
    for value in values:
        if value not in known:
            raise SpecterError(f"{path}: {key} names {value!r}, which is unknown", f"use one of: {', '.join(known)}")


def _check_least(path: Path, key: str, values: Sequence[float], least: int) -> None:
    for value in values:
        if value < least:
            raise SpecterError(f"{path}: {key} has {value}", f"give {least} or more")


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False
