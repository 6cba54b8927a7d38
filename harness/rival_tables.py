"""Tables about the rivals: memory policies, device bytes by part, depths, and where a speed-up comes from."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from baselines.specmoeoff import choose_k
from harness import published
from harness.frames import (
    DATASETS,
    HARDWARE,
    PART_TITLES,
    POLICIES,
    SYSTEMS,
    Frames,
    Table,
    caveats,
    checkpoint_line,
    in_order,
    provenance,
    spread_budgets,
    stated,
    tiers,
    titled,
)
from harness.plan import compose
from specter.build import build_costs
from specter.memory import PARTS

MISFIT = "does not fit"


def _ordered(frame: pd.DataFrame) -> list[tuple[str, str, str]]:
    """(budget, policy, system) of a table of rivals, largest budget first."""
    return [
        (budget, policy, system)
        for budget in tiers(frame)[1]
        for policy in in_order(frame["policy"].unique().tolist(), POLICIES)
        for system in in_order(frame["system"].unique().tolist(), SYSTEMS)
    ]


def _macro(frame: pd.DataFrame, column: str) -> float:
    return float(frame.groupby("dataset")[column].mean().mean())


def rivals(frames: Frames) -> Table:
    frame = frames["rivals"]
    rows: list[dict[str, object]] = []
    for budget, policy, system in _ordered(frame):
        cell = frame[(frame["budget"] == budget) & (frame["policy"] == policy)]
        mine = cell[cell["system"] == system]
        named: dict[str, object] = {
            "budget": budget,
            "policy": titled(POLICIES, policy),
            "system": titled(SYSTEMS, system),
        }
        named["K"] = str(mine["k"].iloc[0]) if mine["speculative"].iloc[0] else "–"
        if not mine["fits_budget"].all():
            rows.append(named | {"experts per layer": MISFIT})
            continue
        tpot = _macro(mine, "tpot_ms")
        ratios = {
            f"× {titled(SYSTEMS, hero)}": tpot / _macro(cell[cell["system"] == hero], "tpot_ms")
            for hero in in_order(cell["system"].unique().tolist(), SYSTEMS)
            if hero.startswith("specter")
        }
        needed = mine["num_hits"] + mine["num_late_hits"] + mine["num_misses"]
        rows.append(
            named
            | {
                "experts per layer": f"{mine['experts_per_layer'].iloc[0]:.1f}",
                "TPOT (ms)": tpot,
                "after 1st round (ms)": _macro(mine, "tpot_after_first_round_ms"),
                "TTFT (ms)": _macro(mine, "ttft_ms"),
                "end to end (ms)": _macro(mine, "end_to_end_ms"),
                "misses (%)": float((mine["num_misses"] / needed).mean() * 100),
                "GB per token": _macro(mine, "bytes_per_token") / 1e9,
                "acceptance (%)": _macro(mine, "acceptance") * 100,
            }
            | ratios
        )
    notes = [
        "Macro average over data sets; ×: the row's TPOT over that of our system in the same cell. Under “as "
        "published” a "
        "system has the experts per layer of the paper's table, or as many as Specter where it has none.",
        f"{provenance(frame)}.",
        *caveats(frame),
    ]
    return Table("Rivals by memory policy", pd.DataFrame(rows), 5, notes, stated(frame))


def memory(frames: Frames) -> Table:
    frame = frames["rivals"]
    rows = []
    for budget, policy, system in _ordered(frame):
        one = frame[(frame["budget"] == budget) & (frame["policy"] == policy) & (frame["system"] == system)].iloc[0]
        parts = {f"{part.replace('_', ' ')} (GB)": one[f"device_{part}_bytes"] / 1e9 for part in PARTS}
        fits = "yes" if one["fits_device"] else "no"
        rows.append(
            {
                "budget": budget,
                "policy": titled(POLICIES, policy),
                "system": titled(SYSTEMS, system),
                "experts per layer": f"{one['experts_per_layer']:.1f}" if one["fits_budget"] else MISFIT,
                "fits the device": fits,
                **parts,
                "all (GB)": one["device_total_bytes"] / 1e9,
            }
        )
    notes = [
        "Device bytes of the full-size model. shared: non-expert weights; draft: INT4 experts; draft shared, "
        "draft kv: an own "
        "draft's second copy of the non-expert weights and of the KV cache; buffer: spare buffers; slot: 16-bit "
        "experts. "
        f"“{MISFIT}”: the policy leaves this system fewer than two slots; its bytes are those without any.",
        f"{provenance(frame)}.",
        *caveats(frame),
    ]
    return Table("Device memory by part", pd.DataFrame(rows), 5, notes, stated(frame))


def best_depth(frames: Frames) -> Table:
    """Every speculative system at its best K, and SpecMoEOff's own choice of it."""
    frame, probe = frames["k_sweep"], frames["probe"]
    mine = frame[frame["speculative"] & frame["fits_budget"]]
    means = mine.groupby(["budget", "sampling", "system", "k", "dataset"])["tpot_ms"].mean()
    means = means.groupby(["budget", "sampling", "system", "k"]).mean()
    rows = []
    for budget in tiers(frame)[1]:
        for sampling in sorted(frame["sampling"].unique()):
            for system in in_order(mine["system"].unique().tolist(), SYSTEMS):
                by_k = means.loc[budget, sampling, system]
                row = {
                    "budget": budget,
                    "sampling": sampling,
                    "system": titled(SYSTEMS, system),
                    "K tried": ", ".join(str(k) for k in by_k.index),
                    "best K": str(by_k.idxmin()),
                    "TPOT (ms)": by_k.min(),
                    "TPOT at the paper's K (ms)": by_k.get(published.DEPTH[frame["charged_as"].iloc[0]], float("nan")),
                }
                if system == "specmoeoff_tuned":
                    cell = mine.query("budget == @budget and sampling == @sampling and system == @system")
                    chosen = _cost_model_k(cell, probe[probe["mode"] == sampling], by_k.index.tolist())
                    row |= {"K of its cost model": float(chosen), "TPOT there (ms)": by_k[chosen]}
                rows.append(row)
    notes = [
        "Macro average over data sets. The cost model is SpecMoEOff's (H2D, GPU MoE, attention, draft), given "
        "the acceptance "
        "of its own recordings and the mean expert union of this text.",
        f"{provenance(frame)}.",
        *caveats(frame),
    ]
    return Table("Best depth of every system", pd.DataFrame(rows), 5, notes, stated(frame))


def _cost_model_k(runs: pd.DataFrame, probe: pd.DataFrame, ks: list[int]) -> int:
    one = runs.iloc[0]
    config = compose([f"model={one['model']}", "system=specmoeoff_tuned", f"hardware={one['hardware']}"])
    by_length = probe[probe["quantity"] == "union"].groupby("k")["value"].mean()
    union = {int(str(length)): float(value) for length, value in by_length.items()}
    known = [k for k in ks if k + 1 in union]
    return choose_k(
        known, union, runs["acceptance"].mean(), int(one["num_slots"]), build_costs(config), config.hardware
    )


def prompt_length(frames: Frames) -> Table:
    frame = spread_budgets(frames["prompt_length"])
    columns = {
        "num_prompt_tokens": "prompt tokens, mean",
        "ttft_ms": "TTFT (ms)",
        "tpot_ms": "TPOT (ms)",
        "tpot_after_first_round_ms": "after 1st round (ms)",
        "end_to_end_ms": "end to end (ms)",
    }
    rows = []
    for budget in tiers(frame)[1]:
        for length in sorted(frame["prompt_tokens"].unique(), key=lambda tokens: tokens or float("inf")):
            for system in in_order(frame["system"].unique().tolist(), SYSTEMS):
                mine = frame[(frame["budget"] == budget) & (frame["prompt_tokens"] == length)]
                mine = mine[mine["system"] == system]
                shown = f"first {length}" if length else "whole"
                named = {"budget": budget, "prompt": shown, "system": titled(SYSTEMS, system)}
                rows.append(named | {title: _macro(mine, column) for column, title in columns.items()})
    notes = ["Macro average over data sets.", f"{provenance(frame)}.", *caveats(frame)]
    return Table("Prompt length", pd.DataFrame(rows), 3, notes, stated(frame))


def _explained(parts: pd.DataFrame, keys: dict[str, dict[str, str]]) -> list[dict[str, object]]:
    """Rows of mean parts and times by `keys` (column: titles), a rival that does not fit without numbers."""
    rows: list[dict[str, object]] = []
    for values, group in parts.groupby(list(keys), sort=False):
        named: dict[str, object] = {
            key: titled(titles, str(value)) for (key, titles), value in zip(keys.items(), values, strict=True)
        }
        if group["part"].isna().all():
            rows.append(named | {"K": MISFIT})
            continue
        depths = f"{group['rival_k'].iloc[0] or '–'} : {group['hero_k'].iloc[0]}"
        rival, hero = (group.groupby("dataset")[name].mean().mean() for name in ("rival_ms", "hero_ms"))
        mean = group.groupby("part")["ms"].mean()
        rows.append(
            named
            | {"K": depths, "rival (ms)": rival, "ours (ms)": hero, "ratio": rival / hero}
            | {title: mean[part] for part, title in PART_TITLES.items()}
        )
    return rows


_WHAT = (
    "Parts in ms per token, negative where they cost; they add up to the difference. From the rival to ours: its "
    "policy at "
    "our K (tokens); our draft, in time and memory; our planner and eviction, as link time (misses) and as what "
    "covers it "
    "(hidden); launches, kernels and syncs of both, charged and not charged (launches). The order of switching "
    "matters: "
    "what one step leaves, the next cannot gain."
)


def explained(runs: pd.DataFrame, parts: pd.DataFrame) -> pd.DataFrame:
    """The runs of the texts that the parts explain: not all data sets and inputs are decomposed."""
    return runs.merge(parts[["dataset", "input"]].drop_duplicates(), on=["dataset", "input"])


def decomposition(frames: Frames) -> Table:
    runs, parts = frames["rivals"], frames["decomposition"]
    policy = in_order(runs["policy"].unique().tolist(), POLICIES)[0]
    parts = parts[(parts["hardware"] == runs["hardware"].iloc[0]) & (parts["policy"] == policy)]
    keys: dict[str, dict[str, str]] = {"budget": {}, "hero": SYSTEMS, "rival": SYSTEMS}
    table = pd.DataFrame(_explained(parts.sort_values(["budget", "hero"], kind="stable"), keys))
    notes = [_WHAT, f"Memory: {titled(POLICIES, policy)}. {provenance(explained(runs, parts))}."]
    return Table("Where the speed-up comes from", table, 4, notes, stated(runs))


def published_ratio(frames: Frames) -> Table:
    """K = 3 against the paper's K for every policy, tier and link, beside the published ratio."""
    runs, parts = frames["rivals"], frames["decomposition"]
    parts = parts[parts["rival"] == "specmoeoff"].sort_values(["hero", "hardware", "budget"], kind="stable")
    keys: dict[str, dict[str, str]] = {"hero": SYSTEMS, "hardware": HARDWARE, "budget": {}, "policy": POLICIES}
    table = pd.DataFrame(_explained(parts, keys))
    after = table.columns.tolist().index("ratio") + 1
    table.insert(after, "published, mean", published.SPEEDUP_MEAN)
    table.insert(after + 1, "published, most", published.SPEEDUP_MAX)
    names = ", ".join(titled(DATASETS, name) for name in parts["dataset"].unique())
    notes = [
        "SpecMoEOff as published against ours: TPOT ratio. The published ratios are averages over its models and "
        "machines.",
        _WHAT,
        f"{checkpoint_line(runs)}, seeded, one input of each of: {names}; virtual clock.",
    ]
    title = "SpecMoEOff (K = 3) against Specter (the paper's K)"
    return Table(title, table, 5, notes, stated(runs) | {"hardware": "see rows"})


def transformers_offload(frames: Frames) -> Table:
    frame = frames["transformers_offload"]
    table = pd.DataFrame(
        {
            "system": frame["system"],
            "same tokens as ours": ["yes" if agrees else "no" for agrees in frame["agrees_with_ours"]],
            "first token (ms)": frame["ttft_ms"],
            "per token, median (ms)": frame["tpot_ms"],
        }
    )
    one = frame.iloc[0]
    notes = [
        "Clock: wall time of the machine that made this table, which has no part in any other table or figure and "
        f"changes from run to run. {checkpoint_line(frame)}, fp32 on a CPU with {one['threads']} thread, "
        f"{one['num_prompt_tokens']} prompt and {one['num_new_tokens']} new tokens. With the CPU as execution device, "
        "offload measures the library's hooks, copies and files, not a link."
    ]
    return Table(
        "The transformers library with offload, wall time",
        table,
        2,
        notes,
        {"clock": "host", "checkpoint": checkpoint_line(frame)},
    )


BUILD: dict[str, Callable[[Frames], Table]] = {
    "rivals": rivals,
    "memory": memory,
    "best_depth": best_depth,
    "prompt_length": prompt_length,
    "decomposition": decomposition,
    "published_ratio": published_ratio,
    "transformers_offload": transformers_offload,
}
