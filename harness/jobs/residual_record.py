"""Joins the records of `harness.jobs.residual` and the bench of the codec: cells with their spread, a flat summary.

    python -m harness.jobs.residual_record models=deepseek.json,qwen.json,phi.json bench=bench.json \\
        out=data/reference/h200/residual.json
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specter.arguments import run_command
from specter.errors import SpecterError
from specter.files import write_json

SUMMARISED = ("specter_plus", "specter_deadline", "lru", "lru_residual", "specmoeoff_tuned")
CELL = ("tier", "sampling", "system", "k")
MEDIANS = (
    "acceptance", "mean_accepted_len", "union_mean", "hit_rate", "experts_per_layer", "link_busy_frac",
    "compute_busy_frac", "over_floor_trace", "floor_trace_ms", "distinct_4grams",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Joins the records of the models."""

    models: tuple[Path, ...]
    bench: Path  # of `python -m bench residual`
    out: Path


def cells(record: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per cell of a model's record: TPOT over its texts, and medians of what explains it."""
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for run in record["runs"]:
        grouped[tuple(run[name] for name in CELL)].append(run)
    rows = []
    for key, runs in grouped.items():
        timed, traced = ([run for run in runs if run["is_traced"] == wanted] for wanted in (False, True))
        tpot = [run["tpot_ms"] for run in timed]
        row = {"model": record["model"], **dict(zip(CELL, key, strict=True)), "codec": runs[0]["codec"]}
        row |= {
            "num_texts": len(timed),
            "tpot_ms": statistics.median(tpot),
            "tpot_ms_mean": statistics.fmean(tpot),
            "tpot_ms_min": min(tpot),
            "tpot_ms_max": max(tpot),
            "agrees_with_plain": not any(run["agrees_with_plain"] is False for run in runs),
            "num_compared": sum(run["agrees_with_plain"] is not None for run in timed),  # plain decoding ran this text
        }
        row |= {name: _median([run[name] for run in timed]) for name in MEDIANS}
        if traced:
            row["ms_by_work"] = traced[0]["ms_by_work"]
            row["traced_tokens"] = traced[0]["num_new_tokens"]
        rows.append(row)
    return rows


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def summary(rows: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]], bench: dict[str, Any]) -> dict[str, Any]:
    """The flat summary: `tpot_ms.<model>.<tier>.<sampling>.<system>` and what the codec does by itself."""
    found: dict[str, Any] = {
        f"tpot_ms.{row['model']}.{row['tier']}.{row['sampling']}.{row['system']}": row["tpot_ms"]
        for row in rows
        if row["system"] in SUMMARISED
    }
    for record in records:
        notes = record["loaded"]["residual"]
        found[f"bits_per_weight.{record['model']}"] = float(notes["residual_bits_per_weight"])
        found[f"experts_compared.{record['model']}"] = int(notes["residual_experts_compared"])
    of_bench = bench["summary"]
    return found | {
        "decode_us": of_bench["decode_us_16"],
        "delivered_gb_per_s": of_bench["delivered_gb_per_s"],
        "bit_equal": of_bench["bit_equal"]
        and of_bench["delivered_bit_equal"]
        and all(row["agrees_with_plain"] for row in rows),
    }


def best_fixed(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By model, tier and sampling: the best fixed K with residual experts, and auto depth over it."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["codec"] == "residual" and row["k"] != "0":
            groups[f"{row['model']}.{row['tier']}.{row['sampling']}"].append(row)
    found = {}
    for name, group in groups.items():
        fixed, auto = ([row for row in group if (row["k"] == "auto") == wanted] for wanted in (False, True))
        if fixed and auto:
            best = min(fixed, key=lambda row: row["tpot_ms"])
            found[name] = {
                "k": best["k"],
                "tpot_ms": best["tpot_ms"],
                "auto_over_best": auto[0]["tpot_ms"] / best["tpot_ms"],
            }
    return found


def main(options: Options) -> None:
    records = [json.loads(path.read_text()) for path in options.models]
    bench = json.loads(options.bench.read_text())
    rows = [row for record in records for row in cells(record)]
    differing = [row for row in rows if not row["agrees_with_plain"]]
    if differing:
        names = [" ".join(str(row[name]) for name in ("model", *CELL)) for row in differing]
        raise SpecterError(f"cells that differ from plain decoding: {', '.join(names)}", "report this")
    write_json(
        options.out,
        {
            "provenance": {record["model"]: record["provenance"] for record in records}
            | {"bench": bench["provenance"]},
            "settings": {
                record["model"]: {name: record[name] for name in ("max_new_tokens", "warmup_tokens")}
                for record in records
            },
            "loaded": {record["model"]: record["loaded"] for record in records},
            "summary": summary(rows, records, bench),
            "best_fixed_k": best_fixed(rows),
            "cells": rows,
        },
    )


if __name__ == "__main__":
    run_command(main, Options)
