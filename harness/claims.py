"""claims.yaml: what the paper and this repository state, and the verdict on each statement at a scale.

A claim is checked on the tidy tables that a scale has produced, or on records of a machine in data/reference/. A
number from elsewhere never passes.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from harness.measures import MEASURES, Numbers, study
from harness.plotting.frames import Frames
from specter.errors import SpecterError
from specter.typed import build_typed

FILE = Path("claims.yaml")
RECORDS = Path("data/reference")
PASS, FAIL, NOT_RUN, NOT_COMPARABLE = "PASS", "FAIL", "NOT RUN", "NOT COMPARABLE"
OF = ("hub", "standin", "any")
RECORDED_KIND = "standin"  # the checkpoints of the records are inflated stand-ins


@dataclass
class Expected:
    """What a measured value has to be: `value` within `tolerance`, or not beyond a bound."""

    value: float | None = None
    tolerance: float = 0.0
    least: float | None = None
    most: float | None = None

    def allows(self, measured: float) -> bool:
        near = self.value is None or abs(measured - self.value) <= self.tolerance
        return near and (self.least is None or measured >= self.least) and (self.most is None or measured <= self.most)

    def __str__(self) -> str:
        bounds = {"≥": self.least, "≤": self.most}
        parts = [] if self.value is None else [f"{self.value:g} ± {self.tolerance:g}"]
        return ", ".join([*parts, *(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)])


@dataclass
class Claim:
    """One statement with one number.

    Attributes:
        of: the checkpoints that it is about: `hub`, `standin`, or `any`.
        shown: the figures and tables that show it, as `figure tpot`; the measure `shown` reads the first.
        sources: tidy tables, or files of a record, that the measure reads instead of those of the first in `shown`.
        measure: its name in `harness.measures.MEASURES`, with its `settings`; none: nothing here measures it, and
            `note` says why.
        expected: by scale, or by machine in data/reference/.
        record: the machine in data/reference/ whose records it is checked on, instead of the scale's tables.
        minutes: to produce the number at scale laptop, or on a GPU where `hardware` names one.
        readme: passages of README.md that state it, its numerals in braces.
    """

    sentence: str
    of: str
    hardware: str
    minutes: int
    shown: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    measure: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    unit: str = ""
    published: float | None = None
    expected: dict[str, Expected] = field(default_factory=dict)
    record: str = ""
    note: str = ""
    readme: list[str] = field(default_factory=list)

    @property
    def reads(self) -> tuple[str, ...]:
        """The sources that the measure reads; none without a measure."""
        if not self.measure:
            return ()
        return tuple(self.sources) or (study(self.shown[0]).sources if self.shown else ())


@dataclass
class _File:
    claims: dict[str, Claim]


def load_claims(path: Path = FILE) -> dict[str, Claim]:
    """All claims by id.

    Raises:
        SpecterError: not YAML; a wrong key, type, checkpoint kind, figure, table or measure, by the claim's id.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise SpecterError(f"{path} cannot be read: {error}", "repair the YAML") from None
    claims = build_typed(_File, values, f"{path}: ").claims
    for name, claim in claims.items():
        _check(f"{path}: {name}", claim)
    return claims


def _check(where: str, claim: Claim) -> None:
    if claim.of not in OF:
        raise SpecterError(f"{where}: of is {claim.of!r}", f"use one of: {', '.join(OF)}")
    for shown in claim.shown:
        study(shown)
    if not claim.measure:
        if not claim.note:
            raise SpecterError(f"{where}: has neither a measure nor a note", "say in `note` why nothing measures it")
        return
    try:
        inspect.signature(MEASURES[claim.measure]).bind(Numbers({}), claim.shown, **claim.settings)
    except TypeError as error:
        raise SpecterError(f"{where}: settings of {claim.measure}: {error}", "see harness/measures.py") from None
    if not claim.reads:
        raise SpecterError(f"{where}: reads no table", "name a figure or table in `shown`, or tables in `sources`")


def tidy_sources(claims: dict[str, Claim]) -> list[str]:
    """The tidy tables that claims of a scale read."""
    return sorted({source for claim in claims.values() if not claim.record for source in claim.reads})


def record_files(claims: dict[str, Claim]) -> list[Path]:
    """The files of records that claims read, as far as they are there."""
    found = {path for c in claims.values() if c.record for s in c.reads for path in (RECORDS / c.record).glob(f"{s}.*")}
    return sorted(found)


@dataclass(frozen=True)
class Verdict:
    """What was found of one claim. `measured` is NaN where nothing was."""

    status: str
    measured: float
    note: str


def judge(claim: Claim, at: str, kind: str, numbers: Numbers) -> Verdict:
    """The verdict on a claim.

    Args:
        at: the scale, or the machine of the records, that `numbers` are from.
        kind: of its checkpoints.
    """
    expected = claim.expected.get(at)
    if not claim.measure:
        return Verdict(NOT_RUN, math.nan, claim.note)
    missing = [one for one in claim.reads if not any(fnmatch(name, one) for name in numbers.frames)]
    if missing:
        return Verdict(NOT_RUN, math.nan, f"no table of {', '.join(missing)} here")
    if claim.of not in ("any", kind):
        measured = MEASURES[claim.measure](numbers, claim.shown, **claim.settings)
        return Verdict(NOT_RUN if math.isnan(measured) else NOT_COMPARABLE, measured, claim.note)
    if expected is None:
        return Verdict(NOT_RUN, math.nan, f"stated for {' and '.join(claim.expected) or 'no scale'} only")
    measured = MEASURES[claim.measure](numbers, claim.shown, **claim.settings)
    return Verdict(PASS if expected.allows(measured) else FAIL, measured, claim.note)


def check(
    claims: dict[str, Claim], scale: str, kind: str, tables: Frames, records: dict[str, Frames]
) -> list[dict[str, Any]]:
    """A row per claim: [id, status, from, measured, expected, published, ...]. `records`: by machine."""
    of_scale, of_records = Numbers(tables), {machine: Numbers(frames) for machine, frames in records.items()}
    rows = []
    for name, claim in claims.items():
        at = claim.record or scale
        numbers = of_records.get(claim.record, Numbers({})) if claim.record else of_scale
        verdict = judge(claim, at, RECORDED_KIND if claim.record else kind, numbers)
        expected = claim.expected.get(at)
        rows.append(
            {
                "id": name,
                "status": verdict.status,
                "from": f"device reference {claim.record}" if claim.record else f"scale {scale}",
                "sentence": claim.sentence,
                "measured": verdict.measured,
                "expected": "" if expected is None else str(expected),
                "published": math.nan if claim.published is None else claim.published,
                "unit": claim.unit,
                "of": claim.of,
                "shown": ", ".join(claim.shown),
                "reads": ", ".join(claim.reads),
                "minutes": claim.minutes,
                "hardware": claim.hardware,
                "note": verdict.note,
            }
        )
    return rows
