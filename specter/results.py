"""The files of a run: config.yaml, env.json, rounds.jsonl, metrics.json. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from specter import provenance
from specter.config import RunConfig, from_values, read_values, to_dict, to_yaml, without_labels
from specter.files import write_json
from specter.memory import fit
from specter.metrics import Metrics
from specter.records import RoundRecord
from specter.resolve import build_costs
from specter.session import RunResult
from specter.timeline.payload import Slots
from specter.timeline.trace import write_chrome_trace


def run_id(config: RunConfig) -> str:
    """The directory name of a run, unique among the runs of an experiment on one model."""
    draft_len = f"-k{config.depth}" if config.depth else ""
    source = "prompt" if config.prompt is not None else f"{config.dataset.name}-{config.input}"
    budget = config.budget.tier
    if config.budget.experts_per_layer is not None:
        budget = f"{config.budget.experts_per_layer:g}experts"
    elif config.budget.num_bytes is not None:
        budget = f"{config.budget.num_bytes}bytes"
    length = f"{config.prompt_tokens or 'all'}tokens"
    budget = f"{budget}-{config.budget.policy}"
    execution = f"-{config.execution.label}" if config.execution.label else ""
    codec = f"-{config.codec}" if config.codec else ""
    if config.payload_bits is not None:
        codec += f"-{config.payload_bits:g}bits"
    repeat = f"-repeat{config.repeat}" if config.repeat else ""
    where = f"{config.hardware.name}{execution}{codec}{repeat}"
    return f"{config.system.name}-{source}-{length}-{budget}{draft_len}-{config.sampling.label}-{where}"


def adhoc_directory(config: RunConfig) -> Path:
    """The directory of a single run: its name, and a digest of everything that decides its result."""
    values = {key: value for key, value in without_labels(to_dict(config)).items() if key not in ("results", "trace")}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    return Path(config.results) / f"{run_id(config)}-{digest}"


def write_run(directory: Path, config: RunConfig, result: RunResult, notes: dict[str, str]) -> None:
    """Writes config.yaml, env.json, rounds.jsonl, metrics.json (and trace.json); metrics.json last."""
    (directory / "trace.json").unlink(missing_ok=True)
    if result.trace is not None:
        write_chrome_trace(directory / "trace.json", result.trace, {"run": run_id(config)})
    _write(directory, config, result.generation.rounds, result.metrics, notes)


def read_config(directory: Path) -> RunConfig:
    """The configuration of a run. Raises SpecterError naming the key that is wrong."""
    values = read_values(directory / "config.yaml")
    prompt = values.pop("prompt", None)  # a text: `${...}` in it is no interpolation
    return dataclasses.replace(from_values(values), prompt=prompt)


def write_misfit(directory: Path, config: RunConfig, notes: dict[str, str], num_slots: int = 0) -> None:
    """Writes the files of a run whose system does not fit: no rounds, but its device bytes.

    Args:
        num_slots: of its memory policy; 0 is too few, and others may be too many for the device.
    """
    costs = build_costs(config)
    per_layer = num_slots / costs.spec.num_moe_layers
    metrics = {"clock": config.clock, "num_slots": num_slots, "experts_per_layer": per_layer, "fits_budget": False}
    slots = Slots(num_slots, costs.expert_bytes)
    _write(directory, config, (), metrics | fit(costs, config.system, slots, config.hardware), notes)


def _write(
    directory: Path, config: RunConfig, rounds: Iterable[RoundRecord], metrics: Metrics, notes: dict[str, str]
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(to_yaml(config))
    write_json(directory / "env.json", {**provenance.of_host(), "threads": str(config.threads), **notes})
    (directory / "metrics.json").unlink(missing_ok=True)
    (directory / "rounds.jsonl").write_text("".join(json.dumps(dataclasses.asdict(one)) + "\n" for one in rounds))
    write_json(directory / "metrics.json", metrics)
