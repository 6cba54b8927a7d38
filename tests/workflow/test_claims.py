"""claims.yaml: complete, typed, in line with README, and a broken claim fails the check."""

from __future__ import annotations

import fnmatch
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness import claims, scales
from harness.catalogue import TABLES, of_device, tables
from harness.claims import FAIL, NOT_COMPARABLE, NOT_RUN, PASS, Claim, Expected, judge, load_claims
from harness.measures import MEASURES, Numbers, study
from harness.plotting.frames import read
from harness.studies import published
from specter.errors import SpecterError
from tests.workflow.conftest import ROOT, Checkout, environment
from tests.workflow.made_up import runs

CLAIMS = load_claims()
PUBLISHED_IDS = {
    "S1",
    "S2",
    "S3",
    "A1",
    "A2",
    "A3",
    "F1",
    "F2",
    "F3",
    "F4",
    "U1",
    "U2",
    "K1",
    "Q1",
    "Q2",
    "L1",
    "P1",
    "P2",
}
LOSSLESS = Claim("s", of="any", hardware="none", minutes=0, sources=["main"], measure="not_lossless",
                 settings={"tables": ["main"]}, expected={"laptop": Expected(0)})  # fmt: skip


def tpot(**settings: Any) -> Claim:
    """A claim about LRU's TPOT on stand-ins."""
    where = {"system": "lru", "input": 0}
    return replace(LOSSLESS, of="standin", measure="source",
                   settings={"table": "main", "column": "tpot_ms", "where": where}, **settings)  # fmt: skip


# -- the file --------------------------------------------------------------------------------------


def test_every_published_claim_is_there() -> None:
    stated = {name.partition(".")[0] for name, claim in CLAIMS.items() if name.partition(".")[0] in PUBLISHED_IDS}
    assert stated == PUBLISHED_IDS
    values = {claim.published for claim in CLAIMS.values()}
    assert {published.SPEEDUP_MEAN, published.SPEEDUP_MAX, published.EXPECTED_RUN, published.LARGEST_DEPTH} <= values
    for by_method in published.FIDELITY.values():
        assert {round(value * 100, 2) for value in by_method.values()} <= values
    assert {*published.UNION_GROWTH.values(), *published.DEPTH.values()} <= values


def test_every_figure_table_and_experiment_of_a_claim_exists() -> None:
    known = {*(path.stem for path in Path("conf/experiment").glob("*.yaml")), *scales.PROBES}
    files = {path.name.partition(".")[0] for path in Path("data/reference").glob("*/*")}
    for name, claim in CLAIMS.items():
        for shown in claim.shown:
            assert study(shown).about or TABLES[shown.partition(" ")[2]], name
        if claim.record:
            assert claim.record in {path.name for path in Path("data/reference").iterdir()}, name
            assert all(fnmatch.filter(files, one) for one in claim.reads), name
        else:
            assert set(claim.reads) <= known, name
            assert set(claim.expected) <= {path.stem for path in Path("conf/scale").glob("*.yaml")}, name
            for scale in claim.expected:
                assert all(scales.load_scale(scale).models_of(one) for one in claim.reads), (name, scale)
        assert claim.minutes or not claim.expected, name


def test_a_claim_of_real_checkpoints_is_never_expected_of_stand_ins() -> None:
    for name, claim in CLAIMS.items():
        if claim.of == "hub":
            assert all(scales.load_scale(scale).checkpoint_kind == "hub" for scale in claim.expected), name


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("of: elsewhere", "of is 'elsewhere'"),
        ("minutes: soon", "minutes"),
        ("surprise: 1", "surprise"),
        ("shown: [figure nowhere]", "nowhere"),
        ("shown: [tpot]", "'tpot' is neither"),
        ("measure: guess", "guess"),
        ("settings: {column: x}", "where"),
        ("expected: {laptop: {value: many}}", "value"),
        ("{", "cannot be read"),
    ],
)  # fmt: skip
def test_a_wrong_claim_is_named(tmp_path: Path, change: str, named: str) -> None:
    base = {"sentence": "s", "of": "any", "hardware": "none", "minutes": "1", "shown": "[figure tpot]",
            "measure": "shown", "settings": "{column: tpot_ms, where: {}}"}  # fmt: skip
    path = tmp_path / "claims.yaml"
    key, _, value = change.partition(": ")
    lines = [f"    {name}: {text}" for name, text in (base | {key: value}).items()]
    path.write_text("\n".join(["claims:", "  X:", *lines]) + ("" if value else "\n{"))
    with pytest.raises(SpecterError, match=re.escape(named)):
        load_claims(path)


# -- verdicts --------------------------------------------------------------------------------------


def test_verdicts() -> None:
    frame = runs(("lru",), input=(0, 1)).assign(agrees_with_plain=True)
    value = float(frame.loc[frame["input"] == 0, "tpot_ms"].iloc[0])
    numbers = Numbers({"main": frame})

    def status(claim: Claim, at: str = "laptop", kind: str = "standin") -> str:
        return judge(claim, at, kind, numbers).status

    near = {"laptop": Expected(value + 0.5, tolerance=1)}
    assert status(tpot(expected=near)) == PASS
    assert status(tpot(expected={"laptop": Expected(value + 2, tolerance=1)})) == FAIL
    assert status(tpot(expected={"laptop": Expected(least=value + 1)})) == FAIL
    assert status(tpot(expected={"laptop": Expected(most=value + 1)})) == PASS
    assert status(replace(tpot(expected=near), of="hub")) == NOT_COMPARABLE
    # A number that another scale produced never passes.
    assert status(tpot(expected=near), at="smoke") == NOT_RUN
    assert judge(replace(tpot(expected=near), sources=["k_sweep"]), "laptop", "standin", numbers).status == NOT_RUN
    # What is expected here and was not measured fails.
    absent = {"table": "main", "column": "tpot_ms", "where": {"system": "specter"}}
    assert status(replace(tpot(expected=near), settings=absent)) == FAIL
    assert status(replace(LOSSLESS, measure="", note="why", expected=near)) == NOT_RUN


def test_measures_refuse_what_is_not_one_number() -> None:
    numbers = Numbers({"main": runs(("lru", "specter"), input=(0, 1))})
    with pytest.raises(SpecterError, match="4 rows instead of one"):
        MEASURES["source"](numbers, [], table="main", column="tpot_ms", where={})
    with pytest.raises(SpecterError, match="no column 'sistem'"):
        MEASURES["source"](numbers, [], table="main", column="tpot_ms", where={"sistem": "lru"})
    frame = numbers.frames["main"]
    means = frame.groupby("system")["tpot_ms"].mean()
    ratio = MEASURES["source"](numbers, [], table="main", column="tpot_ms", take="mean", where={"system": "lru"},
                               over={"system": "specter"}, factor=100)  # fmt: skip
    assert ratio == pytest.approx(100 * means["lru"] / means["specter"])
    share = MEASURES["source"](numbers, [], table="main", column="input", take="mean", within=[1, 2], where={})
    assert share == 0.5


def test_a_run_without_proof_counts_as_not_lossless() -> None:
    frame = runs(("lru", "specter", "resident"), input=(0, 1)).assign(agrees_with_plain=True)
    frame["agrees_with_plain"] = frame["agrees_with_plain"].astype(object)
    for lost, found in ((None, 1), (False, 1), (True, 0)):
        frame.loc[0, "agrees_with_plain"] = lost
        assert MEASURES["not_lossless"](Numbers({"main": frame}), [], tables=["main"]) == found


def test_every_claim_about_records_holds() -> None:
    """The whole of data/reference/, and nothing at all of a scale."""
    paths = claims.record_files(CLAIMS)
    machines = {path.parent.name for path in paths}
    records = {name: read([path for path in paths if path.parent.name == name]) for name in machines}
    rows = {row["id"]: row for row in claims.check(CLAIMS, "smoke", "standin", {}, records)}
    of_records = {name: row for name, row in rows.items() if CLAIMS[name].record}
    for name, row in of_records.items():
        claim = CLAIMS[name]
        expected = NOT_RUN if not claim.measure else NOT_COMPARABLE if claim.of == "hub" else PASS
        assert row["status"] == expected, row
        assert row["from"] == f"device reference {claim.record}" and math.isnan(row["measured"]) == (not claim.measure)
    assert sum(row["status"] == PASS for row in of_records.values()) >= 15
    assert {row["status"] for name, row in rows.items() if name not in of_records} == {NOT_RUN}


# -- the workflow ----------------------------------------------------------------------------------


def test_a_claim_broken_on_purpose_fails_the_check(checkout: Checkout) -> None:
    """Through Snakemake, with a tidy table that is there and a claim that is right, then wrong."""
    frame = runs(("lru", "specter")).assign(agrees_with_plain=True)
    tidy = checkout.root / "results/smoke/tidy/main.parquet"
    tidy.parent.mkdir(parents=True)
    frame.to_parquet(tidy)
    claim: dict[str, Any] = {
        "sentence": "no run differs", "of": "any", "hardware": "none", "minutes": 1, "sources": ["main"],
        "measure": "not_lossless", "settings": {"tables": ["main"]},
    }  # fmt: skip
    file = checkout.root / "claims.yaml"
    file.unlink()
    for value, status, code in ((0, PASS, 0), (3, FAIL, 1)):
        claim["expected"] = {"smoke": {"value": value}}
        file.write_text(json.dumps({"claims": {"X": claim}}))
        text = checkout.snakemake(
            "--config", "scale=smoke", "--rerun-triggers", "mtime", "--allowed-rules", "claims", "check", "--", "check",
            expect=code,
        )  # fmt: skip
        page = (checkout.root / "results/smoke/check.md").read_text()
        assert status in page and "Produced at this scale" in page
        row = json.loads((checkout.root / "results/smoke/check.json").read_text())["claims"][0]
        assert (row["status"], row["measured"], row["from"]) == (status, 0, "scale smoke")
    assert "1 claims fail: X (0.0 instead of 3 ± 0)" in text and "results/smoke/check.md" in text


def test_the_table_of_claims_shows_published_beside_measured() -> None:
    some = {name: CLAIMS[name] for name in ("L1", "P1.full", "lossless.h200")}
    rows = claims.check(some, "laptop", "standin", {"main": runs(("lru",)).assign(agrees_with_plain=True)}, {})
    checked = pd.DataFrame(rows).assign(checkpoint_kind="standin")
    made = TABLES["claims"].build({"claims": checked})
    assert made.frame["id"].tolist() == ["L1", "P1.full"]
    row = made.frame.set_index("id").loc["L1"]
    assert (row["published"], row["measured"], row["verdict"]) == (0, 0, PASS)
    assert "claims" in tables("laptop") and "claims" in tables("smoke") and "claims" not in of_device(TABLES)


def test_a_damaged_claims_file_stops_the_workflow(checkout: Checkout) -> None:
    (checkout.root / "claims.yaml").unlink()
    (checkout.root / "claims.yaml").write_text("claims: {X: {sentence: 1, surprise: any}}")
    text = checkout.snakemake("-n", "--", "all", expect=1)
    assert "surprise" in text and "claims.yaml" in text and "Traceback" not in text


def test_the_verdicts_of_a_job_end_it() -> None:
    done = subprocess.run([sys.executable, "-m", "harness.jobs.verdict", "--help"], cwd=ROOT, env=environment(),
                          stdout=subprocess.PIPE, text=True, check=True)  # fmt: skip
    assert "checked=PATH" in done.stdout
