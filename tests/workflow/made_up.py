"""Made-up tidy tables: a row per combination of settings, with metrics that differ in every row."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from specter.memory import PARTS

METRICS = (
    "tpot_ms", "tpot_after_first_round_ms", "ttft_ms", "end_to_end_ms", "union_mean", "num_hits", "num_late_hits",
    "num_misses", "hit_rate", "bytes_per_token", "link_busy_frac", "stall_ms", "over_floor_trace", "over_floor_ideal",
    "bits_per_weight", "decode_floor_ms", "device_total_bytes", "floor_ideal_ms", "floor_trace_ms", "acceptance",
    "mean_accepted_len", "num_prompt_tokens", "num_rounds", "num_drafted", "num_prefetched", "draft_ms", "link_bytes",
    "link_bytes_per_s", "frac_prefetched_used", "num_plans", "num_overlap_plans", "first_chunk_len",
    *(f"device_{part}_bytes" for part in PARTS),
)  # fmt: skip
PER_LAYER = {"high": 16.0, "low": 4.0, "card": 31.0}
SETTINGS: dict[str, Any] = {
    "model": "deepseek_v2_lite", "checkpoint_kind": "standin", "budget": "high", "policy": "same_bytes",
    "sampling": "greedy", "temperature": 1.0, "hardware": "a100_40gb_pcie4", "dataset": "gsm8k", "input": 0, "k": 16,
    "repeat": 0, "prompt_tokens": 16, "max_new_tokens": 128, "ignore_eos": True, "clock": "virtual",
    "distinct_4grams": 1.0, "fits_budget": True, "fits_device": True, "fits_without_offloading": True,
    "assumes_residents": False, "codec": "bf16", "charged_bits": 0.0, "is_auto": False, "execution": "default",
}  # fmt: skip


def runs(systems: Sequence[str], **axes: Sequence[Any]) -> pd.DataFrame:
    """Runs of every combination. A system that ignores the budget runs at the first one and under the first policy;
    plain decoding has K = 0."""
    rows = []
    for system in systems:
        speculative, uses_budget = system.startswith("spec"), system != "resident"
        mine = axes | ({} if uses_budget else {key: axes[key][:1] for key in ("budget", "policy") if key in axes})
        mine |= {} if speculative else {"k": [0]}
        for values in itertools.product(*mine.values()):
            row = SETTINGS | dict(zip(mine, values, strict=True)) | {"system": system}
            rng = random.Random(str(sorted(row.items())))
            metrics = {name: rng.uniform(1, 100) for name in METRICS}
            rows.append(row | metrics | {"speculative": speculative, "uses_budget": uses_budget})
    frame = pd.DataFrame(rows)
    per_layer = [PER_LAYER.get(str(budget)) or float(budget) for budget in frame["budget"]]
    return frame.assign(charged_as=frame["model"], experts_per_layer=per_layer, residents_of=frame["system"])


def probe() -> pd.DataFrame:
    """Every quantity of the probe for three kinds of text, two data sets each; all values differ."""
    rng = random.Random(7)
    rows: list[dict[str, Any]] = []
    for mode, name in itertools.product(("greedy", "seeded", "teacher-forced"), ("gsm8k", "prose")):
        at = {"mode": mode, "dataset": name}
        rows += [at | {"quantity": "fidelity", "layer": layer, "value": rng.random()} for layer in (0, 1, 2)]
        rows += [at | {"quantity": "union", "k": k, "value": k * rng.uniform(1, 6)} for k in (1, 2, 3, 16)]
        rows += [at | {"quantity": "run", "k": k, "value": float(rng.randint(1, 9))} for k in (0, 2, 8)]
        rows += [at | {"quantity": "named_used", "k": k, "value": rng.random()} for k in (6, 16, 32)]
        rows += [at | {"quantity": "acceptance", "value": rng.random(), "num": rng.randint(10, 90)}]
        rows += [at | {"quantity": "distinct_4grams", "value": rng.random()}]
    named = {"model": "deepseek_v2_lite", "checkpoint_kind": "standin", "charged_as": "deepseek_v2_lite"}
    return pd.DataFrame([{"layer": -1, "k": 0, "num": 4, "temperature": 1.0} | named | row for row in rows])


def fidelity() -> pd.DataFrame:
    """Every quantity of the fidelity study for two methods, two requests and two layers; all values differ."""
    rng = random.Random(8)
    rows: list[dict[str, Any]] = []
    for method in ("q8_0", "gptq"):
        found: list[dict[str, Any]] = [
            {"quantity": quantity, "request": request, "layer": layer}
            for quantity, request, layer in itertools.product(("set_match", "order_match", "same_set"), (0, 1), (0, 1))
        ]
        found += [{"quantity": "agreement", "request": request} for request in (0, 1)]
        found += [{"quantity": "position", "position": at, "num": rng.randint(1, 5)} for at in range(20)]
        found += [{"quantity": "margin", "margin": at / 10} for at in range(1, 11)]
        rows += [row | {"method": method, "value": rng.random()} for row in found]
    named = {"model": "deepseek_v2_lite", "checkpoint_kind": "standin", "charged_as": "deepseek_v2_lite", "window": 16,
             "num_requests": 2, "num_pairs": 4, "mode": "seeded", "dataset": "gsm8k"}  # fmt: skip
    empty = {"request": -1, "layer": -1, "position": -1, "margin": 0.0, "num": 1}
    return pd.DataFrame([empty | named | row for row in rows])


def lanes() -> pd.DataFrame:
    """Operations of two rounds of four systems on two texts; all lengths differ."""
    rng = random.Random(9)
    named = {"model": "deepseek_v2_lite", "checkpoint_kind": "standin", "charged_as": "deepseek_v2_lite",
             "budget": "high", "policy": "same_bytes", "input": 0, "sampling": "seeded", "temperature": 1.0,
             "hardware": "a100_40gb_pcie4", "clock": "virtual"}  # fmt: skip
    rows: list[dict[str, Any]] = []
    axes = itertools.product(("specmoeoff", "specter", "specter_plus", "lru_residual"), ("gsm8k", "prose"), (0, 1))
    for system, dataset, number in axes:
        at = {"system": system, "dataset": dataset, "round": number, "new_len": 4, "round_ms": rng.uniform(50, 60)}
        at |= {"draft_len": 0 if system == "lru_residual" else 3}
        begin = 0.0
        for part in ("draft_step", "prefetch", "attend_and_route", "fetch", "decode", "experts", "combine", "head"):
            lane, length = "link" if "fetch" in part else "compute", rng.uniform(1, 4)
            stall = rng.uniform(0, 1) if part == "experts" else 0.0
            rows.append(at | {"lane": lane, "part": part, "begin_ms": begin, "length_ms": length, "stall_ms": stall})
            begin += length + stall
    return pd.DataFrame(rows).assign(**named)  # type: ignore[arg-type]


def rounds(systems: Sequence[str], **axes: Sequence[Any]) -> pd.DataFrame:
    """Six rounds of K = 4 of every combination, one after the other, with counts that differ."""
    rng, rows = random.Random(10), []
    for system, *found in itertools.product(systems, *axes.values()):
        end = 0.0
        for number in range(6):
            start, end = end, end + rng.uniform(5, 9)
            counts = {f"num_{name}": rng.randint(1, 50) for name in ("hits", "late_hits", "misses")}
            times = {
                "round": number,
                "start_ms": start,
                "end_ms": end,
                "draft_len": 4,
                "accepted_len": rng.randint(0, 4),
            }
            rows.append(SETTINGS | dict(zip(axes, found, strict=True)) | {"system": system} | times | counts)
    return pd.DataFrame(rows).assign(charged_as="deepseek_v2_lite").drop(columns="temperature")


def values(frame: pd.DataFrame, column: str, **settings: Any) -> list[float]:
    """The values of a column in the rows with these settings, in plain Python."""
    rows = frame.to_dict("records")
    return [row[column] for row in rows if all(row[key] == value for key, value in settings.items())]


def macro(frame: pd.DataFrame, column: str, **settings: Any) -> float:
    """The mean over data sets of the means over inputs."""
    names = sorted(set(values(frame, "dataset", **settings)))
    return fmean(fmean(values(frame, column, dataset=name, **settings)) for name in names)


def one(data: pd.DataFrame, **settings: Any) -> Mapping[str, Any]:
    """The only row of `data` with these settings."""
    (row,) = (row for row in data.to_dict("records") if all(row[key] == value for key, value in settings.items()))
    return {str(key): value for key, value in row.items()}


def ink(figure: Figure) -> np.ndarray:
    """All numbers that a figure draws: sizes of bars, points of lines, corners of areas and whiskers, cells; sorted."""
    found: list[float] = []
    for axes in figure.axes:
        for patch in axes.patches:
            found += [patch.get_height(), patch.get_width()]  # type: ignore[attr-defined]
        for line in axes.lines:
            found += [*np.asarray(line.get_xdata(), float), *np.asarray(line.get_ydata(), float)]
        for collection in axes.collections:
            found += [float(x) for path in collection.get_paths() for x in np.asarray(path.vertices).ravel()]
            found += list(np.asarray(collection.get_offsets()).ravel())
            if (cells := collection.get_array()) is not None:  # of a heat map
                found += list(np.asarray(cells, float).ravel())
    numbers = np.array(found)
    return np.sort(numbers[np.isfinite(numbers)])


def not_drawn(figure: Figure, numbers: Iterable[float]) -> list[float]:
    """The finite ones of `numbers` that the figure does not draw."""
    drawn = ink(figure)
    wanted = [number for number in numbers if np.isfinite(number)]
    return [number for number in wanted if not np.isclose(drawn, number, rtol=1e-9, atol=1e-9).any()]
