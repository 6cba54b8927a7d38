"""Acceptance by the position of a token in its draft, by data set."""

from __future__ import annotations

import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import MODES, PAPER, Grid
from harness.plotting.frames import Frames, blocks, rows_of, split
from harness.plotting.titles import title
from harness.studies import published
from harness.studies.registry import figure

ALL = ""  # the data set of the rows that pool all of them


def accepting_rounds(frames: Frames) -> pd.DataFrame:
    """The rounds of Specter at one budget and policy: neither changes a token."""
    frame = rows_of(frames["rounds/main"], system="specter")
    one = frame.iloc[0]
    return rows_of(frame, budget=one["budget"], policy=one["policy"])


def by_position(rounds: pd.DataFrame) -> pd.DataFrame:
    """[position, value, num]: per cent of the drafts examined at a position that were accepted, and how many were."""
    found = []
    for position in range(1, int(rounds["draft_len"].max()) + 1):
        examined = rounds[(rounds["draft_len"] >= position) & (rounds["accepted_len"] >= position - 1)]
        if len(examined):
            accepted = (examined["accepted_len"] >= position).mean() * 100
            found.append({"position": position, "value": accepted, "num": len(examined)})
    return pd.DataFrame(found)


def positions_data(frames: Frames) -> pd.DataFrame:
    """[model, panel, sampling, dataset (`ALL`: pooled), position, value, num]."""
    frame = accepting_rounds(frames)
    parts = [
        blocks(frame, ["charged_as", "sampling"], by_position).assign(dataset=ALL),
        blocks(frame, ["charged_as", "sampling", "dataset"], by_position),
    ]
    data = pd.concat(parts, ignore_index=True)
    return data.assign(panel=[title("model", model) for model in data["model"]])


@figure(
    "positions", "rounds/main", minutes=7, data=positions_data, shown=accepting_rounds, draws_published=True,
    key="Thick: all texts; thin: each data set. The axis does not start at 0.",
    footer=lambda frames: [
        "Per cent of drafts accepted among those examined: a draft is examined if all before it in its round were "
        f"accepted. Specter at the paper's K. {notes.brief(accepting_rounds(frames))}"
    ],
    about="accepted draft tokens by position in the draft and by data set, beside the paper's mean",
)  # fmt: skip
def draw_positions(data: pd.DataFrame) -> Grid:
    grid = Grid(data, columns="model", height=2.3, sharey=True, x="position in the draft",
                y="accepted of those examined (%)", legend=True)  # fmt: skip
    for panel, part in grid:
        for named, mine in split(part, "sampling", "dataset"):
            is_all, sampling = named["dataset"] == ALL, str(named["sampling"])
            style = {"lw": 1.8, "marker": "o", "ms": 3, "label": sampling} if is_all else {"lw": 0.6, "alpha": 0.6}
            panel.plot(mine["position"], mine["value"], color=MODES[sampling], zorder=3 if is_all else 2, **style)
        panel.axhline(published.ACCEPTANCE_MEAN * 100, color=PAPER, lw=1, ls="--", label="paper: mean of its models")
        panel.set_xticks([1, *range(4, int(part["position"].max()) + 1, 4)])
    return grid
