"""Titles, colours and order of names in figures and tables; titles and colours come from conf/<group>/<name>.yaml."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import yaml

from harness.scales import CONF

OTHER_COLOUR = "#555555"
# Names in this order; names that are not listed follow by alphabet.
ORDER = {
    "system": (
        "specter_plus", "specter", "specter_deadline", "specter_deadline_residual", "specter_no_prefetch", "specmoeoff",
        "specmoeoff_tuned", "specmoeoff_no_plans", "mixtral_offloading", "mixtral_speculative_loading", "lru",
        "lru_residual", "lru_next_gate", "on_demand", "resident",
    ),
    "dataset": ("gsm8k", "humaneval", "hub_gsm8k", "hub_humaneval", "hub_wikitext2", "hub_gpqa", "hub_c4"),
    "hardware": ("a100_40gb_pcie4", "a100_12gbps", "h200_pcie5", "rtx4090_ddr4"),
    "model": ("deepseek_v2_lite", "qwen1_5_moe", "phi3_5_moe"),
}  # fmt: skip
# Titles of names that have no file of their own in conf/, in their order.
TITLES = {
    "policy": {"same_bytes": "equal bytes", "same_experts": "equal experts", "published": "as published"},
    "method": {
        "gptq": "GPTQ, INT4",
        "awq": "AWQ, INT4",
        "rtn": "round to nearest, INT4",
        "q8_0": "GGUF Q8_0",
        "q4_k": "GGUF Q4_K",
        "q2_k": "GGUF Q2_K",
    },
    "codec": {"bf16": "BF16", "residual": "residual"},
    "checkpoint": {"standin": "narrow stand-in of", "hub": "hub checkpoint of"},
}


@functools.cache
def _option(group: str, name: str) -> dict[str, Any]:
    path = CONF / group / f"{name}.yaml"
    values: dict[str, Any] = yaml.safe_load(path.read_text()) if path.is_file() else {}
    return values


def title(group: str, name: object) -> str:
    """How a name of `group` is written, by default with spaces instead of underscores."""
    name = str(name)
    return _option(group, name).get("title") or TITLES.get(group, {}).get(name) or name.replace("_", " ")


def labels() -> list[list[str]]:
    """Every title and colour in conf/: what a drawing job depends on beside its data and its code."""
    paths = sorted(CONF.glob("*/*.yaml"))
    values = [_option(path.parent.name, path.stem) for path in paths]
    return [[str(path), str(v.get("title")), str(v.get("colour"))] for path, v in zip(paths, values, strict=True)]


def short_title(system: str) -> str:
    """A system's title without what stands in brackets."""
    return title("system", system).partition(" (")[0]


def colour(system: str) -> str:
    given: str = _option("system", system).get("colour") or OTHER_COLOUR
    return given


def in_order(group: str, names: Iterable[str]) -> list[str]:
    """The distinct names of a group in the order of figures and tables."""
    known: Iterable[str] = ORDER.get(group) or TITLES.get(group, {})
    order = {name: index for index, name in enumerate(known)}
    return sorted(set(names), key=lambda name: (order.get(name, len(order)), name))


def styles(systems: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Title and colour of systems, in order."""
    return {name: (title("system", name), colour(name)) for name in in_order("system", systems)}
