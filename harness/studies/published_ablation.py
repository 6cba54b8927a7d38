"""The paper's ablation on the published system: what its prefetch and the fusion of its kernel are worth here."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import Grid, grouped_bars, mark
from harness.plotting.frames import Frames, macro, rows_of, summary, table_rows, with_panels
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import colour
from harness.studies import disagreements, published
from harness.studies.registry import figure, table

# By system and execution, in the paper's order; the keys of `published.ABLATION`.
VARIANTS = {
    ("specter", "default"): "full",
    ("specter_no_prefetch", "default"): "no prefetch",
    ("specter", "by_expert"): "no fused kernel",
    ("specter_no_prefetch", "by_expert"): "neither",
}
COLOURS = {
    "full": colour("specter"),
    "no prefetch": colour("specter_no_prefetch"),
    "no fused kernel": "#8c9bb0",
    "neither": "#c3cbd6",
}
WHAT = (
    "Macro average over data sets. No fused kernel: the same INT4 kernels, launched once per chosen expert. The "
    "paper's numbers (first version, real checkpoint, A100) do not name their tier"
)


def _variants(frames: Frames) -> pd.DataFrame:
    frame = frames["published_ablation"]
    pairs = zip(frame["system"], frame["execution"], strict=True)
    return frame.assign(variant=[VARIANTS[pair] for pair in pairs])


def ablation_data(frames: Frames) -> pd.DataFrame:
    """[sampling, budget, panel, variant, tok_per_s, value (tokens per second over the full system's), paper]."""
    frame = _variants(frames)
    order = list(VARIANTS.values())
    times = summary(frame, ["budget", "sampling", "variant"], lambda mine: {"tok_per_s": 1e3 / macro(mine, "tpot_ms")})
    times = times.sort_values("variant", key=lambda names: names.map(order.index), kind="stable", ignore_index=True)
    full = rows_of(times, variant="full").set_index(["budget", "sampling"])["tok_per_s"]
    cells = zip(times["budget"], times["sampling"], strict=True)
    given = published.ABLATION.get(frame["charged_as"].iloc[0], {})
    paper = [given.get(name, float("nan")) / given.get("full", float("nan")) for name in times["variant"]]
    return with_panels(times.assign(value=times["tok_per_s"] / [full[cell] for cell in cells], paper=paper), frame)


def prefetch_reason(frames: Frames) -> str:
    """Why the published prefetch costs time here, from the rounds measured: greedy text, the high tier."""
    frame = rows_of(_variants(frames), sampling="greedy", budget="high")
    ours, without = (rows_of(frame, variant=name) for name in ("full", "no prefetch"))

    def per_round(rows: pd.DataFrame, column: str) -> float:
        return float((rows[column] / rows["num_rounds"]).mean())

    more, fewer = (per_round(rows, "link_bytes") / 1e9 for rows in (ours, without))
    draft_ms = per_round(ours, "draft_ms")
    hidden = draft_ms / 1e3 * ours["link_bytes_per_s"].mean() / 1e9
    return (
        f"A round copies {per_round(ours, 'num_prefetched'):.0f} experts ahead, of which "
        f"{ours['frac_prefetched_used'].mean():.0%} are used, yet has {per_round(ours, 'num_misses'):.0f} misses "
        f"instead of {per_round(without, 'num_misses'):.0f}, because the slots are those of experts that the same "
        f"verification needs: it moves {more:.1f} GB instead of {fewer:.1f}, and its {draft_ms:.0f} ms of drafting "
        f"hide at most {hidden:.1f} GB (greedy, high tier)."
    )


@figure(
    "published_ablation", "published_ablation", one_model=True, minutes=3, data=ablation_data, draws_published=True,
    key="No fused kernel: the same INT4 kernels, launched once per chosen expert. Black: the paper's first version.",
    finding=prefetch_reason,
    footer=lambda frames: [
        *notes.run_notes(frames["published_ablation"], f"{WHAT}; black lines: its numbers."),
        f"{disagreements.PREFETCH} {prefetch_reason(frames)}",
        disagreements.KERNEL,
    ],
    about="the published system without prefetch, without the fused kernel, with neither, beside the paper's",
)  # fmt: skip
def draw_ablation(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="sampling", columns="budget", height=1.7, sharey=True, legend=True,
                y="tokens per second,\n× full system")  # fmt: skip
    for panel, part in grid:
        centres = grouped_bars(
            panel, part.assign(group=""), groups="group", series="variant", value="value", value_format="{:.2f}",
            styles={name: (name, shade) for name, shade in COLOURS.items()},
        )  # fmt: skip
        for row in part.dropna(subset="paper").to_dict("records"):
            mark(panel, centres["", row["variant"]], row["paper"], half=0.1, label="paper")
    return grid


@table("published_ablation", "published_ablation", model_by_model=True)
def ablation_table(frames: Frames) -> Table:
    frame = _variants(frames)
    data = ablation_data(frames)
    given = published.ABLATION.get(frame["charged_as"].iloc[0], {})

    def numbers(mine: pd.DataFrame) -> dict[str, Any]:
        one = mine.iloc[0]
        row = rows_of(data, budget=one["budget"], sampling=one["sampling"], variant=one["variant"]).iloc[0]
        needed = mine["num_hits"] + mine["num_late_hits"] + mine["num_misses"]
        return {
            "tokens/s": row["tok_per_s"],
            "× full": row["value"],
            "paper, tokens/s": given.get(one["variant"], float("nan")),
            "paper, × full": row["paper"],
            "draft step (ms)": float((mine["draft_ms"] / mine["num_drafted"]).mean()),
            "hits and late hits (%)": float((1 - mine["num_misses"] / needed).mean() * 100),
            "copied ahead, used (%)": float(mine["frac_prefetched_used"].mean() * 100),
            "GB per round": float((mine["link_bytes"] / mine["num_rounds"]).mean() / 1e9),
            "stall per round (ms)": float((mine["stall_ms"] / mine["num_rounds"]).mean()),
        }

    parts = [rows_of(frame, variant=name) for name in VARIANTS.values()]
    rows = pd.concat([table_rows(part, ["variant", "budget", "sampling"], numbers) for part in parts])
    rows = rows[["budget", "sampling", *rows.columns.drop(["budget", "sampling"])]]
    rows = rows.sort_values(["budget", "sampling"], kind="stable", ignore_index=True)
    words = f"{WHAT}. {disagreements.PREFETCH} {prefetch_reason(frames)} {disagreements.KERNEL}"
    return run_table("The published ablation", rows, 3, words, frame)
