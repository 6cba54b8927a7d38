"""Tables from tidy tables: `python -m harness.tables main --out main.tex main.md main.csv --tidy main.parquet`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from harness import published
from harness.frames import (
    DATASETS,
    HARDWARE,
    SYSTEMS,
    caveats,
    half_width,
    in_order,
    probe_line,
    provenance,
    read,
    spread_budgets,
    tiers,
    titled,
    with_macro,
)
from harness.jobs import run_job, write_whole
from harness.rival_tables import (
    decomposition,
    depth,
    memory,
    prompt_length,
    published_ratio,
    rivals,
    transformers_offload,
)
from harness.table import FORMATS, Table, stated

Frames = dict[str, pd.DataFrame]


def _cells(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """(budget, sampling) pairs, largest budget first."""
    samplings, budgets = tiers(frame)
    return [(budget, sampling) for budget in budgets for sampling in samplings]


def main_table(frames: Frames) -> Table:
    frame = spread_budgets(frames["main"])
    systems = in_order(frame["system"].unique().tolist(), SYSTEMS)
    blocks = []
    for budget, sampling in _cells(frame):
        part = frame[(frame["budget"] == budget) & (frame["sampling"] == sampling)]
        block = part.groupby(["dataset", "system"])["tpot_ms"].mean().unstack()[systems]
        block.columns = [f"{titled(SYSTEMS, name).partition(' (')[0]} (ms)" for name in systems]
        for baseline in [name for name in ("lru", "mixtral_offloading", "on_demand") if name in systems]:
            times = part.groupby(["dataset", "system"])["tpot_ms"].mean().unstack()
            block[f"× {titled(SYSTEMS, baseline)}"] = times[baseline] / times["specter"]
        mine = part[part["system"] == "specter"].groupby("dataset").mean(numeric_only=True)
        block["acceptance (%)"] = mine["acceptance"] * 100
        block["accepted per round"] = mine["mean_accepted_len"]
        block["hits (%)"] = mine["hit_rate"] * 100
        block["× floor_trace"] = mine["over_floor_trace"]
        block["after 1st round (ms)"] = mine["tpot_after_first_round_ms"]
        block = with_macro(block)
        block.insert(0, "data set", [titled(DATASETS, name) for name in block.index])
        block.insert(0, "sampling", sampling)
        block.insert(0, "budget", budget)
        blocks.append(block)
    ks = ", ".join(str(k) for k in sorted(frame.loc[frame["speculative"], "k"].unique()))
    notes = [
        "TPOT = (last commit − first commit) / (tokens − 1), mean over inputs; × = the system's mean TPOT over "
        f"Specter's; the columns from there on are Specter's, K = {ks}. mean: macro average over data sets.",
        f"{provenance(frame)}.",
        *caveats(frame),
    ]
    return Table("Time per output token and speed-up", pd.concat(blocks, ignore_index=True), 3, notes, stated(frame))


def systems(frames: Frames) -> Table:
    frame = spread_budgets(frames["main"])
    rows = []
    for budget, sampling in _cells(frame):
        part = frame[(frame["budget"] == budget) & (frame["sampling"] == sampling)]
        for system in in_order(part["system"].unique().tolist(), SYSTEMS):
            mine = part[part["system"] == system]
            mean = mine.groupby("dataset").mean(numeric_only=True).mean()
            needed = mean["num_hits"] + mean["num_late_hits"] + mean["num_misses"]
            rows.append(
                {
                    "budget": budget,
                    "sampling": sampling,
                    "system": titled(SYSTEMS, system).partition(" (")[0],
                    "TPOT (ms)": mean["tpot_ms"],
                    "± 95 % (ms)": half_width(mine, "tpot_ms"),
                    "after 1st round (ms)": mean["tpot_after_first_round_ms"],
                    "TTFT (ms)": mean["ttft_ms"],
                    "end to end (ms)": mean["end_to_end_ms"],
                    "hits (%)": mean["num_hits"] / needed * 100,
                    "late hits (%)": mean["num_late_hits"] / needed * 100,
                    "misses (%)": mean["num_misses"] / needed * 100,
                    "GB per token": mean["bytes_per_token"] / 1e9,
                    "link busy (%)": mean["link_busy_frac"] * 100,
                    "stall (ms)": mean["stall_ms"],
                    "× floor_trace": mean["over_floor_trace"],
                    "× floor_ideal": mean["over_floor_ideal"],
                    "device (GB)": mean["device_total_bytes"] / 1e9,
                }
            )
    notes = [
        "Macro average over data sets; ±: half of its 95 % confidence interval over inputs within data sets. "
        "Hits, late hits, misses: experts present, on their way, or absent when needed. "
        "Stall: compute waiting for copies, per run. Device: all device bytes of the model charged, draft included.",
        f"{provenance(frame)}.",
        *caveats(frame),
    ]
    return Table("Systems, in detail", pd.DataFrame(rows), 3, notes, stated(frame))


def fidelity(frames: Frames) -> Table:
    probe = frames["probe"]
    rows = []
    for mode in ("greedy", "seeded", "teacher-forced"):
        mine = probe[probe["mode"] == mode]
        layers = mine[mine["quantity"] == "fidelity"].groupby("layer")["value"].mean() * 100
        grams = mine[mine["quantity"] == "distinct_4grams"]["value"].mean()
        accepted = mine[mine["quantity"] == "acceptance"]["value"].mean() * 100
        rows.append(
            {
                "text": mode,
                "expert match, mean (%)": layers.mean(),
                "worst layer (%)": layers.min(),
                "best layer (%)": layers.max(),
                "acceptance (%)": accepted,
                "distinct 4-grams": grams,
            }
        )
    paper = {
        "text": "paper, real checkpoint",
        "expert match, mean (%)": published.FIDELITY_DEEPSEEK_GPTQ * 100,
        "acceptance (%)": published.ACCEPTANCE_DEEPSEEK * 100,
    }
    what = (
        "Expert match: share of the target's top-k experts that the draft chooses too, same position and prefix. "
        "A stand-in's fidelity says nothing about the real checkpoint; the paper's row is there for orientation."
    )
    return Table(
        "Routing fidelity of the draft",
        pd.DataFrame([*rows, paper]),
        1,
        [f"{what} {probe_line(probe)}."],
        stated(probe),
    )


def union(frames: Frames) -> Table:
    probe = frames["probe"].query("quantity == 'union'")
    by_k = probe.groupby(["k", "mode"])["value"].mean().unstack()
    by_k = by_k[[mode for mode in ("greedy", "seeded", "teacher-forced") if mode in by_k]]
    by_k["paper, real checkpoint"] = pd.Series(published.UNION_DEEPSEEK)
    frame = by_k.loc[by_k.index.intersection([1, 2, 4, 8, 16, 32])].reset_index().rename(columns={"k": "K"})
    frame["K"] = frame["K"].astype(str)
    what = (
        "Distinct experts per MoE layer that the target needs for K consecutive tokens, mean over windows and layers."
    )
    return Table("Expert union", frame, 1, [f"{what} {probe_line(probe)}."], stated(probe))


def k_sweep(frames: Frames) -> Table:
    frame = frames["k_sweep"]
    mine = frame[frame["speculative"] & frame["fits_budget"]]
    means = mine.groupby(["system", "budget", "sampling", "k", "dataset"]).mean(numeric_only=True)
    means = means.groupby(["system", "budget", "sampling", "k"]).mean().reset_index()
    rivals = frame[frame["system"] == "lru"].groupby(["budget", "sampling"])["tpot_ms"].mean()
    table = pd.DataFrame(
        {
            "system": [titled(SYSTEMS, name) for name in means["system"]],
            "budget": means["budget"],
            "sampling": means["sampling"],
            "K": means["k"].astype(str),
            "TPOT (ms)": means["tpot_ms"],
            "floor_trace (ms)": means["floor_trace_ms"],
            "floor_ideal (ms)": means["floor_ideal_ms"],
            "× LRU": [rivals[pair] for pair in zip(means["budget"], means["sampling"], strict=True)] / means["tpot_ms"],
            "acceptance (%)": means["acceptance"] * 100,
            "accepted per round": means["mean_accepted_len"],
            "experts per layer": means["union_mean"],
            "GB per token": means["bytes_per_token"] / 1e9,
        }
    )
    notes = [
        "Macro average over data sets; × LRU: LRU's TPOT over the row's.",
        f"{provenance(frame)}.",
        *caveats(frame),
    ]
    return Table("Depth of speculation", table, 4, notes, stated(frame))


def _sweep(frame: pd.DataFrame, key: str, order: Sequence[str], names: dict[str, str], title: str) -> Table:
    """TPOT of every system along one axis, macro averages."""
    times = (
        frame.groupby([key, "budget", "system", "dataset"])["tpot_ms"].mean().groupby([key, "budget", "system"]).mean()
    )
    floors = frame[frame["system"] == "specter"].groupby([key, "budget"])["floor_trace_ms"].mean()
    table = times.unstack()[in_order(frame["system"].unique().tolist(), SYSTEMS)]
    table.columns = [f"{titled(SYSTEMS, name).partition(' (')[0]} (ms)" for name in table.columns]
    table["floor_trace of Specter (ms)"] = floors
    table["× LRU"] = table["LRU (ms)"] / table["Specter (ms)"]
    table = table.reset_index()
    table = table.sort_values(
        [key, "budget"], key=lambda column: column.map(lambda value: order.index(value) if value in order else value)
    )
    table[key] = [titled(names, str(value)) for value in table[key]]
    ks = ", ".join(str(k) for k in sorted(frame.loc[frame["speculative"], "k"].unique()))
    notes = [f"Mean TPOT over data sets; K = {ks}.", f"{provenance(frame)}.", *caveats(frame)]
    return Table(title, table, 2, notes, stated(frame))


def budget_sweep(frames: Frames) -> Table:
    frame = spread_budgets(frames["budget_sweep"])
    per_layer = frame[frame["system"] == "specter"].groupby("budget")["experts_per_layer"].first()
    frame["experts per layer"] = frame["budget"].map(per_layer)
    table = _sweep(frame, "experts per layer", [], {}, "Cache budget")
    formatted = [f"{float(value):.3g}" for value in table.frame["experts per layer"]]
    shown = table.frame.assign(**{"experts per layer": formatted}).drop(columns="budget")
    return Table(table.title, shown, 1, table.notes, table.stated)


def hardware(frames: Frames) -> Table:
    return _sweep(spread_budgets(frames["hardware"]), "hardware", list(HARDWARE), HARDWARE, "Machines")


BUILD: dict[str, Callable[[Frames], Table]] = {
    "main": main_table,
    "systems": systems,
    "fidelity": fidelity,
    "union": union,
    "k_sweep": k_sweep,
    "budget_sweep": budget_sweep,
    "hardware": hardware,
    "rivals": rivals,
    "memory": memory,
    "depth": depth,
    "prompt_length": prompt_length,
    "decomposition": decomposition,
    "published_ratio": published_ratio,
    "transformers_offload": transformers_offload,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=BUILD)
    parser.add_argument("--out", type=Path, nargs="+", required=True)
    parser.add_argument("--tidy", type=Path, nargs="+", required=True)
    arguments = parser.parse_args()
    table = BUILD[arguments.table](read(arguments.tidy))
    for path in arguments.out:
        write_whole(path, FORMATS[path.suffix](table))
    print(f"wrote {', '.join(map(str, arguments.out))}")


if __name__ == "__main__":
    run_job(main)
