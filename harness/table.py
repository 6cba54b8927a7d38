"""A table with the words around it, as LaTeX, Markdown and CSV.

LaTeX and Markdown are rounded for reading, with the protocol below; CSV keeps six digits, with the protocol in columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from harness.frames import checkpoint_line, probe_line


@dataclass(frozen=True)
class Table:
    """Numbers with the words around them. `keys` are the leading columns that name a row."""

    title: str
    frame: pd.DataFrame
    keys: int
    notes: list[str]
    stated: dict[str, str]  # the protocol, as columns of the CSV


def stated(frame: pd.DataFrame) -> dict[str, str]:
    """The protocol in columns, for CSV."""
    if "clock" not in frame:
        return {"protocol": probe_line(frame)}
    return {
        "clock": " / ".join(sorted(frame["clock"].unique())),
        "hardware": " / ".join(sorted(frame["hardware"].unique())),
        "checkpoint": checkpoint_line(frame),
        "temperature": " / ".join(f"{value:g}" for value in sorted(frame["temperature"].unique())),
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
