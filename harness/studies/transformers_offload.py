"""The real transformers library with its offload, by wall time of the machine that runs the workflow."""

from __future__ import annotations

import pandas as pd

from harness.plotting import notes
from harness.plotting.frames import Frames
from harness.plotting.tables import Table
from harness.studies.registry import table


@table(
    "transformers_offload", "transformers_offload", model_by_model=True, minutes=1,
    about="the real library with offload, by wall time",
)  # fmt: skip
def transformers_offload_table(frames: Frames) -> Table:
    frame = frames["transformers_offload"]
    rows = pd.DataFrame(
        {
            "system": frame["system"],
            "same tokens as ours": ["yes" if agrees else "no" for agrees in frame["agrees_with_ours"]],
            "first token (ms)": frame["ttft_ms"],
            "per token, median (ms)": frame["tpot_ms"],
        }
    )
    one, checkpoint = frame.iloc[0], notes.checkpoint_line(frame)
    words = [
        "Clock: wall time of the machine that made this table, which has no part in any other table or figure and "
        f"changes from run to run. {checkpoint}, fp32 on a CPU with {one['threads']} thread, "
        f"{one['num_prompt_tokens']} prompt and {one['num_new_tokens']} new tokens. With the CPU as execution device, "
        "offload measures the library's hooks, copies and files, not a link."
    ]
    stated = {"clock": "host", "checkpoint": checkpoint}
    return Table("The transformers library with offload, wall time", rows, 2, words, stated)
