"""The first figure's comparison on sampled text that is as near to the paper's as the stand-ins get."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.plotting import notes
from harness.plotting.frames import MACRO, Frames, macro, rows_of, table_rows
from harness.plotting.tables import Table, run_table
from harness.studies import published
from harness.studies.registry import figure, table
from harness.studies.speedup import KEY, draw_speedup, overall, speedup_data

WHAT = (
    "Each model at the temperature at which its acceptance, expert union and LRU hits are together nearest to the "
    "paper's (table device.temperatures has the distances)"
)


def paper_like_data(frames: Frames) -> pd.DataFrame:
    """As `speedup_data`."""
    return speedup_data({"main": frames["paper_like"]})


def finding(frames: Frames) -> str:
    data = paper_like_data(frames)
    paper = overall(data, policy="published", baseline="specmoeoff")
    equal = rows_of(data, policy="same_bytes", baseline="lru", dataset=MACRO).dropna(subset="speedup")
    return (
        f"On sampled text like the paper's, with the published residents, Specter is {paper['mean']:.2f} times as fast "
        f"as SpecMoEOff (mean of {paper['cells']} cells, {paper['least']:.2f} to {paper['greatest']:.2f}; paper: "
        f"{published.SPEEDUP_MEAN:.2f}, at most {published.SPEEDUP_MAX:.2f}); at equal device bytes LRU is faster than "
        f"Specter in {int((equal['speedup'] < 1).sum())} of {len(equal)} cells."
    )


figure(
    "paper_like", "paper_like", minutes=4, data=paper_like_data, draws_published=True, key=KEY, finding=finding,
    footer=lambda frames: [
        f"{WHAT}.", *notes.run_notes(frames["paper_like"], KEY), *notes.residents(frames["paper_like"]),
    ],
    about="the speed-ups on sampled text like the paper's, each model at its own temperature",
)(draw_speedup)  # fmt: skip


@table("paper_like", "paper_like")
def paper_like_table(frames: Frames) -> Table:
    frame = frames["paper_like"]
    data = paper_like_data(frames)

    def numbers(mine: pd.DataFrame) -> dict[str, Any]:
        one = mine.iloc[0]
        cell = rows_of(data, model=one["charged_as"], budget=one["budget"], dataset=MACRO)
        ratio = {
            (policy, name): float(rows_of(cell, policy=policy, baseline=name)["speedup"].iloc[0])
            for policy, name in (
                ("published", "specmoeoff"),
                ("published", "mixtral_offloading"),
                ("same_bytes", "lru"),
            )
        }
        ours = rows_of(mine, system="specter", policy="published")
        acceptance, paper = macro(ours, "acceptance"), published.ACCEPTANCE.get(one["charged_as"])
        given = published.ACCEPTANCE_MEAN if paper is None else paper
        return {
            "T": f"{one['temperature']:g}",
            "acceptance (%)": acceptance * 100,
            "paper's (%)": given * 100,
            "off (%)": abs(acceptance / given - 1) * 100,
            "distinct 4-grams": macro(ours, "distinct_4grams"),
            "TPOT (ms)": macro(ours, "tpot_ms"),
            "× SpecMoEOff, published": ratio["published", "specmoeoff"],
            "× Mixtral-Offloading, published": ratio["published", "mixtral_offloading"],
            "× LRU, equal bytes": ratio["same_bytes", "lru"],
        }

    rows = table_rows(frame, ["charged_as", "budget"], numbers)
    words = (
        f"{WHAT}. Paper's acceptance: of the model, else its mean. ×: the baseline's TPOT over Specter's. "
        f"{finding(frames)}"
    )
    return run_table("Sampled text like the paper's", rows, 2, words, frame)
