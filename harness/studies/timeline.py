"""Where the time goes: TPOT in parts, hits and misses over rounds, and one round of three systems, lane by lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import PAPER, Grid, mark, note
from harness.plotting.frames import Frames, blocks, names, rows_of, split, table_rows
from harness.plotting.tables import Table
from harness.plotting.titles import in_order, short_title, title
from harness.studies.device_trace import PARTS as OPERATIONS
from harness.studies.registry import figure, table

# Parts of a token's time, and the operations of the compute lane in them; the others are stall and idle.
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "draft": ("#56B4E9", ("draft_step",)),
    "verify": ("#E69F00", ("attend_and_route", "experts", "combine", "head")),
    "decode of residual experts": ("#009E73", ("decode",)),
    "stall: waits for a copy": ("#D55E00", ()),
    "idle: launches and syncs": ("#bbbbbb", ()),
}
DRAFT, VERIFY, DECODE, STALL, IDLE = PARTS
LINK = "link busy, beside the rest"
WHAT = (
    "Per token: time of the compute lane by operation; stall: what it waited for copies alone; idle: the remainder of "
    "a round, in which the host launches, plans or waits. The link's time runs beside all of these"
)
OUTCOMES = {
    "hit": ("num_hits", "#009E73"), "late hit": ("num_late_hits", "#E69F00"), "miss": ("num_misses", "#D55E00"),
}  # fmt: skip
FOLLOWED = ("specmoeoff", "specter", "specter_deadline", "specter_plus")
SHOWN = ("specmoeoff", "specter", "specter_plus")  # of the Gantt chart
LANES = {"compute": 1.0, "link": 0.0}


def _per_token(mine: pd.DataFrame) -> pd.DataFrame:
    """[part, value]: ms per token of one system on one text, by `PARTS`, and `LINK`."""
    rounds = mine.drop_duplicates("round")
    tokens, tpot = rounds["new_len"].sum(), rounds["round_ms"].sum() / rounds["new_len"].sum()
    on = {lane: rows_of(mine, lane=lane) for lane in LANES}
    busy = {
        part: on["compute"].loc[on["compute"]["part"].isin(operations), "length_ms"].sum() / tokens
        for part, (_, operations) in PARTS.items()
    }
    busy[STALL] = on["compute"]["stall_ms"].sum() / tokens
    busy[IDLE] = tpot - sum(busy.values())
    busy[LINK] = on["link"]["length_ms"].sum() / tokens
    return pd.DataFrame({"part": list(busy), "value": list(busy.values())})


def breakdown_data(frames: Frames) -> pd.DataFrame:
    """[model, panel, system, part, value]: ms per token, means over data sets; the parts but `LINK` add up to TPOT."""
    data = blocks(frames["lanes"], ["charged_as", "system", "dataset"], _per_token)
    means = data.groupby(["model", "system", "part"], sort=False)["value"].mean().reset_index()
    return means.assign(panel=[title("model", model) for model in means["model"]])


@figure(
    "breakdown", "lanes", minutes=8, data=breakdown_data,
    key="Mean over data sets, at equal device bytes, high budget.",
    footer=lambda frames: [f"{WHAT}. {notes.brief(frames['lanes'])}"],
    about="TPOT in parts: draft, verify, decode, stall and idle, with the link's time beside them",
)  # fmt: skip
def draw_breakdown(data: pd.DataFrame) -> Grid:
    grid = Grid(data, columns="model", height=2.5, y="TPOT (ms per token)", legend=True)
    for panel, part in grid:
        values = part.pivot(index="system", columns="part", values="value").loc[in_order("system", part["system"])]
        bottom = pd.Series(0.0, index=values.index)
        for name, (colour, _) in PARTS.items():
            panel.bar(range(len(values)), values[name], 0.8, bottom=bottom, color=colour, label=name)
            bottom += values[name]
        for at, (height, link) in enumerate(zip(bottom.tolist(), values[LINK].tolist(), strict=True)):
            note(panel, f"{height:.3g}", (at, max(height, link)))
            mark(panel, at, link, half=0.4, label=LINK)
        named = [title("system", system).replace(", ", ",\n") for system in values.index]
        panel.set_xticks(range(len(values)), named, rotation=90, fontsize=6.2)
        panel.margins(y=0.1)  # room for the values
    return grid


@table("breakdown", "lanes")
def breakdown_table(frames: Frames) -> Table:
    frame = frames["lanes"]
    parts = breakdown_data(frames)

    def numbers(mine: pd.DataFrame) -> dict[str, Any]:
        one = mine.iloc[0]
        of = rows_of(parts, model=one["charged_as"], system=one["system"]).set_index("part")["value"]
        tpot = of.drop(LINK).sum()
        return {"TPOT (ms)": tpot, **{f"{part} (ms)": of[part] for part in [*PARTS, LINK]}}

    rows = table_rows(frame, ["charged_as", "system"], numbers)
    stated = {"clock": frame["clock"].iloc[0], "hardware": " / ".join(names(frame, "hardware"))}
    return Table("TPOT in parts", rows, 2, [f"{WHAT}.", notes.brief(frame)], stated)


def rounds_data(frames: Frames) -> pd.DataFrame:
    """[system, model, outcome, begin_ms, length_ms, value]: per cent of the experts that a round needed, by outcome.

    Of the first data set; times are from the first round on.
    """
    frame = frames["rounds/timeline"]
    frame = frame[frame["system"].isin(FOLLOWED) & (frame["dataset"] == names(frame, "dataset")[0])]

    def shares(mine: pd.DataFrame) -> pd.DataFrame:
        needed = mine[[column for column, _ in OUTCOMES.values()]].sum(axis=1)
        times = {"begin_ms": mine["start_ms"] - mine["start_ms"].min(), "length_ms": mine["end_ms"] - mine["start_ms"]}
        parts = [
            pd.DataFrame(times | {"value": mine[column] / needed * 100}).assign(outcome=outcome)
            for outcome, (column, _) in OUTCOMES.items()
        ]
        return pd.concat(parts)

    return blocks(frame, ["system", "charged_as"], shares)


@figure(
    "rounds", "rounds/timeline", minutes=8, data=rounds_data,
    key="One text of each model. A bar is a round, as wide as it lasts; equal device bytes, high budget.",
    shown=lambda frames: frames["rounds/timeline"].drop(columns=["dataset", "input"]),
    footer=lambda frames: [
        "Of the experts that a round's verification needed, the share that was on the device (hit), on its way (late "
        f"hit) or absent (miss), over time from the first round on. {notes.brief(frames['rounds/timeline'])}"
    ],
    about="hits, late hits and misses of every round over time, four systems and three models",
)  # fmt: skip
def draw_rounds(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="system", columns="model", height=1.25, sharex="col", sharey=True, legend=True,
                x="time since the first round began (ms)")  # fmt: skip
    for panel, part in grid:
        bottom = np.zeros(len(part) // len(OUTCOMES))
        for outcome, (_, colour) in OUTCOMES.items():
            mine = rows_of(part, outcome=outcome)
            panel.bar(mine["begin_ms"], mine["value"], mine["length_ms"], bottom=bottom, color=colour, label=outcome,
                      align="edge", edgecolor="white", linewidth=0.25)  # fmt: skip
            bottom = bottom + mine["value"].to_numpy()
        panel.set_ylim(0, 100)
        panel.margins(x=0.01)
    for row, system in zip(grid.axes, grid.row_values, strict=True):
        row[0].set_ylabel(f"{short_title(system).replace(', ', ',' + chr(10))}\n(%)", fontsize=7)
    for panel, model in zip(grid.axes[0], grid.column_values, strict=True):
        panel.set_title(title("model", model))
    return grid


def typical_round(mine: pd.DataFrame) -> int:
    """Of the rounds of one run that draft, the one whose time per token is nearest to the whole run's."""
    rounds = mine.drop_duplicates("round").set_index("round")
    tpot = rounds["round_ms"].sum() / rounds["new_len"].sum()
    drafting = rounds[rounds["draft_len"] > 0]
    distance = (drafting["round_ms"] / drafting["new_len"] - tpot).abs()
    return int(drafting.index[int(distance.argmin())])


def gantt_data(frames: Frames) -> pd.DataFrame:
    """[system, panel, lane, part, begin_ms, value (its end)]: the operations of a `typical_round` of the first data
    set."""
    frame = frames["lanes"]
    frame = frame[frame["system"].isin(SHOWN) & (frame["dataset"] == names(frame, "dataset")[0])]
    parts = []
    for named, rows in split(frame, "system"):
        mine = rows_of(rows, round=typical_round(rows))
        one = mine.iloc[0]
        tokens = notes.counted(int(one["new_len"]), "token")
        panel = (
            f"{title('system', named['system'])}: K = {one['draft_len']}, {tokens} in {one['round_ms']:.0f} ms, "
            f"{one['round_ms'] / one['new_len']:.1f} ms per token"
        )
        ends = mine["begin_ms"] + mine["length_ms"]
        parts.append(mine[["lane", "part", "begin_ms"]].assign(value=ends, panel=panel, **named))
    found = pd.concat(parts, ignore_index=True)
    order = [SHOWN.index(system) for system in found["system"]]
    return found.assign(order=order).sort_values("order", kind="stable").drop(columns="order")


@figure(
    "gantt", "lanes", one_model=True, minutes=8, data=gantt_data,
    key="Of each system the drafting round nearest to its TPOT; one text, equal device bytes, high budget.",
    shown=lambda frames: frames["lanes"].drop(columns=["dataset", "input"]),
    footer=lambda frames: [
        "Every operation of one round on the lanes of the virtual clock, one system above the other on one time axis. "
        "Of each system the round, of those that draft, whose time per token is nearest to the run's. "
        + notes.brief(frames["lanes"])
    ],
    about="one round of SpecMoEOff, Specter and Specter+, operation by operation on one time axis",
)  # fmt: skip
def draw_gantt(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="system", height=1.1, sharex=True, x="time since the round began (ms)", legend=True)
    styles = OPERATIONS | {"decode": ("decode of residual experts", "#0b3d3a")}
    for panel, rows in grid:
        for name, (label, colour) in styles.items():
            mine = rows_of(rows, part=name)
            for lane, bottom in LANES.items():
                spans = rows_of(mine, lane=lane)
                if len(spans):
                    bars = list(zip(spans["begin_ms"], spans["value"] - spans["begin_ms"], strict=True))
                    panel.broken_barh(bars, (bottom, 0.8), facecolors=colour, label=label, linewidth=0)
        panel.axvline(rows["value"].max(), color=PAPER, lw=0.8)
        panel.set_yticks([0.4, 1.4], ["link", "compute"])
        panel.set_ylim(-0.1, 1.9)
    grid.axes[-1][0].set_xlim(0, data["value"].max() * 1.01)
    return grid
