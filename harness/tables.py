"""Tables from tidy tables: `python -m harness.tables main --out main.tex main.md main.csv --tidy main.parquet`.

LaTeX and Markdown are rounded for reading, with the protocol below; CSV keeps six digits, with the protocol in columns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from harness import probe_tables, rival_tables
from harness.frames import (
    DATASETS,
    HARDWARE,
    MODELS,
    SYSTEMS,
    Frames,
    Table,
    by_model,
    caveats,
    half_width,
    in_order,
    provenance,
    read,
    spread_budgets,
    stated,
    tiers,
    titled,
    with_macro,
)
from harness.jobs import run_job
from specter.files import write_whole


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


def models(frames: Frames) -> Table:
    """All models at a glance."""
    frame = spread_budgets(frames["main"])
    rows = []
    for model in in_order(frame["charged_as"].unique().tolist(), MODELS):
        of_model = frame[frame["charged_as"] == model]
        for budget, sampling in _cells(of_model):
            part = of_model[(of_model["budget"] == budget) & (of_model["sampling"] == sampling)]
            times = part.groupby(["system", "dataset"])["tpot_ms"].mean().groupby("system").mean()
            mine = part[part["system"] == "specter"].groupby("dataset").mean(numeric_only=True).mean()
            rows.append(
                {
                    "model": titled(MODELS, model),
                    "budget": budget,
                    "sampling": sampling,
                    "experts per layer": f"{mine['experts_per_layer']:g}",
                    "K": f"{mine['k']:g}",
                    **{f"{titled(SYSTEMS, name).partition(' (')[0]} (ms)": times[name]
                       for name in in_order(times.index.tolist(), SYSTEMS)},
                    "acceptance (%)": mine["acceptance"] * 100,
                    "experts per round": mine["union_mean"],
                    "GB per token": mine["bytes_per_token"] / 1e9,
                    "× floor_trace": mine["over_floor_trace"],
                    "texts": str(len(part[part["system"] == "specter"])),
                }
            )  # fmt: skip
    notes = [
        "TPOT, macro average over each model's own data sets; acceptance and the columns after it are Specter's; "
        "experts per round: distinct ones of a layer that a verification needs.",
        f"{provenance(frame)}.",
        *caveats(frame),
    ]
    return Table("Models", pd.DataFrame(rows), 5, notes, stated(frame))


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
    "models": models,
    "main": by_model(main_table),
    "systems": by_model(systems),
    **probe_tables.BUILD,
    "k_sweep": by_model(k_sweep),
    "budget_sweep": by_model(budget_sweep),
    "hardware": by_model(hardware),
    **{name: by_model(build) for name, build in rival_tables.BUILD.items()},
}


def shown(value: object) -> str:
    """A number as people read it: about three digits."""
    if not isinstance(value, float):
        return str(value)
    if value != value:
        return "–"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 20 else f"{value:.2f}"


def to_markdown(table: Table) -> str:
    text = table.frame.map(shown)
    body = text.to_markdown(
        index=False, colalign=["left"] * table.keys + ["right"] * (text.shape[1] - table.keys), disable_numparse=True
    )
    return "\n".join([f"### {table.title}", "", body, "", *[f"{note}  " for note in table.notes], ""])


def to_latex(table: Table) -> str:
    text = table.frame.map(shown)
    style = text.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis=1)
    body = style.to_latex(hrules=True, column_format="l" * table.keys + "r" * (text.shape[1] - table.keys))
    notes = " ".join(table.notes)
    for plain, escaped in (("\\", r"\textbackslash{}"), ("%", r"\%"), ("_", r"\_"), ("&", r"\&"), ("#", r"\#")):
        notes = notes.replace(plain, escaped)
    lines = [
        r"\begin{table}",
        r"\centering\scriptsize",
        rf"\caption{{{table.title}. {notes}}}",
        body.rstrip(),
        r"\end{table}",
        "",
    ]
    return "\n".join(lines).replace("×", r"$\times$").replace("−", "--").replace("–", "--")


def to_csv(table: Table) -> str:
    text: str = table.frame.assign(**table.stated).to_csv(index=False, float_format="%.6g", lineterminator="\n")
    return text


FORMATS: dict[str, Callable[[Table], str]] = {".tex": to_latex, ".md": to_markdown, ".csv": to_csv}


def save(table: Table, paths: Sequence[Path]) -> None:
    """Writes every path in the format of its suffix."""
    for path in paths:
        write_whole(path, FORMATS[path.suffix](table))
    print(f"wrote {', '.join(map(str, paths))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=BUILD)
    parser.add_argument("--out", type=Path, nargs="+", required=True)
    parser.add_argument("--tidy", type=Path, nargs="+", required=True)
    arguments = parser.parse_args()
    save(BUILD[arguments.table](read(arguments.tidy)), arguments.out)


if __name__ == "__main__":
    run_job(main)
