"""Every number in README is a claim of claims.yaml, or is listed here as no result, with what it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.claims import Claim, load_claims

CLAIMS = load_claims()
NAMES = ("DeepSeek-V2-Lite", "DeepSeek-V2", "Qwen1.5-MoE", "Phi-3.5-MoE", "WikiText-2", "Apache-2.0", "ASPLOS 2027")
MASKED = re.compile("|".join([r"`[^`]*`", r"\[\d{4}\]\([^)]*\)", r"\]\([^)]*\)", *map(re.escape, NAMES)]))
NUMERAL = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?!\.?\w)")
NOT_RESULTS = {
    "versions": ["Python {3.11} or {3.12}, git", "(torch {2.11}, Triton {3.6};", "beside transformers {5};"],
    "times of a machine, in ARTIFACT too": [
        "| installation | {2}–{3} min |", "| {15} to {30} min, by machine;", "on one prompt | {1} to {4} min |",
        "| `make test` | {8} min; {14} beside other work |",
    ],
    "needs, checked before a run": [
        "on {2} cores of a server CPU", "needs more than {1} GB of memory", "names it), {128} GB of host memory",
        "the same with {40} GB, {128} GB of host memory, {220} GB of disk",
    ],
    "sizes of checkpoints, by arithmetic": [
        "({42} B parameters, {80} GB of experts", "(DeepSeek {28.8} GB, Qwen {24.9}, Phi {80.5})",
    ],
    "the machine's memory": ["**fit** a {40} GB GPU", "virtual A100 {40} GB |"],
    "settings": [
        "sampled text (T = {1})", "T = {1} the third", "how many {16}-bit", "shares the target's {16}-bit",
        "groups of {32}, {64}, {128} or the row", "widths other than {4} bits", "text is {65} k tokens",
        "distinct {4}-grams", "sampled text at T = {1};", "nor T = {1} matches",
    ],
    "numbers of texts, in the configuration": [
        "| DeepSeek | virtual A100 | {25} |", "| Qwen | virtual A100 | {6} |", "| Phi | virtual A100 | {6} |",
        "| DeepSeek | H200 | {4} |", "| DeepSeek, high | H200 | {1} |", "acceptance | H200 | {1} |",
        "| Qwen, high | H200 | {1} |", "| Phi, high (acceptance 84 %) | H200 | {1} |",
    ],
    "numbers of cells, claimed with those that are counted": ["in 11 of {12} cells"],
    "dates": ["archived in {2025}"],
}  # fmt: skip


def readme() -> str:
    """README without its blocks of code, in single spaces."""
    return " ".join(re.sub(r"```.*?```", "", Path("README.md").read_text(), flags=re.DOTALL).split())


def placed(passage: str, text: str) -> list[tuple[int, str]]:
    """Where the numerals in braces of a passage are in the text, which has it once."""
    plain = passage.replace("{", "").replace("}", "")
    assert text.count(plain) == 1, f"README has {passage!r} {text.count(plain)} times instead of once"
    start, found = text.index(plain), []
    for number, brace in enumerate(re.finditer(r"\{([^}]*)\}", passage)):
        found.append((start + brace.start() - 2 * number, brace.group(1)))
    assert found, f"{passage!r} has no numeral in braces"
    return found


def states(claim: Claim, numeral: str) -> bool:
    """Whether the claim has this number, rounded to as many digits."""
    bounds = [bound for one in claim.expected.values() for bound in (one.value, one.least, one.most)]
    values = [claim.published, *bounds, *claim.settings.get("within", [])]
    digits = len(numeral.partition(".")[2])
    return any(f"{value:.{digits}f}" == numeral.replace(",", "") for value in values if value is not None)


@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items() if claim.readme])
def test_readme_has_the_number_of_the_claim(name: str) -> None:
    text = readme()
    for passage in CLAIMS[name].readme:
        for _, numeral in placed(passage, text):
            assert states(CLAIMS[name], numeral), f"README says {numeral}, claims.yaml something else"


def test_every_number_in_readme_is_a_claim_or_no_result() -> None:
    text = readme()
    passages = [passage for claim in CLAIMS.values() for passage in claim.readme]
    passages += [passage for listed in NOT_RESULTS.values() for passage in listed]
    known = {at for passage in passages for at, _ in placed(passage, text)}
    masked = MASKED.sub(lambda match: " " * len(match.group()), text)
    others = [
        f"{match.group()} in …{text[max(0, match.start() - 40) : match.end() + 20]}…"
        for match in NUMERAL.finditer(masked)
        if match.start() not in known
    ]
    assert others == [], "add them to claims.yaml, or to NOT_RESULTS with what they are"


def test_numerals_are_found() -> None:
    assert NUMERAL.findall("H200, 1.05 to 1.19 (1.55), 94–99 % of 1,000; INT4 fp32 v2 4-grams") == [
        "1.05", "1.19", "1.55", "94", "99", "1,000", "4",
    ]  # fmt: skip
    assert placed("is {2.05} of {6}", "it is 2.05 of 6 cells") == [(6, "2.05"), (14, "6")]
