"""Sentences below figures and tables: where the numbers come from, and what limits them."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from harness.plotting.frames import MIN_INPUTS, depths, names, sampling_title, split
from harness.plotting.titles import in_order, title

LOOPING = 0.9  # distinct 4-grams below this: the text repeats itself, which raises hit rates
SPREAD = f"Whiskers: least to greatest input, where there are {MIN_INPUTS} or more"
TRAINED = (
    "The stand-ins were trained towards the published acceptance and expert match, so being near these values confirms "
    "nothing about the real checkpoints."
)


def checkpoint_line(frame: pd.DataFrame) -> str:
    pairs = frame[["checkpoint_kind", "charged_as"]].drop_duplicates()
    kinds = dict(zip(pairs["charged_as"], pairs["checkpoint_kind"], strict=True))
    return ", ".join(
        f"{title('checkpoint', kinds[model])} {title('model', model)}" for model in names(frame, "charged_as")
    )


def per_model(frame: pd.DataFrame, describe: Callable[[pd.DataFrame], str]) -> str:
    """`describe` of each model's rows: once if it is the same for all, else followed by the models that it is of."""
    described: dict[str, list[str]] = {}
    for model in names(frame, "charged_as"):
        described.setdefault(describe(frame[frame["charged_as"] == model]), []).append(title("model", model))
    if len(described) == 1:
        return next(iter(described))
    return ", ".join(f"{text} ({' and '.join(named)})" for text, named in described.items())


def counted(number: int, noun: str) -> str:
    """For example "1 input", "2 inputs"."""
    return f"{number} {noun}{'s' * (number > 1)}"


def _num_datasets(frame: pd.DataFrame) -> str:
    return counted(frame["dataset"].nunique(), "data set")


def _num_texts(frame: pd.DataFrame) -> str:
    num_inputs = int(frame.groupby("dataset")["input"].nunique().max())
    return f"{_num_datasets(frame)} × {counted(num_inputs, 'input')}"


def length_line(frame: pd.DataFrame) -> str:
    """The length of texts, and whether EOS ends them; runs without the column are older, and none ended there."""
    ignores = bool(frame["ignore_eos"].all()) if "ignore_eos" in frame else True
    length = frame["max_new_tokens"].max()
    return f"{length} new tokens, EOS ignored" if ignores else f"at most {length} new tokens, ended by EOS"


def provenance(frame: pd.DataFrame) -> str:
    """Clock, hardware, checkpoint, sampling, lengths and number of inputs of a table of runs."""
    prompts = ", ".join("whole" if n == 0 else f"first {n} tokens" for n in sorted(frame["prompt_tokens"].unique()))
    codecs = in_order("codec", frame["codec"])
    repeats = counted(frame["repeat"].nunique(), "repeat")
    if set(frame["clock"]) == {"virtual"}:
        repeats += " (the clock is deterministic)"
    parts = [
        f"Clock: {', '.join(sorted(frame['clock'].unique()))}",
        " / ".join(title("hardware", name) for name in in_order("hardware", frame["hardware"])),
        checkpoint_line(frame),
        f"experts: {' and '.join(title('codec', name) for name in codecs)}",
        " and ".join(sampling_title(frame, name) for name in sorted(frame["sampling"].unique())),
        f"prompts: {prompts}",
        length_line(frame),
        f"{per_model(frame, _num_texts)} × {repeats}",
    ]
    return "; ".join(parts)


def brief(frame: pd.DataFrame) -> str:
    """Where the numbers of a table come from, in short: clock and machine, checkpoints and texts, sampling."""
    column = next((name for name in ("charged_as", "model") if name in frame), "")
    is_measured = "gpu" in frame
    machine = (
        " / ".join(frame["gpu"].dropna().unique())
        if is_measured
        else " / ".join(title("hardware", name) for name in in_order("hardware", frame.get("hardware", ())))
    )
    clock = (
        "Clock: device"
        if is_measured
        else f"Clock: {', '.join(sorted(frame.get('clock', pd.Series(['none'])).unique()))}"
    )
    parts = [", ".join(filter(None, (clock, machine)))]
    if column:
        frame = frame.dropna(subset=column)
        kind = "inflated stand-ins" if is_measured else "hub checkpoints"
        if set(frame.get("checkpoint_kind", ())) == {"standin"} and not is_measured:
            kind = "narrow stand-ins"
        by_texts: dict[str, list[str]] = {}
        for model in names(frame, column):
            texts = f" ({_num_texts(frame[frame[column] == model])})" if {"dataset", "input"} <= set(frame) else ""
            by_texts.setdefault(texts, []).append(title("model", model))
        models = " and ".join(f"{', '.join(named)}{texts}" for texts, named in by_texts.items())
        num_models = sum(map(len, by_texts.values()))
        parts.append(f"{kind if num_models > 1 else kind.removesuffix('s')} of {models}")
    if {"sampling", "temperature"} <= set(frame):
        parts.append(" and ".join(sampling_title(frame, name) for name in sorted(frame["sampling"].unique())))
    return "; ".join(parts) + "."


def probe_line(frame: pd.DataFrame) -> str:
    """Provenance of the probes, which depend on no clock and no machine."""
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


def run_notes(frame: pd.DataFrame, after: str = "", *, with_k: bool = False) -> list[str]:
    """Lines below a figure of runs: provenance (with the K of the runs), a sentence, and the caveats."""
    depth = f"; K = {depths(frame)}" if with_k else ""
    return [f"{provenance(frame)}{depth}. {after}", *caveats(frame)]


def caveats(frame: pd.DataFrame) -> list[str]:
    """What limits the numbers: models that fit without offloading, unequal memory, systems too large, looping text."""
    notes = []
    if "fits_without_offloading" in frame:
        fitting = frame[frame["fits_without_offloading"].astype(bool)]
        for model in names(fitting, "charged_as"):
            machines = in_order("hardware", fitting.loc[fitting["charged_as"] == model, "hardware"])
            named = " / ".join(title("hardware", name) for name in machines)
            notes.append(f"The whole {title('model', model)} fits {named} without offloading.")
    if {"specter", "lru"} <= set(frame.get("system", ())) and set(frame["policy"]) == {"same_bytes"}:
        ours = frame[frame["system"] == "specter"]
        draft_gb = ours.groupby("charged_as")["device_draft_bytes"].first() / 1e9
        sizes = ", ".join(f"{draft_gb[model]:.1f}" for model in names(ours, "charged_as"))
        notes.append(
            f"Systems have equal device bytes: what Specter spends on its INT4 draft ({sizes} GB), others "
            "spend on slots. A budget's experts per layer are Specter's."
        )
    if "fits_device" in frame:
        beyond = frame.loc[~frame["fits_device"].astype(bool), ["system", "hardware", "charged_as"]].drop_duplicates()
        for system, machine, model in beyond.to_numpy().tolist():
            of_which = f" of {title('model', model)}" if frame["charged_as"].nunique() > 1 else ""
            notes.append(f"{title('system', system)}{of_which} does not fit {title('hardware', machine)}.")
    return [*notes, *_looping(frame)]


def residents(frame: pd.DataFrame) -> list[str]:
    """What is taken for residents that the paper's text does not give, for runs under the policy `published`."""
    frame = frame[frame["policy"] == "published"]
    assumed = frame[frame["assumes_residents"] & (frame["residents_of"] == frame["system"])]
    parts = []
    for named, mine in split(assumed, "system", "charged_as"):
        taken = " / ".join(
            f"{mine.loc[mine['budget'] == one, 'experts_per_layer'].iloc[0]:g}" for one in names(mine, "budget")
        )
        parts.append(f"{title('system', named['system'])} of {title('model', named['model'])} {taken}")
    borrowed = frame[frame["residents_of"] != frame["system"]]
    for named, mine in split(borrowed, "residents_of"):
        systems = " and ".join(title("system", name) for name in names(mine, "system"))
        parts.append(f"{systems}: those of {title('system', named['residents_of'])}")
    return [
        f"Residents per layer that the paper's text does not give are taken (conf/model): {'; '.join(parts)}."
    ] * bool(parts)


def _looping(frame: pd.DataFrame) -> list[str]:
    notes = []
    for sampling, texts in frame.groupby("sampling"):
        grams = texts.groupby("charged_as")["distinct_4grams"].mean()
        looping = in_order("model", grams.index[grams < LOOPING])
        if looping:
            named = " and ".join(title("model", model) for model in looping)
            whose = "" if len(looping) == len(grams) else f" of {named}"
            shares = per_model(
                texts[texts["charged_as"].isin(looping)], lambda rows: f"{rows['distinct_4grams'].mean():.2f}"
            )
            notes.append(
                f"The {sampling} text{whose} repeats itself (distinct 4-grams {shares}), which raises hit rates."
            )
    return notes


def stated(frame: pd.DataFrame) -> dict[str, str]:
    """The protocol of a table of runs, as columns of its CSV file."""
    return {
        "clock": " / ".join(sorted(frame["clock"].unique())),
        "hardware": " / ".join(sorted(frame["hardware"].unique())),
        "checkpoint": checkpoint_line(frame),
        "temperature": " / ".join(f"{value:g}" for value in sorted(frame["temperature"].unique())),
    }


def device_line(frame: pd.DataFrame) -> str:
    """The machine, its software and the checkpoint of runs that were measured on a device, once each."""
    one = frame.iloc[0]
    return (
        f"device clock: {one['gpu']}, driver {one['driver_version']}, torch {one['torch']}, one run; "
        f"{one['checkpoint']}"
    )


def device_texts(frame: pd.DataFrame) -> list[str]:
    """Lines below a figure of measured runs: machine and texts, then memory and how much texts repeat themselves."""
    cells = frame.groupby(["system", "budget", "sampling", "k", "fused", "graphs", "overlap"]).size()
    least, most = int(cells.min()), int(cells.max())
    texts = counted(least, "text") if least == most else f"{least}–{most} texts"
    parts = []
    for sampling, grams in frame.groupby("sampling")["distinct_4grams"]:
        low, high = grams.min(), grams.max()
        parts.append(f"{sampling} {low:.0%}" + ("" if low == high else f" to {high:.0%}"))
    one = frame.iloc[0]
    return [
        f"{device_line(frame)}; {one['prompt_tokens']}-token prompts, {length_line(frame)}, {texts}.",
        "Equal slots (same_experts): the draft's INT4 experts come on top of them, and LRU gets no slots for them. "
        f"Distinct 4-grams: {', '.join(parts)} (below {LOOPING:.0%} a text loops).",
    ]


def device_stated(frame: pd.DataFrame) -> dict[str, str]:
    """The protocol of a table of measured runs, as columns of its CSV file."""
    return {"clock": "device", "hardware": frame["gpu"].iloc[0], "checkpoint": frame["checkpoint"].iloc[0]}
