"""Predicts measured runs on the virtual clock, text by text: the runs of `harness.jobs.residual` with 16-bit experts.

Those runs keep no recording, so their texts are recorded on the CPU with the same settings. A text of which the device
computed another one (rounding turns a token or an expert) is marked by its bytes: `same_text` is False where rounds
differ, or bytes per token by more than 3 %. `fitted` marks the model on which the profile was fitted.

    python -m harness.jobs.validate measured=deepseek.json,qwen.json,phi.json out=data/reference/h200/validation.parquet
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from harness.jobs import progress_bar, steps, write_table
from harness.jobs.record import missing_texts, record
from harness.jobs.residual import Options as Cells
from harness.jobs.residual import cell_of, planned
from harness.plan import text_key
from harness.recordings import RecordingStore, texts
from harness.scales import load
from specter.arguments import run_command
from specter.config import RunConfig, SystemConfig
from specter.prompts import load_tokenizer
from specter.provenance import MACHINE
from specter.recording import Recording
from specter.resolve import resolve
from specter.session import Replayer
from specter.speculation.drafts import DRAFTS
from specter.timeline.hardware import Hardware

WHERE = (*MACHINE, "commit", "source_sha256")
SAME_BYTES = 0.03


@dataclass(frozen=True)
class Options:
    """Predicts the runs of `harness.jobs.residual`."""

    measured: tuple[Path, ...]  # files of harness.jobs.residual
    out: Path
    hardware: str = "h200_fitted"  # of conf/hardware
    before: str = "h200_pcie5"  # the profile to compare with
    fitted: str = "deepseek_v2_lite"  # the model on which `hardware` was fitted
    recordings: Path = Path("results/validation")


def runs_of(found: dict[str, Any]) -> Iterator[tuple[RunConfig, dict[str, Any]]]:
    """The measured runs with 16-bit experts and a fixed K, and what was measured."""
    new, warmup = (int(found[key]) for key in ("max_new_tokens", "warmup_tokens"))
    plan = planned(Cells(model=found["model"], out=Path(), max_new_tokens=new, warmup_tokens=warmup))
    by_name = {(*cell_of(run), run.dataset.name): run for run in plan if not (run.decodes or run.is_auto)}
    for row in found["runs"]:
        name = (row["tier"], row["sampling"], row["system"], row["k"], row["text"])
        if name in by_name and not row["is_traced"]:
            yield replace(by_name[name], clock="virtual"), row


def recorder_of(run: RunConfig, root: Path) -> RunConfig:
    """The live run on the CPU that records the text of `run`."""
    system = load(SystemConfig, "system", "specter" if run.draft_len else "resident")
    if run.draft_len:
        draft = DRAFTS[run.system.draft].recorded_as or run.system.draft
        system = replace(system, name="recorder", planner="none", eviction="resident", draft=draft)
    return replace(run, system=system, k=run.k if run.draft_len else 1, results=str(root))


def recorded(runs: list[RunConfig], root: Path) -> dict[tuple[str, Any], tuple[Path, Path]]:
    """The recordings of the runs and of their warm-ups, made where they are missing."""
    wanted = {(run.dataset.name, text_key(run)): recorder_of(run, root) for run in runs}
    loaded_as = next(run for run in wanted.values() if run.system.speculative)
    tokenizer, store = load_tokenizer(loaded_as), RecordingStore(root / loaded_as.model.name, loaded_as)
    pairs = {key: texts(run, tokenizer) for key, run in wanted.items()}
    if todo := missing_texts(sorted(pairs.values(), key=lambda pair: pair[0].config.draft_len), store):
        record(todo, store, loaded_as)
    return {key: (store.path(text), store.path(warmup)) for key, (text, warmup) in pairs.items()}


def predict(found: dict[str, Any], options: Options) -> list[dict[str, Any]]:
    """A row per run of one model."""
    pairs = list(runs_of(found))
    files = recorded([run for run, _ in pairs], options.recordings)
    hardware, before = (load(Hardware, "hardware", name) for name in (options.hardware, options.before))
    replayer, rows = Replayer(), []
    where = {key: found["provenance"][key] for key in WHERE if key in found["provenance"]}
    with progress_bar() as progress:
        for run, measured in steps(pairs, f"predict {found['model']}", progress):
            recordings = [Recording.load(path) for path in files[run.dataset.name, text_key(run)]]
            new, old = (
                replayer.replay(resolve(replace(run, hardware=one)), *recordings).metrics for one in (hardware, before)
            )
            bytes_ratio = float(new["bytes_per_token"] or 0) / measured["bytes_per_token"]
            rows.append(
                {
                    "model": run.model.charged_as, "system": run.system.name, "budget": run.budget.tier,
                    "sampling": run.sampling.kind, "dataset": run.dataset.name, "k": run.draft_len,
                    "fitted": run.model.charged_as == options.fitted,
                    "same_text": abs(bytes_ratio - 1) <= SAME_BYTES and new["num_rounds"] == measured["num_rounds"],
                    "measured_tpot_ms": measured["tpot_ms"], "charged_tpot_ms": new["tpot_ms"],
                    "before_tpot_ms": old["tpot_ms"],
                    **{f"measured_{key}": measured[key] for key in ("bytes_per_token", "hit_rate")},
                    **{f"charged_{key}": new[key] for key in ("bytes_per_token", "hit_rate")},
                    "distinct_4grams": measured["distinct_4grams"], "hardware": options.hardware,
                    "before": options.before, "max_new_tokens": run.max_new_tokens, **where,
                }
            )  # fmt: skip
    return rows


def main(options: Options) -> None:
    rows = [row for path in options.measured for row in predict(json.loads(path.read_text()), options)]
    frame = pd.DataFrame(rows)
    write_table(options.out, frame)
    same = frame[frame["same_text"]]
    error = (same["charged_tpot_ms"] / same["measured_tpot_ms"] - 1).abs()
    for fitted, part in error.groupby(same["fitted"]):
        kind = "fitted" if fitted else "not fitted"
        print(f"{kind}: {len(part)} runs, error {part.median():.3f} in the median, {part.max():.3f} at most")


if __name__ == "__main__":
    run_command(main, Options)
