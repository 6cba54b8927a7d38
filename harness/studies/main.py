"""The main experiment: TPOT and acceptance by data set and budget, and the models side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from harness.plotting import frames as tidy
from harness.plotting import notes
from harness.plotting.charts import MODES, NARROW, PAPER, Grid, grouped_bars, whiskers
from harness.plotting.frames import MACRO, Frames, dataset_title, macro, names, rows_of, split, spread_budgets
from harness.plotting.tables import Table, run_table
from harness.plotting.titles import short_title, styles, title
from harness.studies import disagreements, published
from harness.studies.registry import figure, table

TPOT = "TPOT (ms per token)"
BASELINES = ("specmoeoff", "mixtral_offloading", "lru", "on_demand")  # of the table's speed-ups
FLOORS_SHOWN = ("specter", "lru")
NOT_BY_DATASET = ("on_demand", "mixtral_speculative_loading")  # every text is alike to one; the other is near its like


def _at_equal_bytes(frames: Frames) -> pd.DataFrame:
    """The runs that figures show; tables have the published residents too."""
    return rows_of(spread_budgets(frames["main"]), policy="same_bytes")


def _with_datasets(blocks: list[pd.DataFrame]) -> pd.DataFrame:
    """Blocks whose index is the data set, below each other, with a column of titles `dataset`."""
    data = pd.concat(blocks).rename_axis("dataset").reset_index()
    return data.assign(dataset=data["dataset"].map(dataset_title))


def tpot_data(frames: Frames) -> pd.DataFrame:
    """[sampling, budget, panel, system, dataset, tpot_ms, least, greatest, floor_trace_ms (of `FLOORS_SHOWN`)]:
    mean and extent over inputs by data set; last, the macro average of more than one."""
    frame = _at_equal_bytes(frames)
    frame = frame[~frame["system"].isin(NOT_BY_DATASET)]
    found = []
    for named, mine in split(frame, "budget", "sampling", "system"):
        by_dataset = mine.groupby("dataset")
        means = by_dataset[["tpot_ms", "floor_trace_ms"]].mean()
        block = tidy.with_macro(means) if len(means) > 1 else means
        found.append(block.assign(**named).join(tidy.extent(mine, ["dataset"], "tpot_ms")))
    data = _with_datasets(found)
    data.loc[~data["system"].isin(FLOORS_SHOWN), "floor_trace_ms"] = np.nan
    return tidy.with_panels(data, frame)


def prefetch_costs(frames: Frames) -> str:
    """In how many cells the published planner is slower than speculation without it, in numbers."""
    times = tidy.summary(
        _at_equal_bytes(frames),
        ["charged_as", "budget", "sampling", "system"],
        lambda mine: {"ms": macro(mine, "tpot_ms")},
    )
    by_cell = times.pivot_table(index=["model", "budget", "sampling"], columns="system", values="ms")
    if "specter_no_prefetch" not in by_cell:
        return ""
    slower = by_cell["specter"] > by_cell["specter_no_prefetch"]
    return f"It is slower than no prefetch in {int(slower.sum())} of {len(slower)} cells shown."


@figure(
    "tpot", "main", one_model=True, minutes=6, data=tpot_data, shown=_at_equal_bytes,
    key=f"{notes.SPREAD}. Equal device bytes.",
    footer=lambda frames: [
        *notes.run_notes(_at_equal_bytes(frames), f"{notes.SPREAD}."),
        f"{disagreements.PREFETCH} {prefetch_costs(frames)}",
    ],
    about="time per output token by system, data set and budget, at equal bytes, with floor_trace",
)  # fmt: skip
def draw_tpot(data: pd.DataFrame) -> Grid:
    shown = styles(data["system"])
    grid = Grid(data, rows="sampling", columns="budget", height=2.1, sharey=True, y=TPOT, legend=True)
    for panel, part in grid:
        grouped_bars(
            panel, part, groups="dataset", series="system", value="tpot_ms", styles=shown, apart=MACRO,
            floor="floor_trace_ms", rotation=90,
        )  # fmt: skip
    return grid


def models_data(frames: Frames) -> pd.DataFrame:
    """[sampling, model, panel, budget (its title), system, tpot_ms]: macro averages."""
    frame = _at_equal_bytes(frames)
    blocks = []
    for named, part in split(frame, "sampling", "charged_as"):
        block = tidy.summary(part, ["budget", "system"], lambda mine: {"tpot_ms": macro(mine, "tpot_ms")})
        of = {budget: tidy.budget_title(part, budget).replace(" (", "\n(") for budget in names(part, "budget")}
        of = {budget: text.replace(" per layer", "") for budget, text in of.items()}
        sampling = tidy.sampling_title(frame, named["sampling"])
        panel = f"{title('model', named['model'])}, K = {part.loc[part['speculative'], 'k'].max()},\n{sampling}"
        blocks.append(block.assign(**named, panel=panel, budget=block["budget"].map(of)))
    return pd.concat(blocks, ignore_index=True)


@figure(
    "models", "main", minutes=7, data=models_data, shown=_at_equal_bytes,
    key="Macro average over each model's own data sets, at equal device bytes.",
    footer=lambda frames: notes.run_notes(
        _at_equal_bytes(frames), "Macro average over each model's own data sets."
    ),
    about="the three models side by side: TPOT, acceptance, experts, bytes",
)  # fmt: skip
def draw_models(data: pd.DataFrame) -> Grid:
    grid = Grid(data, rows="sampling", columns="model", height=2.2, sharey="col", title_size=7.5, y=TPOT,
                x="budget (experts per MoE layer)", legend=True)  # fmt: skip
    shown = styles(data["system"])
    for panel, part in grid:
        grouped_bars(panel, part, groups="budget", series="system", value="tpot_ms", styles=shown, rotation=90)
    return grid


def _accepting(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that draft as Specter does, of one of them and one budget: neither changes a token."""
    first = rows_of(frame, system="specter").iloc[0]
    return rows_of(frame, system="specter", budget=first["budget"], policy=first["policy"])


def acceptance_data(frames: Frames) -> pd.DataFrame:
    """[series, label, dataset (none: a line), value, least, greatest], in per cent."""
    frame = _accepting(frames["main"])
    values = frame.assign(series=frame["sampling"], label=frame["sampling"], value=frame["acceptance"] * 100)
    keys = ["series", "label", "dataset"]
    means = values.groupby(keys)["value"].mean().to_frame()
    by_dataset = means.join(tidy.extent(values, keys, "value")).reset_index()
    forced = rows_of(frames["probe"], quantity="acceptance", mode="teacher-forced")["value"].mean() * 100
    mean, most = published.ACCEPTANCE_MEAN * 100, published.ACCEPTANCE.get(frame["charged_as"].iloc[0], np.nan) * 100
    lines = [
        ("teacher-forced", f"teacher-forced, held-out text ({forced:.1f})", forced),
        ("paper, mean", f"paper: mean of its models ({mean:.1f})", mean),
        ("paper, most", f"paper: this model, up to ({most:.0f})", most),
    ]
    constant = pd.DataFrame(lines, columns=["series", "label", "value"]).dropna()
    return pd.concat([by_dataset.assign(dataset=by_dataset["dataset"].map(dataset_title)), constant], ignore_index=True)


@figure(
    "acceptance", "main", "probe", one_model=True, minutes=7, data=acceptance_data, draws_published=True,
    key="The axis does not start at 0.", shown=lambda frames: _accepting(frames["main"]),
    footer=lambda frames: notes.run_notes(
        _accepting(frames["main"]), f"The axis does not start at 0. {notes.SPREAD}.", with_k=True
    ),
    about="accepted draft tokens per data set, beside the paper's",
)  # fmt: skip
def draw_acceptance(data: pd.DataFrame) -> Grid:
    grid = Grid(data, width=NARROW, height=2.3, y="draft tokens accepted (%)", legend=True)
    ((panel,),) = grid.axes
    points = data.dropna(subset="dataset")
    datasets = points["dataset"].unique().tolist()
    for offset, (sampling, mine) in zip((-0.12, 0.12), points.groupby("series"), strict=False):
        x = [datasets.index(name) + offset for name in mine["dataset"]]
        panel.errorbar(x, mine["value"], yerr=whiskers(mine, "value"), fmt="o", color=MODES[str(sampling)],
                       elinewidth=0.8, label=sampling)  # fmt: skip
    dashes = {"teacher-forced": "-", "paper, mean": "--", "paper, most": ":"}
    for line in data[data["dataset"].isna()].to_dict("records"):
        shade, dash = MODES.get(line["series"], PAPER), dashes[line["series"]]
        panel.axhline(line["value"], color=shade, lw=1, ls=dash, label=line["label"])
    panel.set_xticks(range(len(datasets)), datasets)
    panel.set_xlim(-0.5, len(datasets) - 0.5)
    return grid


@table("main", "main", model_by_model=True, minutes=6, about="TPOT, speed-up, acceptance, hits, × floor_trace")
def main_table(frames: Frames) -> Table:
    frame = spread_budgets(frames["main"])
    systems = names(frame, "system")
    blocks = {}
    for named, part in split(frame, "policy", "budget", "sampling"):
        times = part.groupby(["dataset", "system"])["tpot_ms"].mean().unstack()
        ours = rows_of(part, system="specter").groupby("dataset").mean(numeric_only=True)
        columns = {f"{short_title(name)} (ms)": times[name] for name in systems}
        columns |= {f"× {title('system', name)}": times[name] / times["specter"] for name in BASELINES if name in times}
        columns |= {
            "acceptance (%)": ours["acceptance"] * 100,
            "accepted per round": ours["mean_accepted_len"],
            "hits (%)": ours["hit_rate"] * 100,
            "× floor_trace": ours["over_floor_trace"],
            "after 1st round (ms)": ours["tpot_after_first_round_ms"],
        }
        blocks[title("policy", named.pop("policy")), *named.values()] = tidy.with_macro(pd.DataFrame(columns))
    rows = pd.concat(blocks, names=["policy", "budget", "sampling", "data set"]).reset_index()
    words = (
        "TPOT = (last commit − first commit) / (tokens − 1), mean over inputs; × = the system's mean TPOT over "
        f"Specter's; the columns from there on are Specter's, K = {tidy.depths(rows_of(frame, system='specter'))}. "
        "mean: macro average over data sets, of ratios too."
    )
    rows["data set"] = rows["data set"].map(dataset_title)
    return run_table("Time per output token and speed-up", rows, 4, words, frame)


def _glance(part: pd.DataFrame) -> dict[str, Any]:
    """All systems and ours, of one policy, model, budget and sampling."""
    ours = rows_of(part, system="specter")
    mean = tidy.macros(ours)
    return {
        "experts per layer": f"{mean['experts_per_layer']:g}",
        "K": f"{mean['k']:g}",
        **{f"{short_title(named['system'])} (ms)": macro(mine, "tpot_ms") for named, mine in split(part, "system")},
        "acceptance (%)": mean["acceptance"] * 100,
        "experts per round": mean["union_mean"],
        "GB per token": mean["bytes_per_token"] / 1e9,
        "× floor_trace": mean["over_floor_trace"],
        "texts": str(ours.groupby(["dataset", "input"]).ngroups),
    }


@table("models", "main")
def models_table(frames: Frames) -> Table:
    frame = spread_budgets(frames["main"])
    words = (
        "TPOT, macro average over each model's own data sets; acceptance and the columns after it are Specter's; "
        "experts per round: distinct ones of a layer that a verification needs."
    )
    return run_table(
        "Models", tidy.table_rows(frame, ["policy", "charged_as", "budget", "sampling"], _glance), 6, words, frame
    )


def _details(mine: pd.DataFrame) -> dict[str, Any]:
    """One system at one budget and sampling."""
    mean = tidy.macros(mine)
    needed = mean["num_hits"] + mean["num_late_hits"] + mean["num_misses"]
    return {
        "system": short_title(mine["system"].iloc[0]),
        "TPOT (ms)": mean["tpot_ms"],
        "± 95 % (ms)": tidy.half_width(mine, "tpot_ms"),
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


@table(
    "systems", "main", model_by_model=True, minutes=6,
    about="each system in detail: TTFT, bytes, link, stall, memory",
)  # fmt: skip
def systems_table(frames: Frames) -> Table:
    frame = spread_budgets(frames["main"])
    words = (
        "Macro average over data sets, of ratios too (×); ±: half of its 95 % confidence interval over inputs within "
        f"data sets, of {tidy.MIN_INPUTS} inputs or more. "
        "Hits, late hits, misses: experts present, on their way, or absent when needed. "
        "Stall: compute waiting for copies, per run. Device: all device bytes of the model charged, draft included."
    )
    rows = tidy.table_rows(frame, ["policy", "budget", "sampling", "system"], _details)
    return run_table("Systems, in detail", rows, 4, words, frame)
