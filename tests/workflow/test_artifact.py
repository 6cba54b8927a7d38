"""ARTIFACT.md is short, in the order of the ASPLOS appendix, and leads from every claim to a figure or table."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

from harness import catalogue
from harness.catalogue import FIGURES, TABLES
from harness.claims import load_claims

TEXT = Path("ARTIFACT.md").read_text()
LINES_OF_TWO_PAGES = 120
ORDER = ["Abstract", "Check-list", "Description", "Installation and basic test", "Experiment workflow",
         "Evaluation and expected results", "Customisation", "Notes"]  # fmt: skip
EXPERIMENTS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| E")
]


def claimed(cell: str) -> list[str]:
    """The patterns of claim ids in a cell: "A1–A3" is A1, A2, A3, and "A1" has "A1.depth" too."""
    found: list[str] = []
    for word in cell.replace("\\", "").split(", "):
        first, dash, last = word.partition("–")
        numbers = range(int(first[1:]), int(last[1:]) + 1) if dash and last else ()
        found += [f"{first[0]}{number}" for number in numbers] or [word]
    return [pattern for name in found for pattern in (name, f"{name}.*")]


def test_it_has_the_order_of_the_appendix_on_two_pages() -> None:
    assert re.findall(r"^## A\.\d+ (.*)$", TEXT, re.MULTILINE) == ORDER
    assert len(TEXT.splitlines()) <= LINES_OF_TWO_PAGES


def test_every_claim_of_the_paper_is_of_an_experiment() -> None:
    """The report links all claims, those of this repository too, to what shows them."""
    patterns = [pattern for row in EXPERIMENTS for pattern in claimed(row[1])]
    papers = [name for name, claim in load_claims().items() if claim.published is not None]
    assert len(papers) > 20
    assert [name for name in papers if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert claimed("A1–A3, lru.\\*") == ["A1", "A1.*", "A2", "A2.*", "A3", "A3.*", "lru.*", "lru.*.*"]


def test_every_experiment_has_results_that_are_made_and_its_minutes() -> None:
    known = {"laptop": (catalogue.figures("laptop"), catalogue.tables("laptop"))}
    names = [
        [f"{machine}_{name}" for machine in ("h200", "virtual") for name in catalogue.of_device(studies)]
        for studies in (FIGURES, TABLES)
    ]
    known["device"] = (names[0], names[1])
    for row in EXPERIMENTS:
        directory = ""
        paths = re.findall(r"`([^`]+)\.(png|tex)`", row[2])
        assert paths and all(cell.isdigit() for cell in row[3:]), row
        for path, kind in paths:
            *parents, name = path.split("/")
            directory = parents[-1] if parents else directory
            assert name in known[directory][kind == "tex"], path
