"""Figures about the rivals: memory policies, prompt lengths, and where a speed-up comes from."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from harness.drawing import COLOURS, PARTS, WIDE, Bars, footer, grouped_bars, panels
from harness.frames import (
    PART_TITLES,
    POLICIES,
    SYSTEMS,
    Frames,
    budget_title,
    caveats,
    in_order,
    provenance,
    spread_budgets,
    tiers,
    titled,
)
from harness.rival_tables import explained


def rivals(frames: Frames) -> Figure:
    frame = frames["rivals"]
    budgets = tiers(frame)[1]
    figure, axes = panels(len(budgets), 1, WIDE, 2.1 * len(budgets) + 0.4)
    order = in_order(frame["system"].unique().tolist(), SYSTEMS)
    for (panel,), budget in zip(axes, budgets, strict=True):
        part = frame[frame["budget"] == budget]
        means = part.groupby(["policy", "system", "dataset"])["tpot_ms"].mean().groupby(["policy", "system"]).mean()
        table = means.unstack().reindex(columns=order).loc[in_order(part["policy"].unique().tolist(), POLICIES)]
        bars = Bars(table).renamed([titled(POLICIES, name) for name in table.index])
        centres = grouped_bars(panel, bars, COLOURS, SYSTEMS, label_all=True)
        for system in order:
            for x, value in zip(centres[system], table[system], strict=True):
                if value != value:
                    panel.text(x, 1, "does not fit", rotation=90, fontsize=5.5, ha="center", va="bottom")
        panel.set_title(budget_title(frame, budget))
        panel.set_ylabel("TPOT (ms per token)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    footer(figure, "\n".join([f"{provenance(frame)}. Macro average over data sets.", *caveats(frame)]))
    return figure


def prompt_length(frames: Frames) -> Figure:
    frame = spread_budgets(frames["prompt_length"])
    budgets = tiers(frame)[1]
    quantities = {"ttft_ms": "TTFT (ms)", "tpot_ms": "TPOT (ms per token)", "end_to_end_ms": "end to end (ms)"}
    figure, axes = panels(len(budgets), len(quantities), WIDE, 1.8 * len(budgets) + 0.3)
    for row, budget in zip(axes, budgets, strict=True):
        for panel, (column, title) in zip(row, quantities.items(), strict=True):
            part = frame[frame["budget"] == budget]
            for system in in_order(part["system"].unique().tolist(), SYSTEMS):
                mine = part[part["system"] == system].groupby("prompt_tokens")[["num_prompt_tokens", column]].mean()
                mine = mine.sort_values("num_prompt_tokens")
                panel.plot(mine["num_prompt_tokens"], mine[column], "o-", ms=3, color=COLOURS[system],
                           label=SYSTEMS[system])  # fmt: skip
            panel.set_ylim(bottom=0)
            panel.set_title(f"{title}, {budget}")
    for panel in axes[-1]:
        panel.set_xlabel("prompt tokens (mean)")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    footer(figure, "\n".join([f"{provenance(frame)}. Mean over data sets.", *caveats(frame)]))
    return figure


def decomposition(frames: Frames) -> Figure:
    parts, runs = frames["decomposition"], frames["rivals"]
    parts = parts[(parts["hardware"] == runs["hardware"].iloc[0]) & parts["part"].notna()]
    parts = parts[parts["policy"] == in_order(runs["policy"].unique().tolist(), POLICIES)[0]]
    budgets, heroes = tiers(runs)[1], in_order(parts["hero"].unique().tolist(), SYSTEMS)
    figure, axes = panels(len(budgets), len(heroes), WIDE, 2.3 * len(budgets) + 0.4, sharey=True)
    for row, budget in zip(axes, budgets, strict=True):
        for panel, hero in zip(row, heroes, strict=True):
            mine = parts[(parts["budget"] == budget) & (parts["hero"] == hero)]
            table = mine.pivot_table(index="rival", columns="part", values="ms")
            table = table.loc[in_order(table.index.tolist(), SYSTEMS)]
            x = np.arange(len(table))
            above, below = np.zeros(len(table)), np.zeros(len(table))
            for part, title in PART_TITLES.items():
                values = table[part].to_numpy()
                panel.bar(x, values, 0.7, bottom=np.where(values > 0, above, below), color=PARTS[part], label=title)
                above, below = above + values.clip(min=0), below + values.clip(max=0)
            panel.plot(x, table.sum(axis=1), "D", color="black", ms=4, label="all together")
            panel.axhline(0, color="black", lw=0.8)
            panel.set_xticks(x, [titled(SYSTEMS, name).replace(", ", "\n").replace("-Off", "-\nOff")
                                 for name in table.index], fontsize=5.8)  # fmt: skip
            panel.set_title(f"{titled(SYSTEMS, hero)}, {budget}")
        row[0].set_ylabel("saved (ms per token)")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    what = "What each rival's TPOT loses on the way to ours, one thing switched at a time; below zero: what that costs"
    footer(
        figure,
        "\n".join([f"{what}. Equal bytes. {provenance(explained(runs, frames['decomposition']))}.", *caveats(runs)]),
    )
    return figure


DRAW = (rivals, prompt_length, decomposition)
