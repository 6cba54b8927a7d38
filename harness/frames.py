"""Reading tidy tables: selection, averages over inputs, and the line that states where numbers come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from specter.errors import SpecterError

Frames = dict[str, pd.DataFrame]  # by experiment, "probe" or "fidelity"
SYSTEMS = {
    "specter": "Specter",
    "specter_deadline": "Specter, deadline + retain",
    "specter_no_prefetch": "Specter, no prefetch",
    "specmoeoff": "SpecMoEOff",
    "specmoeoff_tuned": "SpecMoEOff, tuned",
    "mixtral_offloading": "Mixtral-Offloading",
    "mixtral_speculative_loading": "Mixtral-Off., spec. loading",
    "lru": "LRU",
    "lru_next_gate": "LRU, next gate",
    "on_demand": "on demand",
    "resident": "resident (all on GPU)",
}
DATASETS = {
    "gsm8k": "GSM8K",
    "humaneval": "HumanEval",
    "hub_gsm8k": "GSM8K",
    "hub_humaneval": "HumanEval",
    "hub_wikitext2": "WikiText-2",
    "hub_gpqa": "GPQA",
    "hub_c4": "C4",
}
HARDWARE = {
    "a100_40gb_pcie4": "A100 40 GB, PCIe 4.0",
    "a100_12gbps": "A100 40 GB, 12 GB/s",
    "h200_pcie5": "H200, PCIe 5.0",
    "rtx4090_ddr4": "RTX 4090, DDR4 desktop",
}
MODELS = {
    "deepseek_v2_lite": "DeepSeek-V2-Lite",
    "qwen1_5_moe": "Qwen1.5-MoE",
    "phi3_5_moe": "Phi-3.5-MoE",
}
PART_TITLES = {
    "tokens": "more tokens per round",
    "draft": "cheaper draft (time, memory)",
    "misses": "fewer misses (link time)",
    "hidden": "hidden transfers",
    "launches": "fewer launches",
}
METHODS = {
    "gptq": "GPTQ, INT4",
    "awq": "AWQ, INT4",
    "rtn": "round to nearest, INT4",
    "q8_0": "GGUF Q8_0",
    "q4_k": "GGUF Q4_K",
    "q2_k": "GGUF Q2_K",
}
CHECKPOINTS = {"standin": "narrow stand-in of", "hub": "hub checkpoint of"}
POLICIES = {"same_bytes": "equal bytes", "same_experts": "equal experts", "published": "as published"}
# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the last, the normal distribution's.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12,
        2.11, 2.101, 2.093, 2.086)  # fmt: skip
LOOPING = 0.9  # distinct 4-grams below this: the text repeats itself, which flatters hit rates
MACRO = "mean"


def read(paths: Sequence[Path]) -> Frames:
    """Tidy tables by experiment (or `probe`, `fidelity`), which is their file's name."""
    return {path.stem: pd.read_parquet(path) for path in paths}


def of_model(frames: Frames, model: str) -> Frames:
    """The rows of one model."""
    return {name: frame[frame["model"] == model] for name, frame in frames.items()}


def titled(names: dict[str, str], name: str) -> str:
    return names.get(name, name.replace("_", " "))


def spread_budgets(frame: pd.DataFrame) -> pd.DataFrame:
    """Repeats the rows of systems that ignore the budget under every budget, so that each budget has all systems."""
    budgets = frame.loc[frame["uses_budget"], "budget"].unique()
    fixed = frame[~frame["uses_budget"]]
    copies = [fixed.assign(budget=budget) for budget in budgets]
    return pd.concat([frame[frame["uses_budget"]], *copies], ignore_index=True)


def budget_title(frame: pd.DataFrame, budget: str) -> str:
    rows = frame[(frame["budget"] == budget) & (frame["system"] == "specter")]
    return f"{budget} ({rows['experts_per_layer'].min():g} experts per layer)"


def tiers(frame: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Samplings (rows) and budgets (columns, largest first)."""
    used = frame[frame["system"] == "specter"].sort_values("experts_per_layer", ascending=False)
    return sorted(frame["sampling"].unique()), used["budget"].unique().tolist()


def with_macro(means: pd.DataFrame) -> pd.DataFrame:
    """Appends the macro average over data sets. `means`: one row per data set, which is the index."""
    average = means.mean().to_frame(MACRO).T
    return pd.concat([means, average])


def half_width(frame: pd.DataFrame, column: str) -> float:
    """Half of the 95 % confidence interval of the macro average of `column`: inputs are drawn within data sets.

    NaN where no data set has two inputs.
    """
    groups = frame.groupby("dataset")[column].agg(["var", "count"])
    freedom = int((groups["count"] - 1).sum())
    if freedom == 0:
        return float("nan")
    error = float((groups["var"].fillna(0) / groups["count"]).sum() ** 0.5) / len(groups)
    return error * (T_95[freedom - 1] if freedom <= len(T_95) else 1.96)


def in_order(values: Sequence[str], known: dict[str, str]) -> list[str]:
    """Values in the order of the table of titles, unknown ones last."""
    order = {name: index for index, name in enumerate(known)}
    return sorted(values, key=lambda value: (order.get(value, len(order)), value))


def sampling_title(frame: pd.DataFrame, sampling: str) -> str:
    """A sampling with its temperature, which a table of runs or of probes holds."""
    if sampling == "greedy":
        return "greedy"
    temperature = frame.loc[frame["sampling"] == sampling, "temperature"].iloc[0]
    return f"{sampling}, T = {temperature:g}"


def checkpoint_line(frame: pd.DataFrame) -> str:
    pairs = frame[["checkpoint_kind", "charged_as"]].drop_duplicates()
    kinds = dict(zip(pairs["charged_as"], pairs["checkpoint_kind"], strict=True))
    return ", ".join(
        f"{titled(CHECKPOINTS, kinds[model])} {titled(MODELS, model)}" for model in in_order(list(kinds), MODELS)
    )


def per_model(frame: pd.DataFrame, say: Callable[[pd.DataFrame], str]) -> str:
    """What `say` says of each model's rows: once where that is the same of all, else with the models it is said of."""
    saying: dict[str, list[str]] = {}
    for model in in_order(frame["charged_as"].unique().tolist(), MODELS):
        saying.setdefault(say(frame[frame["charged_as"] == model]), []).append(titled(MODELS, model))
    if len(saying) == 1:
        return next(iter(saying))
    return ", ".join(f"{said} ({' and '.join(named)})" for said, named in saying.items())


def _num_datasets(frame: pd.DataFrame) -> str:
    number = frame["dataset"].nunique()
    return f"{number} data set{'s' * (number > 1)}"


def _num_texts(frame: pd.DataFrame) -> str:
    num_inputs = int(frame.groupby("dataset")["input"].nunique().max())
    return f"{_num_datasets(frame)} × {num_inputs} input{'s' * (num_inputs > 1)}"


def provenance(frame: pd.DataFrame) -> str:
    """Clock, hardware, checkpoint, sampling, lengths and number of inputs behind a table of runs."""

    def listed(column: str, names: dict[str, str]) -> str:
        return " / ".join(titled(names, value) for value in in_order(frame[column].unique().tolist(), names))

    prompts = ", ".join("whole" if n == 0 else f"first {n} tokens" for n in sorted(frame["prompt_tokens"].unique()))
    repeats = "1 repeat (the clock is deterministic)" if set(frame["clock"]) == {"virtual"} else "1 repeat"
    parts = [
        f"Clock: {', '.join(sorted(frame['clock'].unique()))}",
        listed("hardware", HARDWARE),
        checkpoint_line(frame),
        " and ".join(sampling_title(frame, name) for name in sorted(frame["sampling"].unique())),
        f"prompts: {prompts}",
        f"{frame['max_new_tokens'].max()} new tokens",
        f"{per_model(frame, _num_texts)} × {repeats}",
    ]
    return "; ".join(parts)


def probe_line(frame: pd.DataFrame) -> str:
    """Provenance of the probes, which no clock and no machine enters."""
    generated = frame[frame["mode"] != "teacher-forced"].rename(columns={"mode": "sampling"})
    samplings = " and ".join(sampling_title(generated, name) for name in sorted(generated["sampling"].unique()))
    forced = "" if len(generated) == len(frame) else "teacher-forced: held-out text; "
    return (
        f"{checkpoint_line(frame)}; INT4 draft: GPTQ, symmetric, group 128 or the row; {samplings}: texts generated "
        f"from {per_model(generated, _num_datasets)}; {forced}no clock involved"
    )


def fidelity_line(frame: pd.DataFrame) -> str:
    """Provenance of the fidelity study."""
    of_requests = frame[frame["quantity"] == "set_match"]
    counts = frame.groupby("model")[["num_requests", "num_pairs"]].first().sum()
    modes = " and ".join(sorted(of_requests["mode"].unique()))
    return (
        f"{checkpoint_line(frame)}; {counts['num_requests']} requests, {counts['num_pairs']} request–layer pairs (the "
        f"paper: 1,000 requests); texts: {modes}, {per_model(of_requests, _num_datasets)}; teacher-forced in "
        f"windows of {frame['window'].max()}, fp32; no clock involved"
    )


def _distinct(frame: pd.DataFrame) -> str:
    return f"{frame['distinct_4grams'].mean():.2f}"


def caveats(frame: pd.DataFrame) -> list[str]:
    """What a reader must know beside the numbers: looping text, and a model that would fit without offloading."""
    notes = []
    if "fits_without_offloading" in frame:
        fitting = frame[frame["fits_without_offloading"].astype(bool)]
        for model in in_order(fitting["charged_as"].unique().tolist(), MODELS):
            machines = in_order(fitting.loc[fitting["charged_as"] == model, "hardware"].unique().tolist(), HARDWARE)
            named = " / ".join(titled(HARDWARE, name) for name in machines)
            notes.append(f"The whole {titled(MODELS, model)} fits {named} without offloading.")
    if {"specter", "lru"} <= set(frame.get("system", ())) and set(frame["policy"]) == {"same_bytes"}:
        draft_gb = frame[frame["system"] == "specter"].groupby("charged_as")["device_draft_bytes"].first() / 1e9
        sizes = ", ".join(f"{draft_gb[model]:.1f}" for model in in_order(draft_gb.index.tolist(), MODELS))
        notes.append(
            f"Systems have equal device bytes: what Specter spends on its INT4 draft ({sizes} GB), others "
            "spend on slots. A budget's experts per layer are Specter's."
        )
    if "fits_device" in frame:
        beyond = frame.loc[~frame["fits_device"].astype(bool), ["system", "hardware", "charged_as"]].drop_duplicates()
        for system, machine, model in beyond.to_numpy().tolist():
            of_which = f" of {titled(MODELS, model)}" if frame["charged_as"].nunique() > 1 else ""
            notes.append(f"{titled(SYSTEMS, system)}{of_which} does not fit {titled(HARDWARE, machine)}.")
    for sampling, texts in frame.groupby("sampling"):
        grams = texts.groupby("charged_as")["distinct_4grams"].mean()
        looping = in_order(grams.index[grams < LOOPING].tolist(), MODELS)
        if looping:
            named = " and ".join(titled(MODELS, model) for model in looping)
            whose = "" if len(looping) == len(grams) else f" of {named}"
            shares = per_model(texts[texts["charged_as"].isin(looping)], _distinct)
            notes.append(
                f"The {sampling} text{whose} repeats itself (distinct 4-grams {shares}), which flatters hit rates."
            )
    return notes


@dataclass(frozen=True)
class Table:
    """Numbers with the words around them. `keys` are the leading columns that name a row."""

    title: str
    frame: pd.DataFrame
    keys: int
    notes: list[str]
    stated: dict[str, str]  # the protocol, as columns of the CSV


def by_model(build: Callable[[Frames], Table]) -> Callable[[Frames], Table]:
    """A table of every model that all its frames have, one below the other; what is said of one model names it.

    The table raises SpecterError if there is no such model.
    """

    def built(frames: Frames) -> Table:
        in_all = set.intersection(*(set(frame["model"]) for frame in frames.values()))
        models = in_order(sorted(in_all), MODELS)
        if not models:
            raise SpecterError(f"no model is in all of {', '.join(frames)}", "give tidy tables of the same models")
        tables = {titled(MODELS, model): build(of_model(frames, model)) for model in models}
        first = next(iter(tables.values()))
        if len(tables) == 1:
            return first
        parts = [table.frame.assign(model=title)[["model", *table.frame]] for title, table in tables.items()]
        saying: dict[str, list[str]] = {}  # by note
        for title, table in tables.items():
            for note in table.notes:
                saying.setdefault(note, []).append(title)
        notes = [
            note if len(titles) == len(tables) else f"{', '.join(titles)}: {note}" for note, titles in saying.items()
        ]
        protocol = {
            key: " / ".join(dict.fromkeys(table.stated[key] for table in tables.values())) for key in first.stated
        }
        return Table(first.title, pd.concat(parts, ignore_index=True), first.keys + 1, notes, protocol)

    return built


def stated(frame: pd.DataFrame) -> dict[str, str]:
    """The protocol of a table of runs or of probes."""
    if "num_pairs" in frame:
        return {"protocol": fidelity_line(frame)}
    if "clock" not in frame:
        return {"protocol": probe_line(frame)}
    return {
        "clock": " / ".join(sorted(frame["clock"].unique())),
        "hardware": " / ".join(sorted(frame["hardware"].unique())),
        "checkpoint": checkpoint_line(frame),
        "temperature": " / ".join(f"{value:g}" for value in sorted(frame["temperature"].unique())),
    }
