"""Figures of what was measured on a device: `data/reference/<machine>/rounds.json` and its traces, and the others'.

python -m harness.device rounds data/reference/h200 --out figures/device/h200_rounds.png
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from harness import device_models
from harness.device_records import read_record
from harness.drawing import COLOURS, WIDE, footer, panels, save
from harness.frames import LOOPING, SYSTEMS, titled
from harness.jobs import run_job
from specter.errors import SpecterError

OURS = "specter_deadline"
ORDER = (OURS, "specter", "lru", "on_demand", "resident")
# What each variant of the ablation did without, or did as published.
CHOICES = {
    (OURS, ""): "Specter, deadline + retain",
    ("specter", ""): "planner and eviction as published",
    ("specter_deadline_lru", "eviction as published"): "eviction as published (LRU)",
    ("specter_retain", "planner as published"): "planner as published (cold start, barrier)",
    ("specter_cold_start", "cold start as published"): "cold start as published",
    ("specter_barrier", "barrier as published"): "barrier before verification as published",
    ("specter_no_prefetch", "no prefetch, eviction as published"): "no prefetch, eviction as published",
    (OURS, "no fused kernel"): "no fused INT4 kernel",
    (OURS, "no graphs"): "no CUDA graphs",
    (OURS, "no overlap"): "no overlap of copies and compute",
}
SWITCHED = (
    "Greedy, K = 16, only the texts that every choice was measured on. Names but the first say what is switched: "
    "planner as published is cold start and barrier together, each alone only where it is named alone; planner and "
    "eviction as published is the whole published system; no prefetch comes with eviction as published, two things; "
    "all others are one thing."
)
BY_TEXT = ("tpot_ms", "floor_trace_ms", "distinct_4grams")
LANES = {"compute": 1.0, "link": 0.0}
PARTS = {
    "draft_step": ("draft step", "#56B4E9"),
    "mix": ("attention, router, shared experts", "#009E73"),
    "experts": ("routed experts", "#E69F00"),
    "combine": ("attention, router, shared experts", "#009E73"),
    "head": ("head", "#CC79A7"),
    "prefetch": ("prefetch", "#0072B2"),
    "fetch": ("fetch: somebody waits", "#D55E00"),
}


def read_cells(directory: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """Provenance, and one row per cell: means over prompts, least and greatest TPOT and share of distinct 4-grams.

    Raises:
        SpecterError: there is no complete rounds.json.
    """
    content = read_record(directory / "rounds.json")
    rows = []
    for cell in content["facts"]["cells"]:
        means = {key: value["mean"] for key, value in cell.items() if isinstance(value, dict)}
        plain = {key: value for key, value in cell.items() if not isinstance(value, dict)}
        distinct = cell.get("distinct_4grams", {})  # of a resident pass, whose routing stays on the device, unknown
        rows.append(
            plain
            | means
            | {"least": cell["tpot_ms"]["min"], "greatest": cell["tpot_ms"]["max"]}
            | {"least_distinct": distinct.get("min"), "most_distinct": distinct.get("max")}
            | {f"{key}_values": cell.get(key, {}).get("values") for key in BY_TEXT}
        )
    return content["provenance"], pd.DataFrame(rows)


def provenance(where: dict[str, Any], cells: pd.DataFrame) -> str:
    least, most = int(cells["num_prompts"].min()), int(cells["num_prompts"].max())
    texts = f"{least} text{'s' * (least > 1)}" if least == most else f"{least}–{most} texts"
    return (
        f"device clock: {where['gpu']}, driver {where.get('driver_version', 'unknown')}, torch {where['torch']}, one "
        f"run; {where['model']}; 16-token prompts, 128 new tokens, {texts}.\n"
        f"Equal slots (same_experts): the draft's INT4 experts come on top of them, and LRU gets no slots for them. "
        f"{_variety(cells)}"
    )


def _variety(cells: pd.DataFrame) -> str:
    """How much the texts repeat themselves, which flatters hit rates and acceptance."""
    parts = []
    for sampling, mine in cells.groupby("sampling"):
        least, most = mine["least_distinct"].min(), mine["most_distinct"].max()
        parts.append(f"{sampling} {least:.0%}" + ("" if least == most else f" to {most:.0%}"))
    return f"Distinct 4-grams: {', '.join(parts)} (below {LOOPING:.0%} a text loops)."


def _main(cells: pd.DataFrame, tier: str, sampling: str) -> pd.DataFrame:
    """The main cells of a panel; systems that ignore budget or sampling were measured once."""
    plain = cells[(cells["variant"] == "") & cells["k"].isin((0, 16))]
    fixed = (plain["system"] == "on_demand") | ((plain["system"] == "resident") & (plain["sampling"] == sampling))
    mine = (plain["tier"] == tier) & (plain["sampling"] == sampling) & (plain["system"] != "resident")
    found = plain[mine | fixed].drop_duplicates("system").set_index("system")
    return found.loc[[name for name in ORDER if name in found.index]]


def rounds(directory: Path) -> Figure:
    where, cells = read_cells(directory)
    figure, axes = panels(1, 4, WIDE, 2.1, sharey=True)
    pairs = [(tier, sampling) for tier in ("high", "low") for sampling in ("greedy", "seeded")]
    for panel, (tier, sampling) in zip(axes[0], pairs, strict=True):
        part = _main(cells, tier, sampling)
        for index, (name, row) in enumerate(part.iterrows()):
            length = [[row["tpot_ms"] - row["least"]], [row["greatest"] - row["tpot_ms"]]]
            label = titled(SYSTEMS, str(name)).partition(" (")[0]
            panel.bar(
                index, row["tpot_ms"], color=COLOURS[str(name)], yerr=length, error_kw={"elinewidth": 0.7}, label=label
            )  # fmt: skip
            above = (index, row["greatest"])
            panel.annotate(
                f"{row['tpot_ms']:.1f}", above, (0, 2), textcoords="offset points", ha="center", fontsize=5.8
            )  # fmt: skip
            if name not in ("on_demand", "resident"):  # they keep nothing, and everything
                panel.plot([index - 0.4, index + 0.4], [row["floor_trace_ms"]] * 2, color="#222222", linewidth=1.2)
        panel.set_xticks([])
        panel.set_title(f"{tier} budget, {sampling}", fontsize=7.5)
    axes[0][0].set_ylabel("TPOT (ms per token)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    floors = (
        "K = 16. Whiskers: least to greatest text. Black line: floor_trace of the same texts at the link's measured "
        "rate. On demand, which loads as much for any text, was measured once and stands in every panel."
    )
    shown = cells[(cells["variant"] == "") & cells["k"].isin((0, 16))]
    footer(figure, f"{provenance(where, shown)}\n{floors}")
    return figure


def choice_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """The greedy cells of `CHOICES` at K = 16, cut to the texts that all of them share: the first ones."""
    at = cells[(cells["sampling"] == "greedy") & (cells["k"] == 16)]
    at = at.assign(choice=[CHOICES.get(pair, "") for pair in zip(at["system"], at["variant"], strict=True)])
    at = at[at["choice"] != ""]
    shared = int(at["num_prompts"].min())
    tpot_ms, floor_ms, distinct = ([values[:shared] for values in at[f"{key}_values"]] for key in BY_TEXT)
    return at.assign(
        num_prompts=shared,
        tpot_ms=[sum(values) / shared for values in tpot_ms],
        floor_trace_ms=[sum(values) / shared for values in floor_ms],
        least_distinct=[min(values) for values in distinct],
        most_distinct=[max(values) for values in distinct],
    )


def over_floors(cells: pd.DataFrame) -> pd.DataFrame:
    """TPOT over floor_trace of `choice_cells`: one row per choice, one column per tier.

    Means are divided, not ratios averaged: a text that repeats itself has next to no floor.
    """
    ratios = cells.assign(ratio=cells["tpot_ms"] / cells["floor_trace_ms"]).pivot(
        index="choice", columns="tier", values="ratio"
    )
    return ratios.loc[[title for title in CHOICES.values() if title in ratios.index], ["high", "low"]]


def ablation(directory: Path) -> Figure:
    where, cells = read_cells(directory)
    cells = choice_cells(cells)
    ratios = over_floors(cells)
    figure, axes = panels(1, 1, WIDE, 2.2)
    panel = axes[0][0]
    colours = {"high": "#0072B2", "low": "#56B4E9"}
    for offset, tier in ((-0.2, "high"), (0.2, "low")):
        heights = [index + offset for index in range(len(ratios))]
        panel.barh(heights, ratios[tier], 0.36, color=colours[tier], label=f"{tier} budget")
        for height, value in zip(heights, ratios[tier], strict=True):
            panel.annotate(
                f"{value:.2f}×", (value, height), (2, 0), textcoords="offset points", va="center", fontsize=6
            )
    panel.margins(x=0.08)
    panel.axvline(1, color="#222222", linewidth=0.8)
    panel.set_yticks(range(len(ratios)), ratios.index, fontsize=6.5)
    panel.invert_yaxis()
    panel.set_xlabel("mean TPOT over mean floor_trace of the same texts")
    panel.legend(loc="lower right")
    footer(figure, f"{provenance(where, cells)}\n{SWITCHED}")
    return figure


def trace(directory: Path) -> Figure:
    """One round of the published planner and one of deadline order, lane by lane."""
    where, cells = read_cells(directory)
    figure, axes = panels(2, 1, WIDE, 3.0, sharex=True)
    longest = 0.0
    for (panel,), system in zip(axes, ("specter", OURS), strict=True):
        spans = _second_round(directory / f"rounds_{system}.trace.json.gz")
        for begin, length, lane, part in spans:
            label, colour = PARTS[part]
            panel.broken_barh([(begin, length)], (LANES[lane], 0.8), facecolors=colour, label=label, linewidth=0)
            longest = max(longest, begin + length)
        panel.set_yticks([0.4, 1.4], ["link", "compute"])
        panel.set_title(titled(SYSTEMS, system))
    axes[1][0].set_xlabel("time since the round began (ms)")
    axes[1][0].set_xlim(0, longest)
    handles: dict[str, Any] = {}
    for panel in (axes[0][0], axes[1][0]):
        handles |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3)
    footer(
        figure,
        f"{provenance(where, cells)}\nHigh budget, greedy, K = 16: one round each, from the events of its streams.",
    )
    return figure


def _second_round(path: Path) -> list[tuple[float, float, str, str]]:
    """(begin ms, length ms, lane, part) of everything from the second round's first draft step to its head.

    Raises:
        SpecterError: there is no such trace.
    """
    try:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    except (OSError, ValueError) as error:
        raise SpecterError(f"{path} is not a trace: {error}", "make it on a GPU: python -m bench rounds") from None
    spans = sorted((e["ts"], e["dur"], e["cat"], e["name"]) for e in events if e["ph"] == "X" and e["cat"] in LANES)
    heads = [ts for ts, _, _, name in spans if name == "head"]  # prefill's, then one a round
    begin = next(ts for ts, _, _, name in spans if name == "draft_step" and ts > heads[1])
    inside = [span for span in spans if begin <= span[0] <= heads[2]]
    return [((ts - begin) / 1e3, dur / 1e3, lane, name.split()[0]) for ts, dur, lane, name in inside]


FIGURES: dict[str, Callable[[Path], Figure]] = {
    draw.__name__: draw for draw in (rounds, ablation, trace, *device_models.DRAW)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, nargs="+", required=True)
    arguments = parser.parse_args()
    save(FIGURES[arguments.figure](arguments.directory), arguments.out)
    print(f"wrote {', '.join(map(str, arguments.out))}")


if __name__ == "__main__":
    run_job(main)
