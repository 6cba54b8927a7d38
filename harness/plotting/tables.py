"""Tables and their files. LaTeX and Markdown are rounded for reading, with the notes below; CSV keeps six digits, with
the protocol in columns; JSON keeps what a page shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.plotting import notes
from harness.plotting.frames import Frames, of_model
from harness.plotting.titles import in_order, title
from specter.errors import SpecterError
from specter.files import write_whole


@dataclass(frozen=True)
class Table:
    """Numbers with a title and notes. `keys` are the leading columns that name a row."""

    title: str
    frame: pd.DataFrame
    keys: int
    notes: list[str]
    stated: dict[str, str]  # the protocol, as columns of the CSV


def run_table(heading: str, rows: pd.DataFrame, keys: int, what: str, frame: pd.DataFrame) -> Table:
    """A table of the runs in `frame`: below it `what` the columns are, provenance and caveats."""
    return Table(heading, rows, keys, [what, f"{notes.provenance(frame)}.", *notes.caveats(frame)], notes.stated(frame))


def by_model(build: Callable[[Frames], Table]) -> Callable[[Frames], Table]:
    """Builds the table of every model that all its frames have, one below the other; a note of some models names them.

    The table raises SpecterError if there is no such model.
    """

    def built(frames: Frames) -> Table:
        in_all = set.intersection(*(set(frame["model"]) for frame in frames.values()))
        models = in_order("model", in_all)
        if not models:
            raise SpecterError(f"no model is in all of {', '.join(frames)}", "give tidy tables of the same models")
        tables = {title("model", model): build(of_model(frames, model)) for model in models}
        first = next(iter(tables.values()))
        if len(tables) == 1:
            return first
        parts = [table.frame.assign(model=name)[["model", *table.frame]] for name, table in tables.items()]
        named: dict[str, list[str]] = {}  # models by note
        for name, table in tables.items():
            for note in table.notes:
                named.setdefault(note, []).append(name)
        notes = [note if len(names) == len(tables) else f"{', '.join(names)}: {note}" for note, names in named.items()]
        protocol = {
            key: " / ".join(dict.fromkeys(table.stated[key] for table in tables.values())) for key in first.stated
        }
        return Table(first.title, pd.concat(parts, ignore_index=True), first.keys + 1, notes, protocol)

    return built


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
    caption = rf"\caption{{{table.title}. {notes}}}"
    lines = [r"\begin{table}", r"\centering\scriptsize", caption, body.rstrip(), r"\end{table}", ""]
    return "\n".join(lines).replace("×", r"$\times$").replace("−", "--").replace("–", "--")


def to_csv(table: Table) -> str:
    text: str = table.frame.assign(**table.stated).to_csv(index=False, float_format="%.6g", lineterminator="\n")
    return text


def to_json(table: Table) -> str:
    """The table as a page shows it: every cell is text."""
    content = {
        "title": table.title,
        "num_keys": table.keys,
        "notes": table.notes,
        "header": [str(name) for name in table.frame],
        "rows": table.frame.map(shown).to_numpy().tolist(),
    }
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


FORMATS = {".tex": to_latex, ".md": to_markdown, ".csv": to_csv, ".json": to_json}


def save(table: Table, paths: Sequence[Path]) -> None:
    """Writes every path in the format of its suffix."""
    for path in paths:
        write_whole(path, FORMATS[path.suffix](table))
