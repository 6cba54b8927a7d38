"""Runs of the script through a system of conf/system/, built as the workflow builds it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.plan import compose
from specter.config import RunConfig
from specter.engine import Engine
from specter.experts.transfer import Backend
from specter.models.hub_config import config_of
from specter.records import RoundRecord
from specter.resolve import resolve
from specter.session import build_engine
from specter.speculation.accept import TokenSampler
from tests.charges.logged import BY_HAND, LoggedTimeline, Script, ScriptedModel
from tests.charges.tariff import KV_CAPACITY, SPEC, TILE_ROWS


@dataclass
class Run:
    """An engine, and the log of what it issues."""

    engine: Engine
    timeline: LoggedTimeline
    model: ScriptedModel

    def generate(self, prompt_len: int, num_tokens: int) -> list[str]:
        """The log: prefill, then every round, each with its record's counts behind it."""
        timeline, num_commits = self.timeline, 0

        def on_commit(tokens: list[int]) -> None:
            nonlocal num_commits
            num_commits += 1
            timeline.begin(f"round {num_commits}")

        timeline.begin("prefill")
        generation = self.engine.generate(range(prompt_len), num_tokens, on_commit)
        assert generation.tokens == list(range(prompt_len, prompt_len + num_tokens))
        phases = _phases(timeline.lines)
        assert phases.pop() == [f"round {num_commits}", "drain"]
        for lines, record in zip(phases[1:], generation.rounds, strict=True):
            lines += counts(record)
        return [line for lines in phases for line in lines]


def counts(record: RoundRecord) -> list[str]:
    return [
        f"record: {record.num_hits} hits, {record.num_late_hits} late, {record.num_misses} misses, "
        f"{record.num_prefetched} prefetched, {record.num_prefetched_used} of them used",
        f"record: {record.prefetch_bytes} + {record.fetch_bytes} + {record.writeback_bytes} bytes, "
        f"union {record.union_mean}, {record.accepted_len} of {record.draft_len} accepted, {record.new_len} new",
    ]


def make_config(system: str, directory: Path | None, slots_per_layer: int = 3, k: int = 3) -> RunConfig:
    """`system` with K = `k`, charged as `tariff.SPEC`, whose config.json is written to `directory` if given."""
    settings = [f"k={k}", f"tile_rows={TILE_ROWS}", f"kv_capacity={KV_CAPACITY}", "budget.policy=same_experts"]
    config = compose([f"system={system}", *settings, "model.charged_as=itself"])
    config.budget.experts_per_layer = slots_per_layer
    if directory is not None:
        (directory / "config.json").write_text(json.dumps(config_of(SPEC)))
        config.model.checkpoint = str(directory)
    return config


def open_run(
    system: str,
    directory: Path,
    link: Literal["slow", "fast"] = "slow",
    lead: int = 0,
    script: Script = BY_HAND,
    slots_per_layer: int = 3,
    k: int = 3,
) -> Run:
    """A run of `system` on the logical clock; see `make_config`."""
    config = make_config(system, directory, slots_per_layer, k)
    timeline = LoggedTimeline(link, lead)
    model = ScriptedModel(timeline, script)
    backend = Backend(timeline, model.move, lambda num_buffers: model.send_back)
    engine = build_engine(resolve(config), model, TokenSampler(), backend)
    return Run(engine, timeline, model)


def _phases(lines: Sequence[str]) -> list[list[str]]:
    """A log, split where a phase begins."""
    phases: list[list[str]] = []
    for line in lines:
        if line == "prefill" or line.startswith("round "):
            phases.append([])
        phases[-1].append(line)
    return phases
