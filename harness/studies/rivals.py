"""Every baseline under every memory policy: TPOT, and the device bytes that each system spends."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import Grid, grouped_bars
from harness.plotting.frames import Frames, budget_title, macro, macro_by, rows_of, systems, tiers
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import in_order, styles, title
from harness.studies.registry import figure, table
from specter.memory import PARTS

MISFIT = "does not fit"
MACRO = "Macro average over data sets."


def rivals_data(frames: Frames) -> pd.DataFrame:
    """[budget, panel, policy (its title), system, tpot_ms (none: does not fit)]: macro averages."""
    frame = frames["rivals"]
    means = macro_by(frame, ["budget", "policy", "system"], "tpot_ms")
    rows = [
        {"budget": budget, "panel": budget_title(frame, budget), "policy": title("policy", policy), "system": system,
         "tpot_ms": means.get((budget, policy, system), float("nan"))}
        for budget, policy, system in _cells(frame)
    ]  # fmt: skip
    return pd.DataFrame(rows)


@figure(
    "rivals", "rivals", one_model=True, minutes=3, data=rivals_data,
    footer=lambda frames: notes.run_notes(frames["rivals"], MACRO),
    about="every rival at equal bytes, at equal experts and as published; what does not fit",
)  # fmt: skip
def draw_rivals(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="budget", height=2.1, margin=0.4)
    for panel, part in grid:
        centres = grouped_bars(
            panel, part, groups="policy", series="system", value="tpot_ms", styles=styles(data["system"])
        )
        for policy, system in part.loc[part["tpot_ms"].isna(), ["policy", "system"]].to_numpy().tolist():
            panel.text(centres[policy, system], 1, MISFIT, rotation=90, fontsize=5.5, ha="center", va="bottom")
    grid.label(y="TPOT (ms per token)")
    grid.legend(4)
    return grid


def _cells(frame: pd.DataFrame) -> Iterator[tuple[str, str, str]]:
    """(budget, policy, system) of a table of rivals, largest budget first."""
    for budget in tiers(frame)[1]:
        for policy in in_order("policy", frame["policy"]):
            for system in systems(frame):
                yield budget, policy, system


@table("rivals", "rivals", model_by_model=True)
def rivals_table(frames: Frames) -> Table:
    frame = frames["rivals"]
    rows: list[dict[str, object]] = []
    for budget, policy, system in _cells(frame):
        cell = rows_of(frame, budget=budget, policy=policy)
        mine = rows_of(cell, system=system)
        named: dict[str, object] = {
            "budget": budget,
            "policy": title("policy", policy),
            "system": title("system", system),
            "K": str(mine["k"].iloc[0]) if mine["speculative"].iloc[0] else "–",
        }
        if not mine["fits_budget"].all():
            rows.append(named | {"experts per layer": MISFIT})
            continue
        tpot = macro(mine, "tpot_ms")
        needed = mine["num_hits"] + mine["num_late_hits"] + mine["num_misses"]
        rows.append(
            named
            | {
                "experts per layer": f"{mine['experts_per_layer'].iloc[0]:.1f}",
                "TPOT (ms)": tpot,
                "after 1st round (ms)": macro(mine, "tpot_after_first_round_ms"),
                "TTFT (ms)": macro(mine, "ttft_ms"),
                "end to end (ms)": macro(mine, "end_to_end_ms"),
                "misses (%)": float((mine["num_misses"] / needed).mean() * 100),
                "GB per token": macro(mine, "bytes_per_token") / 1e9,
                "acceptance (%)": macro(mine, "acceptance") * 100,
            }
            | {
                f"× {title('system', ours)}": tpot / macro(rows_of(cell, system=ours), "tpot_ms")
                for ours in systems(cell)
                if ours.startswith("specter")
            }
        )
    words = (
        f"{MACRO[:-1]}; ×: the row's TPOT over that of our system in the same cell. Under “as published” a "
        "system has the experts per layer of the paper's table, or as many as Specter where it has none."
    )
    return run_table("Rivals by memory policy", pd.DataFrame(rows), 5, words, frame)


@table("memory", "rivals", model_by_model=True, minutes=3, about="device bytes by part, of every system and policy")
def memory_table(frames: Frames) -> Table:
    frame = frames["rivals"]
    rows = []
    for budget, policy, system in _cells(frame):
        one = rows_of(frame, budget=budget, policy=policy, system=system).iloc[0]
        rows.append(
            {
                "budget": budget,
                "policy": title("policy", policy),
                "system": title("system", system),
                "experts per layer": f"{one['experts_per_layer']:.1f}" if one["fits_budget"] else MISFIT,
                "fits the device": "yes" if one["fits_device"] else "no",
                **{f"{part.replace('_', ' ')} (GB)": one[f"device_{part}_bytes"] / 1e9 for part in PARTS},
                "all (GB)": one["device_total_bytes"] / 1e9,
            }
        )
    words = (
        "Device bytes of the full-size model. shared: non-expert weights; draft: INT4 experts; draft shared, draft kv: "
        "an own draft's second copy of the non-expert weights and of the KV cache; buffer: spare buffers; slot: 16-bit "
        f"experts. “{MISFIT}”: the policy leaves this system fewer than two slots; its bytes are those without any."
    )
    return run_table("Device memory by part", pd.DataFrame(rows), 5, words, frame)
