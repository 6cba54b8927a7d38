"""What INT4 drafts are worth offloaded, by how their kernels are launched: time per token and throughput."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.plotting.frames import Frames, macro, rows_of, table_rows
from harness.plotting.tables import Table, run_table
from harness.studies import disagreements
from harness.studies.registry import table

CELL = ("charged_as", "hardware", "budget")
# By system and execution, in the paper's order of falling TPOT.
VARIANTS = {
    ("lru", "default"): "16 bit",
    ("specter_deadline", "by_expert"): "INT4 by expert",
    ("specter_deadline", "default"): "INT4 fused",
}


@table("int4", "int4", minutes=6, about="16 bits, INT4 by expert and fused INT4, offloaded: TPOT and throughput")
def int4_table(frames: Frames) -> Table:
    frame = frames["int4"]

    def numbers(mine: pd.DataFrame) -> dict[str, Any]:
        times = {
            name: macro(rows_of(mine, system=system, execution=execution), "tpot_ms")
            for (system, execution), name in VARIANTS.items()
        }
        by_expert = rows_of(mine, execution="by_expert")
        fused = rows_of(mine, system="specter_deadline", execution="default")
        steps = [float((rows["draft_ms"] / rows["num_drafted"]).mean()) for rows in (by_expert, fused)]
        return {
            **{f"{name} (ms)": value for name, value in times.items()},
            **{f"{name} (tokens/s)": 1e3 / value for name, value in times.items()},
            "16 bit / by expert": times["16 bit"] / times["INT4 by expert"],
            "by expert / fused": times["INT4 by expert"] / times["INT4 fused"],
            "draft step by expert (ms)": steps[0],
            "draft step fused (ms)": steps[1],
        }

    rows = table_rows(frame, CELL, numbers)
    words = (
        "16 bit: plain decoding over LRU. INT4: the same slots with a draft whose kernels are launched once per chosen "
        "expert, or once per layer; the virtual clock charges each launch a kernel's constant time, 1.5 us on an H200, "
        "which took 2.0 to 2.6 (figure device.int4_backends). The paper's order is that of falling TPOT and rising "
        f"throughput. Macro average over data sets. {disagreements.UNFUSED}"
    )
    return run_table("INT4 drafts, offloaded, by launch", rows, 3, words, frame)
