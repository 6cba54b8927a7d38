"""The main experiment: TPOT, speed-up and acceptance by data set and budget, and the models side by side."""

from __future__ import annotations

import numpy as np
import pandas as pd

from harness.plotting import notes
from harness.plotting.charts import MODES, NARROW, PAPER, Grid, grouped_bars, mark
from harness.plotting.frames import (
    MACRO,
    Frames,
    budget_title,
    cells,
    dataset_title,
    depths,
    each,
    half_width,
    macro_by,
    panel_title,
    rows_of,
    sampling_title,
    spread_budgets,
    systems,
    tiers,
    with_macro,
)
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import in_order, short_title, styles, title
from harness.studies import published
from harness.studies.registry import figure, table

TPOT = "TPOT (ms per token)"
BASELINES = ("lru", "mixtral_offloading", "on_demand")
FLOORS_SHOWN = ("specter", "lru")


def by_dataset(rows: pd.DataFrame, value: pd.Series) -> pd.DataFrame:
    """[dataset, value, least, greatest]: mean and extent over inputs by data set; last, the macro average."""
    found = value.groupby(rows["dataset"]).agg(value="mean", least="min", greatest="max")
    found.loc[MACRO] = {"value": found["value"].mean(), "least": np.nan, "greatest": np.nan}
    return found.rename_axis("dataset").reset_index()


def tpot_data(frames: Frames) -> pd.DataFrame:
    """[sampling, budget, panel, system, dataset, tpot_ms, least, greatest, floor_trace_ms (of `FLOORS_SHOWN`)]."""
    frame = spread_budgets(frames["main"])
    blocks = []
    for budget, sampling, part in cells(frame):
        named = {"sampling": sampling, "budget": budget, "panel": panel_title(frame, budget, sampling)}
        for system, mine in each(part, "system"):
            block = by_dataset(mine, mine["tpot_ms"]).rename(columns={"value": "tpot_ms"})
            floors = by_dataset(mine, mine["floor_trace_ms"])["value"]
            block["floor_trace_ms"] = floors if system in FLOORS_SHOWN else np.nan
            blocks.append(block.assign(**named, system=system))
    data = pd.concat(blocks, ignore_index=True)
    return data.assign(dataset=data["dataset"].map(dataset_title))


@figure(
    "tpot", "main", one_model=True, minutes=6, data=tpot_data,
    footer=lambda frames: notes.run_notes(spread_budgets(frames["main"]), f"{notes.SPREAD}."),
    about="time per output token, 7 systems × 5 data sets × 2 budgets, at equal bytes, with floor_trace",
)  # fmt: skip
def draw_tpot(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="sampling", columns="budget", height=2.1, margin=0.3, sharey=True)
    shown = styles(data["system"].unique().tolist())
    for panel, part in grid:
        centres = grouped_bars(
            panel, part, groups="dataset", series="system", value="tpot_ms", styles=shown, apart=MACRO, rotation=90
        )
        for row in part.dropna(subset="floor_trace_ms").to_dict("records"):
            label = "floor_trace" if row["system"] == FLOORS_SHOWN[0] else ""
            at = centres[row["dataset"], row["system"]]
            mark(panel, at, row["floor_trace_ms"], half=0.36 / len(shown), label=label)
    grid.label(y=TPOT)
    grid.legend(4 if len(shown) > 4 else 0)
    return grid


def models_data(frames: Frames) -> pd.DataFrame:
    """[sampling, model, panel, budget (its title), system, tpot_ms]: macro averages."""
    frame = spread_budgets(frames["main"])
    rows = []
    for sampling in tiers(frame)[0]:
        for model, part in each(rows_of(frame, sampling=sampling), "charged_as"):
            times = macro_by(part, ["budget", "system"], "tpot_ms")
            k = part.loc[part["speculative"], "k"].max()
            panel = f"{title('model', model)}, K = {k},\n{sampling_title(frame, sampling)}"
            rows += [
                {"sampling": sampling, "model": model, "panel": panel,
                 "budget": budget_title(part, budget).replace(" (", "\n("), "system": system,
                 "tpot_ms": times.get((budget, system), np.nan)}
                for budget in tiers(part)[1] for system in systems(part)
            ]  # fmt: skip
    return pd.DataFrame(rows)


@figure(
    "models", "main", minutes=7, data=models_data,
    footer=lambda frames: notes.run_notes(
        spread_budgets(frames["main"]), "Macro average over each model's own data sets."
    ),
    about="the three models side by side: TPOT, acceptance, experts, bytes",
)  # fmt: skip
def draw_models(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="sampling", columns="model", height=2.2, margin=0.3, sharey="col", title_size=7.5)
    shown = styles(data["system"].unique().tolist())
    for panel, part in grid:
        grouped_bars(panel, part, groups="budget", series="system", value="tpot_ms", styles=shown, rotation=90)
    grid.label(y=TPOT)
    grid.legend(4)
    return grid


def speedup_data(frames: Frames) -> pd.DataFrame:
    """[baseline, panel, cell, dataset, speedup, least, greatest]: the baseline's mean TPOT over Specter's."""
    frame = spread_budgets(frames["main"])
    blocks = []
    for baseline in (name for name in BASELINES if name in set(frame["system"])):
        for budget, sampling, part in cells(frame):
            times = part.pivot_table(index=["dataset", "input"], columns="system", values="tpot_ms")
            averages = times.groupby("dataset").mean()
            ratios = (times[baseline] / times["specter"]).groupby("dataset")
            block = with_macro((averages[baseline] / averages["specter"]).to_frame("speedup"))
            block = block.assign(least=ratios.min(), greatest=ratios.max()).rename_axis("dataset").reset_index()
            named = {"baseline": baseline, "panel": f"Specter against {title('system', baseline)}"}
            blocks.append(block.assign(**named, cell=f"{budget}, {sampling}"))
    data = pd.concat(blocks, ignore_index=True)
    return data.assign(dataset=data["dataset"].map(dataset_title))


@figure(
    "speedup", "main", one_model=True, minutes=6, data=speedup_data,
    footer=lambda frames: notes.run_notes(
        spread_budgets(frames["main"]),
        f"Speed-up: ratio of mean TPOTs. {notes.SPREAD}, of the ratio per input.",
    ),
    about="Specter against LRU, Mixtral-Offloading and on demand, at equal bytes",
)  # fmt: skip
def draw_speedup(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="baseline", height=1.5, margin=0.3)
    colours = ("#0072B2", "#7fb8d8", "#D55E00", "#f0b27a")
    shown = {name: (name, one) for name, one in zip(data["cell"].unique(), colours, strict=False)}
    for panel, part in grid:
        grouped_bars(
            panel, part, groups="dataset", series="cell", value="speedup", styles=shown, apart=MACRO,
            value_format="{:.2f}",
        )  # fmt: skip
        panel.axhline(1, color="black", lw=0.8)
    grid.label(y="speed-up (×)")
    grid.legend()
    return grid


def _accepting(frame: pd.DataFrame) -> pd.DataFrame:
    """The speculative runs at one budget, which changes no token."""
    return rows_of(frame[frame["speculative"]], budget=frame["budget"].iloc[0])


def acceptance_data(frames: Frames) -> pd.DataFrame:
    """[series, label, dataset (none: a line), value, least, greatest], in per cent."""
    frame = _accepting(frames["main"])
    rows: list[dict[str, object]] = []
    for sampling in sorted(frame["sampling"].unique()):
        by = rows_of(frame, sampling=sampling).groupby("dataset")["acceptance"].agg(["mean", "min", "max"]) * 100
        rows += [
            {"series": sampling, "label": sampling, "dataset": dataset_title(name), "value": by["mean"][name],
             "least": by["min"][name], "greatest": by["max"][name]}
            for name in in_order("dataset", frame["dataset"])
        ]  # fmt: skip
    forced = rows_of(frames["probe"], quantity="acceptance", mode="teacher-forced")["value"] * 100
    if len(forced):
        label = f"teacher-forced, held-out text ({forced.mean():.1f})"
        rows.append({"series": "teacher-forced", "label": label, "value": forced.mean()})
    mean = published.ACCEPTANCE_MEAN * 100
    rows.append({"series": "paper, mean", "label": f"paper: mean of its models ({mean:.1f})", "value": mean})
    given = published.ACCEPTANCE.get(frame["charged_as"].iloc[0])
    if given is not None:
        label = f"paper: this model, up to ({given * 100:.0f})"
        rows.append({"series": "paper, most", "label": label, "value": given * 100})
    return pd.DataFrame(rows)


@figure(
    "acceptance", "main", "probe", one_model=True, minutes=7, data=acceptance_data,
    footer=lambda frames: notes.run_notes(
        _accepting(frames["main"]), f"The axis does not start at 0. {notes.SPREAD}.", with_k=True
    ),
    about="accepted draft tokens per data set, beside the paper's",
)  # fmt: skip
def draw_acceptance(data: pd.DataFrame) -> Grid:
    grid = Grid(data, width=NARROW, height=2.3)
    ((panel,),) = grid.axes
    points = data.dropna(subset="dataset")
    datasets = points["dataset"].unique().tolist()
    for offset, (sampling, mine) in zip((-0.12, 0.12), points.groupby("series"), strict=False):
        x = [datasets.index(name) + offset for name in mine["dataset"]]
        spread = [mine["value"] - mine["least"], mine["greatest"] - mine["value"]]
        panel.errorbar(x, mine["value"], yerr=spread, fmt="o", color=MODES[str(sampling)], elinewidth=0.8,
                       label=sampling)  # fmt: skip
    dashes = {"teacher-forced": "-", "paper, mean": "--", "paper, most": ":"}
    for line in data[data["dataset"].isna()].to_dict("records"):
        shade, dash = MODES.get(line["series"], PAPER), dashes[line["series"]]
        panel.axhline(line["value"], color=shade, lw=1, ls=dash, label=line["label"])
    panel.set_xticks(range(len(datasets)), datasets)
    panel.set_xlim(-0.5, len(datasets) - 0.5)
    grid.label(y="draft tokens accepted (%)")
    grid.legend(2)
    return grid


@table(
    "main", "main", model_by_model=True, minutes=6, about="TPOT, speed-up, acceptance, hits, × floor_trace"
)  # fmt: skip
def main_table(frames: Frames) -> Table:
    frame = spread_budgets(frames["main"])
    names = systems(frame)
    blocks = []
    for budget, sampling, part in cells(frame):
        times = part.groupby(["dataset", "system"])["tpot_ms"].mean().unstack()
        block = times[names].rename(columns=lambda name: f"{short_title(name)} (ms)")
        for baseline in (name for name in BASELINES if name in names):
            block[f"× {title('system', baseline)}"] = times[baseline] / times["specter"]
        mine = rows_of(part, system="specter").groupby("dataset").mean(numeric_only=True)
        block["acceptance (%)"] = mine["acceptance"] * 100
        block["accepted per round"] = mine["mean_accepted_len"]
        block["hits (%)"] = mine["hit_rate"] * 100
        block["× floor_trace"] = mine["over_floor_trace"]
        block["after 1st round (ms)"] = mine["tpot_after_first_round_ms"]
        block = with_macro(block)
        block.insert(0, "data set", [dataset_title(name) for name in block.index])
        block.insert(0, "sampling", sampling)
        block.insert(0, "budget", budget)
        blocks.append(block)
    words = (
        "TPOT = (last commit − first commit) / (tokens − 1), mean over inputs; × = the system's mean TPOT over "
        f"Specter's; the columns from there on are Specter's, K = {depths(frame)}. mean: macro average over data sets."
    )
    rows = pd.concat(blocks, ignore_index=True)
    return run_table("Time per output token and speed-up", rows, 3, words, frame)


@table("models", "main")
def models_table(frames: Frames) -> Table:
    frame = spread_budgets(frames["main"])
    rows = []
    for model, of_model in each(frame, "charged_as"):
        for budget, sampling, part in cells(of_model):
            times = macro_by(part, ["system"], "tpot_ms")
            ours = rows_of(part, system="specter")
            mean = ours.groupby("dataset").mean(numeric_only=True).mean()
            rows.append(
                {
                    "model": title("model", model),
                    "budget": budget,
                    "sampling": sampling,
                    "experts per layer": f"{mean['experts_per_layer']:g}",
                    "K": f"{mean['k']:g}",
                    **{f"{short_title(name)} (ms)": times[name] for name in systems(part)},
                    "acceptance (%)": mean["acceptance"] * 100,
                    "experts per round": mean["union_mean"],
                    "GB per token": mean["bytes_per_token"] / 1e9,
                    "× floor_trace": mean["over_floor_trace"],
                    "texts": str(len(ours)),
                }
            )
    words = (
        "TPOT, macro average over each model's own data sets; acceptance and the columns after it are Specter's; "
        "experts per round: distinct ones of a layer that a verification needs."
    )
    return run_table("Models", pd.DataFrame(rows), 5, words, frame)


@table(
    "systems", "main", model_by_model=True, minutes=6,
    about="each system in detail: TTFT, bytes, link, stall, memory",
)  # fmt: skip
def systems_table(frames: Frames) -> Table:
    frame = spread_budgets(frames["main"])
    rows = []
    for budget, sampling, part in cells(frame):
        for system, mine in each(part, "system"):
            mean = mine.groupby("dataset").mean(numeric_only=True).mean()
            needed = mean["num_hits"] + mean["num_late_hits"] + mean["num_misses"]
            rows.append(
                {
                    "budget": budget,
                    "sampling": sampling,
                    "system": short_title(system),
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
    words = (
        "Macro average over data sets; ±: half of its 95 % confidence interval over inputs within data sets. "
        "Hits, late hits, misses: experts present, on their way, or absent when needed. "
        "Stall: compute waiting for copies, per run. Device: all device bytes of the model charged, draft included."
    )
    return run_table("Systems, in detail", pd.DataFrame(rows), 3, words, frame)
