"""Tidy tables: reading, selection and averages. A tidy table has a row per run, with its settings and its metrics."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.plotting.titles import in_order, title
from harness.scales import ROUNDS
from specter.errors import SpecterError

Frames = dict[str, pd.DataFrame]  # by source: an experiment, a probe, or a file of data/reference/<machine>
Row = dict[str, Any]
# The group of titles, and the heading in a table, of columns that are named otherwise.
GROUPS = {"charged_as": "model", **dict.fromkeys(("rival", "hero", "baseline", "residents_of"), "system")}
HEADINGS = {"mode": "text", "prompt_tokens": "prompt"}
MACRO = "mean"  # the data set that stands for all of them
MIN_INPUTS = 5  # of an interval or an extent: fewer do not show one
# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the last, the normal distribution's.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12,
        2.11, 2.101, 2.093, 2.086)  # fmt: skip


def read(paths: Sequence[Path]) -> Frames:
    """Tables by source, which is the file's name up to the first dot; of rounds, with their directory.

    Raises:
        SpecterError: a file cannot be read in the format of its suffix.
    """
    return {f"{ROUNDS * (path.parent.name == 'rounds')}{path.name.partition('.')[0]}": _read(path) for path in paths}


def _read(path: Path) -> pd.DataFrame:
    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        if path.suffix == ".gz":
            return read_trace(path)
        return read_record(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecterError(f"{path} cannot be read: {error}", "restore it from git, or measure it again") from None


def read_record(path: Path) -> pd.DataFrame:
    """A list of objects (a row each), or what was measured: rows or cells, the summary as name and median, the GPU."""
    content = json.loads(path.read_text())
    if isinstance(content, list):
        return pd.DataFrame(content)
    rows = [{key: row[key] for key in row if key != "values"} for row in content.get("cells", content.get("table"))]
    rows += [{"name": name, "median": value} for name, value in content["summary"].items()]
    where = content["provenance"]  # of the record, or of each model
    gpus = [where["gpu"]] if "gpu" in where else [one["gpu"] for one in where.values()]
    return pd.DataFrame(rows).assign(gpu=" / ".join(dict.fromkeys(gpus)))


def read_trace(path: Path) -> pd.DataFrame:
    """Operations of a Chrome trace [lane, name, begin_ms, length_ms], in the order in which they begin."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans = sorted((e["ts"], e["dur"], e["cat"], e["name"]) for e in events if e["ph"] == "X")
    rows = [(lane, name, ts / 1e3, dur / 1e3) for ts, dur, lane, name in spans]
    return pd.DataFrame(rows, columns=["lane", "name", "begin_ms", "length_ms"])


def rows_of(frame: pd.DataFrame, **settings: object) -> pd.DataFrame:
    """The rows in which every named column has the given value."""
    for column, value in settings.items():
        frame = frame[frame[column] == value]
    return frame


def names(frame: pd.DataFrame, column: str) -> list[Any]:
    """The distinct values of a column in the order of figures and tables: of budgets, what gives Specter most is first;
    of lengths of prompts, 0 (the whole) is last."""
    if column == "budget" and {"system", "experts_per_layer"} <= set(frame):
        ours = rows_of(frame, system="specter").sort_values("experts_per_layer", ascending=False)
        if len(ours):
            return ours["budget"].unique().tolist()
    if column == "prompt_tokens":
        return sorted(set(frame[column]), key=lambda length: length or float("inf"))
    return in_order(GROUPS.get(column, column), frame[column])


def split(frame: pd.DataFrame, *columns: str) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """The values of these columns with their rows, for every combination that has rows; `charged_as` is named model."""
    if not columns:
        yield {}, frame
        return
    first, *others = columns
    for value in names(frame, first):
        for named, rows in split(rows_of(frame, **{first: value}), *others):
            yield {"model" if first == "charged_as" else first: value} | named, rows


def blocks(frame: pd.DataFrame, columns: Sequence[str], build: Callable[[pd.DataFrame], pd.DataFrame]) -> pd.DataFrame:
    """What `build` makes of the rows of every combination of `columns`, one below the other, with these columns."""
    made = [build(rows).assign(**named) for named, rows in split(frame, *columns)]
    return pd.concat([block for block in made if len(block)], ignore_index=True)


def summary(frame: pd.DataFrame, columns: Sequence[str], numbers: Callable[[pd.DataFrame], Row]) -> pd.DataFrame:
    """A row for every combination of `columns`: their values, and what `numbers` makes of its rows."""
    return pd.DataFrame([named | numbers(rows) for named, rows in split(frame, *columns)])


def table_rows(frame: pd.DataFrame, columns: Sequence[str], numbers: Callable[[pd.DataFrame], Row]) -> pd.DataFrame:
    """`summary` as a table shows it: with titles instead of names. `numbers` can replace a title."""
    rows: list[Row] = []
    for named, mine in split(frame, *columns):
        titles = {HEADINGS.get(key, key): title(GROUPS.get(key, key), value) for key, value in named.items()}
        rows.append({**titles, **numbers(mine)})
    return pd.DataFrame(rows)


def of_model(frames: Frames, model: str) -> Frames:
    """The rows of one model."""
    return {name: rows_of(frame, model=model) for name, frame in frames.items()}


def depths(frame: pd.DataFrame) -> str:
    """The K of the speculative runs, for a sentence."""
    return ", ".join(str(k) for k in sorted(frame.loc[frame["speculative"], "k"].unique()))


def spread_budgets(frame: pd.DataFrame) -> pd.DataFrame:
    """Repeats the rows of systems that ignore the budget under every budget and policy, so each has all systems."""
    cells = frame.loc[frame["uses_budget"], ["budget", "policy"]].drop_duplicates()
    fixed = frame[~frame["uses_budget"]]
    copies = [fixed.assign(**cell) for cell in cells.to_dict("records")]  # type: ignore[arg-type]
    return pd.concat([frame[frame["uses_budget"]], *copies], ignore_index=True)


def budget_title(frame: pd.DataFrame, budget: str) -> str:
    per_layer = rows_of(frame, budget=budget, system="specter")["experts_per_layer"].min()
    return f"{budget} ({per_layer:g} expert{'' if per_layer == 1 else 's'} per layer)"


def sampling_title(frame: pd.DataFrame, sampling: str) -> str:
    """A sampling with its temperature, from a table of runs or of probes."""
    if sampling == "greedy":
        return "greedy"
    temperatures = sorted(frame.loc[frame["sampling"] == sampling, "temperature"].unique())
    return f"{title('sampling', sampling)}, T = {' / '.join(f'{one:g}' for one in temperatures)}"


def with_panels(data: pd.DataFrame, frame: pd.DataFrame) -> pd.DataFrame:
    """Adds the titles of panels, for the budget and, if there is one, the sampling of each row, as `frame` has them."""
    panels = [budget_title(frame, budget) for budget in data["budget"]]
    if "sampling" in data:
        samplings = [sampling_title(frame, sampling) for sampling in data["sampling"]]
        panels = [", ".join(pair) for pair in zip(panels, samplings, strict=True)]
    return data.assign(panel=panels)


def with_macro(means: pd.DataFrame) -> pd.DataFrame:
    """Appends the macro average over data sets. `means`: one row per data set, which is the index."""
    average = means.mean().to_frame(MACRO).T
    return pd.concat([means, average])


def macro(frame: pd.DataFrame, column: str) -> float:
    """The mean over data sets of the means over inputs."""
    return float(frame.groupby("dataset")[column].mean().mean())


def macros(frame: pd.DataFrame) -> pd.Series:
    """`macro` of every column of numbers."""
    means: pd.Series = frame.groupby("dataset").mean(numeric_only=True).mean()
    return means


def dataset_title(name: str) -> str:
    return title("dataset", name)


def extent(frame: pd.DataFrame, keys: Sequence[str], column: str) -> pd.DataFrame:
    """[least, greatest] of `column` by `keys`; NaN for fewer than `MIN_INPUTS` inputs."""
    groups = frame.groupby(list(keys))
    found = pd.DataFrame({"least": groups[column].min(), "greatest": groups[column].max()})
    return found.where(groups["input"].nunique() >= MIN_INPUTS)


def half_width(frame: pd.DataFrame, column: str) -> float:
    """Half of the 95 % confidence interval of the macro average of `column`: inputs are drawn within data sets.

    NaN where a data set has fewer than `MIN_INPUTS` inputs.
    """
    of_inputs = frame.groupby(["dataset", "input"])[column].mean()  # repeats of an input are one draw
    groups = of_inputs.groupby("dataset").agg(["var", "count"])
    if groups["count"].min() < MIN_INPUTS:
        return float("nan")
    freedom = int((groups["count"] - 1).sum())
    error = float((groups["var"] / groups["count"]).sum() ** 0.5) / len(groups)
    return error * (T_95[freedom - 1] if freedom <= len(T_95) else 1.96)


def demand_lossless(frame: pd.DataFrame, source: str) -> pd.DataFrame:
    """The runs themselves. Raises SpecterError if one was not shown to have the tokens of plain decoding."""
    agrees = frame["agrees_with_plain"].astype("boolean").fillna(False)
    if not agrees.all():
        names = ", ".join(in_order("system", frame.loc[~agrees, "system"]))
        raise SpecterError(
            f"{source}: the tokens of {names} were not shown to equal plain decoding's",
            "find out why, and measure again",
        )
    return frame
