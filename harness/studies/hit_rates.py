"""Hit rates as the paper's first version has them: of an LRU cache, and of the experts that a draft names."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.plotting.frames import Frames, macro, rows_of, table_rows
from harness.plotting.tables import Table, run_table
from harness.studies import published
from harness.studies.registry import table


@table(
    "hit_rates", "hit_rates", "probe", model_by_model=True, minutes=7,
    about="hit rates of LRU and of the draft's forecast at 6, 16 and 32 slots, beside the paper's",
)  # fmt: skip
def hit_rates_table(frames: Frames) -> Table:
    frame = frames["hit_rates"]
    named = rows_of(frames["probe"], quantity="named_used")
    paper = (published.HIT_RATE_LRU, published.HIT_RATE_SPECULATIVE)

    def numbers(mine: pd.DataFrame) -> dict[str, Any]:
        one = mine.iloc[0]
        slots = int(one["budget"])
        lru, ours = (rows_of(mine, system=name) for name in ("lru", "specter"))
        given = [rates.get(one["charged_as"], {}).get(slots, float("nan")) * 100 for rates in paper]
        forecast = rows_of(named, mode=one["sampling"], k=slots)
        return {
            "slots": str(slots),
            "LRU (%)": macro(lru, "hit_rate") * 100,
            "paper, LRU (%)": given[0],
            "speculative (%)": macro(forecast, "value") * 100,
            "paper, speculative (%)": given[1],
            "Specter, on demand (%)": macro(ours, "hit_rate") * 100,
            "copied ahead, used (%)": macro(ours, "frac_prefetched_used") * 100,
        }

    ordered = frame.sort_values("budget", key=lambda budgets: budgets.astype(int), kind="stable")
    rows = table_rows(ordered, ["sampling", "budget"], numbers).drop(columns="budget")
    words = (
        "Slots: per layer, the same for both systems. LRU: of plain decoding, in an engine that a warm-up has filled. "
        "Speculative: of the experts that a whole draft names, the most chosen ones and at most as many as slots, the "
        "share that its verification uses; the definitions of the paper are not known to us, and this one falls with "
        "the slots as its numbers do. On demand: experts present when the verification needs them, which bounds the "
        "time. Macro average over data sets."
    )
    return run_table("Hit rates by slots", rows, 2, words, frame)
