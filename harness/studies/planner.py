"""What each choice of the published planner is worth, and when it plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import Grid, note
from harness.plotting.frames import Frames, macro, rows_of, summary, table_rows, with_panels
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import colour
from harness.studies import disagreements
from harness.studies.registry import figure, table
from specter.experts.policies.three_phase import cold_start

AS_PUBLISHED = "as published"
# By system and execution, what is switched.
SWITCHES = {
    ("specter", "default"): AS_PUBLISHED,
    ("specter", "perfect_routes"): "perfect route predictions",
    ("specter", "wrong_routes"): "wrong route predictions",
    ("specter_early", "default"): "early plan and eviction",
    ("specter_late", "default"): "late plan and eviction",
    ("specter_no_barrier", "default"): "no barrier",
    ("specter_retain", "default"): "eviction by counts, staging",
    ("specter_no_prefetch", "default"): "no prefetch",
    ("specter_copied_kv", "default"): "copied KV",
    ("specter", "by_token"): "verification token by token",
    ("specter_deadline", "default"): "ours (deadline + retain)",
    ("specter_deadline", "perfect_routes"): "ours, perfect predictions",
    ("specter_deadline", "wrong_routes"): "ours, wrong predictions",
}
CELL = ("budget", "sampling")
WHAT = (
    "Macro average over data sets; the same recorded texts in every row. Perfect, wrong: the planner gets the target's "
    "own routing, or the draft's with every expert's number moved by half of all. Early, late: the first plan, which "
    "displaces residents, after the first or after the last draft token (as published: after a fifth of K). Copied KV: "
    "the draft's KV is a copy of the target's, made in every round. Token by token: a verification runs the experts of "
    "one token after the other"
)


def _switched(frames: Frames) -> pd.DataFrame:
    frame = frames["planner"]
    pairs = zip(frame["system"], frame["execution"], strict=True)
    return frame.assign(switch=[SWITCHES[pair] for pair in pairs])


def planner_data(frames: Frames) -> pd.DataFrame:
    """[budget, sampling, panel, switch, ms_per_token, value (over the published system's)], as `SWITCHES` has them."""
    frame = _switched(frames)
    order = list(SWITCHES.values())
    data = summary(frame, [*CELL, "switch"], lambda mine: {"ms_per_token": macro(mine, "tpot_ms")})
    data = data.sort_values("switch", key=lambda names: names.map(order.index), kind="stable", ignore_index=True)
    published = rows_of(data, switch=AS_PUBLISHED).set_index(list(CELL))["ms_per_token"]
    cells = zip(data["budget"], data["sampling"], strict=True)
    return with_panels(data.assign(value=data["ms_per_token"] / [published[cell] for cell in cells]), frame)


def finding(frames: Frames) -> str:
    """What the switches change, least and greatest over tiers and samplings."""
    data = planner_data(frames)

    def change(switch: str) -> str:
        values = rows_of(data, switch=switch)["value"]
        return f"{values.min() - 1:+.1%} to {values.max() - 1:+.1%}"

    return (
        f"Time per token against the published planner, over tiers and samplings: perfect predictions "
        f"{change('perfect route predictions')}, wrong ones {change('wrong route predictions')}; an early plan "
        f"{change('early plan and eviction')}, a late one {change('late plan and eviction')}; no prefetch "
        f"{change('no prefetch')}; a copied KV {change('copied KV')}; verification token by token "
        f"{change('verification token by token')}."
    )


@figure(
    "planner", "planner", one_model=True, minutes=4, data=planner_data, finding=finding,
    key="TPOT over that of Specter with the published planner, one thing switched.",
    footer=lambda frames: [
        *notes.run_notes(frames["planner"], f"{WHAT}."), f"{disagreements.PLANNER} {finding(frames)}",
    ],
    about="what each choice of the published planner and verification is worth, one switched at a time",
)  # fmt: skip
def draw_planner(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="sampling", columns="budget", height=2.2, sharex=True, sharey=True,
                x="TPOT, × published planner")  # fmt: skip
    for panel, part in grid:
        places = -np.arange(len(part))
        is_ours = part["switch"].str.startswith("ours")
        shades = [colour("specter_deadline" if ours else "specter") for ours in is_ours]
        panel.barh(places, part["value"], 0.75, color=shades)
        for place, value in zip(places, part["value"], strict=True):
            note(panel, f"{value:.2f}", (max(value, 1), place - 0.35), offset=(9, 0))  # clear of the line at 1
        panel.axvline(1, color="black", lw=0.8)
        panel.set_xlim(0, 1.2 * data["value"].max())
        panel.set_yticks(places, part["switch"], fontsize=6)
    return grid


@table("planner", "planner", model_by_model=True)
def planner_table(frames: Frames) -> Table:
    frame, data = _switched(frames), planner_data(frames)

    def numbers(mine: pd.DataFrame) -> dict[str, Any]:
        one = mine.iloc[0]
        row = rows_of(data, budget=one["budget"], sampling=one["sampling"], switch=one["switch"]).iloc[0]
        return {
            "TPOT (ms)": row["ms_per_token"],
            "× as published": row["value"],
            "misses per round": _per_round(mine, "num_misses"),
            "copied ahead per round": _per_round(mine, "num_prefetched"),
            "copied ahead, used (%)": float(mine["frac_prefetched_used"].mean() * 100),
            "GB per token": macro(mine, "bytes_per_token") / 1e9,
            "stall per round (ms)": _per_round(mine, "stall_ms"),
            "plans per round": _per_round(mine, "num_plans"),
        }

    parts = [rows_of(frame, switch=name) for name in SWITCHES.values()]
    rows = pd.concat([table_rows(part, ["switch", *CELL], numbers) for part in parts if len(part)])
    rows = rows[[*CELL, "switch", *rows.columns.drop([*CELL, "switch"])]]
    rows = rows.sort_values(list(CELL), kind="stable", ignore_index=True)
    return run_table(
        "The published planner, one thing switched at a time", rows, 3,
        f"{WHAT}. {disagreements.PLANNER} {finding(frames)}", frame,
    )  # fmt: skip


def _per_round(rows: pd.DataFrame, column: str) -> float:
    return float((rows[column] / rows["num_rounds"]).mean())


@table(
    "planner_overlap", "planner_overlap", model_by_model=True, minutes=4,
    about="when the published planner's Prefetch Overlap happens: plans per round by residents and K",
)  # fmt: skip
def overlap_table(frames: Frames) -> Table:
    frame = frames["planner_overlap"]

    def numbers(mine: pd.DataFrame) -> dict[str, Any]:
        one = mine.iloc[0]
        return {
            "experts per layer": f"{one['experts_per_layer']:g}",
            "TPOT (ms)": macro(mine, "tpot_ms"),
            "plans per round": _per_round(mine, "num_plans"),
            "of Prefetch Overlap": _per_round(mine, "num_overlap_plans"),
            "copies of the first plan (draft tokens)": float(mine["first_chunk_len"].mean()),
            "tokens left to draft": float(one["k"] - cold_start(one["k"])),
        }

    words = (
        f"{disagreements.OVERLAP} Copies of the first plan: how many draft steps the planner expects them to take; "
        "Overlap needs fewer than are left to draft (of a full round). Mean over texts; a budget that is a number is "
        "experts per layer."
    )
    return run_table(
        "When Prefetch Overlap happens", table_rows(frame, ["budget", "sampling", "k"], numbers), 3, words, frame
    )


@table(
    "planner_texts", "planner_texts", model_by_model=True, minutes=4,
    about="the published planner on prefixes of 8, 16 and 32 tokens at T = 0.7",
)  # fmt: skip
def texts_table(frames: Frames) -> Table:
    frame = frames["planner_texts"]
    times = frame.groupby(["budget", "prompt_tokens", "system", "dataset"])["tpot_ms"].mean()

    def numbers(mine: pd.DataFrame) -> dict[str, Any]:
        one = mine.iloc[0]
        published = float(times[one["budget"], one["prompt_tokens"], "specter"].mean())
        tpot = macro(mine, "tpot_ms")
        return {
            "prompt": f"first {one['prompt_tokens']}",
            "TPOT (ms)": tpot,
            "× Specter": tpot / published,
            "acceptance (%)": macro(mine, "acceptance") * 100,
            "experts per layer and round": macro(mine, "union_mean"),
            "plans per round": _per_round(mine, "num_plans"),
        }

    rows = table_rows(frame, ["budget", "prompt_tokens", "system"], numbers)
    words = "Macro average over data sets; × Specter: TPOT over that of the published planner on the same texts."
    return run_table("The planner on other prefixes and at another temperature", rows, 3, words, frame)
