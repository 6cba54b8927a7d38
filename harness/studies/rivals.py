"""Every baseline under every memory policy: TPOT, and the device bytes that each system spends."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import Grid, grouped_bars
from harness.plotting.frames import Frames, macro, names, rows_of, summary, table_rows, with_panels
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import styles, title
from harness.studies.registry import figure, table
from specter.memory import PARTS

MISFIT = "does not fit"
MACRO = "Macro average over data sets."
CELLS = ("budget", "policy", "system")


def rivals_data(frames: Frames) -> pd.DataFrame:
    """[budget, panel, policy (its title), system, tpot_ms (none: does not fit)]: macro averages."""
    data = summary(frames["rivals"], CELLS, lambda mine: {"tpot_ms": macro(mine, "tpot_ms")})
    return with_panels(data.assign(policy=[title("policy", name) for name in data["policy"]]), frames["rivals"])


@figure(
    "rivals", "rivals", one_model=True, minutes=3, data=rivals_data, key=MACRO,
    footer=lambda frames: [*notes.run_notes(frames["rivals"], MACRO), *notes.residents(frames["rivals"])],
    about="every rival at equal bytes, at equal experts and as published; what does not fit",
)  # fmt: skip
def draw_rivals(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="budget", height=2.1, sharey=True, y="TPOT (ms per token)", legend=True)
    for panel, part in grid:
        centres = grouped_bars(
            panel, part, groups="policy", series="system", value="tpot_ms", styles=styles(data["system"])
        )
        for policy, system in part.loc[part["tpot_ms"].isna(), ["policy", "system"]].to_numpy().tolist():
            panel.text(centres[policy, system], 1, MISFIT, rotation=90, fontsize=5.5, ha="center", va="bottom")
    return grid


@table("rivals", "rivals", model_by_model=True)
def rivals_table(frames: Frames) -> Table:
    frame = frames["rivals"]
    ours = [name for name in names(frame, "system") if name.startswith("specter")]

    def numbers(mine: pd.DataFrame) -> dict[str, Any]:
        one = mine.iloc[0]
        depth = {"K": str(one["k"]) if one["speculative"] else "–"}
        if not mine["fits_budget"].all():
            return depth | {"experts per layer": MISFIT}
        cell = rows_of(frame, budget=one["budget"], policy=one["policy"])
        needed = mine["num_hits"] + mine["num_late_hits"] + mine["num_misses"]
        tpot = macro(mine, "tpot_ms")
        ratios = {f"× {title('system', name)}": tpot / macro(rows_of(cell, system=name), "tpot_ms") for name in ours}
        return {
            **depth,
            "experts per layer": f"{one['experts_per_layer']:.1f}",
            "TPOT (ms)": tpot,
            "after 1st round (ms)": macro(mine, "tpot_after_first_round_ms"),
            "TTFT (ms)": macro(mine, "ttft_ms"),
            "end to end (ms)": macro(mine, "end_to_end_ms"),
            "misses (%)": float((mine["num_misses"] / needed).mean() * 100),
            "GB per token": macro(mine, "bytes_per_token") / 1e9,
            "acceptance (%)": macro(mine, "acceptance") * 100,
            **ratios,
        }

    words = (
        f"{MACRO[:-1]}; ×: the row's TPOT over that of our system in the same cell. Under “as published” a "
        f"system has the experts per layer of the paper's text. {' '.join(notes.residents(frame))}"
    )
    return run_table("Rivals by memory policy", table_rows(frame, CELLS, numbers), 5, words, frame)


def _memory(mine: pd.DataFrame) -> dict[str, Any]:
    one = mine.iloc[0]
    return {
        "experts per layer": f"{one['experts_per_layer']:.1f}" if one["fits_budget"] else MISFIT,
        "fits the device": "yes" if one["fits_device"] else "no",
        **{f"{part.replace('_', ' ')} (GB)": one[f"device_{part}_bytes"] / 1e9 for part in PARTS},
        "all (GB)": one["device_total_bytes"] / 1e9,
    }


@table("memory", "rivals", model_by_model=True, minutes=3, about="device bytes by part, of every system and policy")
def memory_table(frames: Frames) -> Table:
    frame = frames["rivals"]
    words = (
        "Device bytes of the full-size model. shared: non-expert weights; draft: INT4 experts; draft shared, draft kv: "
        "an own draft's second copy of the non-expert weights and of the KV cache; buffer: spare buffers; slot: 16-bit "
        f"experts. “{MISFIT}”: the policy leaves this system fewer than two slots; its bytes are those without any."
    )
    return run_table("Device memory by part", table_rows(frame, CELLS, _memory), 5, words, frame)
