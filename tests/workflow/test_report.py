"""The page of a scale: complete, self-contained, and usable in a browser on a desk and on a phone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness import drill, report
from harness.plan import compose, text_key
from harness.plotting import charts, tables
from harness.plotting.tables import Table
from harness.recordings import write_manifest
from harness.studies.registry import FIGURES
from specter.config import RunConfig, to_yaml
from specter.recording import RecordedPass, Recording
from specter.results import run_id
from tests.workflow.browser import PROGRAM, Page, browser
from tests.workflow.test_study_data import frames_of

SIZES = (1280, 390)
TABLE = Table("Many columns", pd.DataFrame({f"column {n}": [n + 0.5, n + 1.5] for n in range(40)}), 1, ["A note."], {})
CLAIM = {
    "id": "S1", "status": "NOT COMPARABLE", "from": "scale smoke", "sentence": "a sentence", "measured": 2.05,
    "expected": "", "published": 1.5, "unit": "×", "shown": "figure speedup, table speedup, figure nowhere", "note": "",
}  # fmt: skip
RECORD = CLAIM | {"id": "h", "status": "PASS", "from": "device reference h200", "shown": "table device.wide",
                  "published": None}  # fmt: skip


def write_run(root: Path, system: str, overrides: list[str]) -> tuple[Path, Path]:
    """A run and its manifest, as the jobs write them. Returns their directory and the manifest."""
    config: RunConfig = compose([f"system={system}", "dataset=gsm8k", "max_new_tokens=3", *overrides])
    directory = root / "main" / "deepseek_v2_lite" / "gsm8k"
    run = directory / run_id(config)
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(config))
    (run / "env.json").write_text(json.dumps({"commit": "abc", "threads": "1"}))
    (run / "metrics.json").write_text(json.dumps({"tpot_ms": 12.3456789, "acceptance": None}))
    one = {"start_ms": 10.0, "draft_end_ms": 11.0, "end_ms": 15.12345, "stall_ms": 2.0}
    rounds = [dict.fromkeys(drill.ROUND, 0) | one, dict.fromkeys(drill.ROUND, 0) | {"start_ms": 15.0, "end_ms": 19.0}]
    (run / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rounds))
    routing = np.zeros((26, 2, 6), np.int16)
    recorded = RecordedPass(0, [5, 6], np.zeros((0, 26, 6), np.int16), routing, [7, 8])
    Recording([recorded], {}).save(root / "text.safetensors")
    manifest = root / "manifest.json"
    files = (root / "text.safetensors", root / "text.safetensors")
    write_manifest(manifest, {text_key(config).plain: files}, {})
    return directory, manifest


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with figures of both widths, a wide table, claims and a run."""
    root = tmp_path_factory.mktemp("page")
    figures, captions = [], []
    for name in ("speedup", "acceptance", "acceptance-qwen1_5_moe"):
        frames = frames_of(name.partition("-")[0])
        figures.append(root / "figures" / "smoke" / f"{name}.png")
        charts.save(FIGURES[name.partition("-")[0]].make(frames), [figures[-1]])
        captions.append(root / f"{name}.json")
        captions[-1].write_text(json.dumps(FIGURES[name.partition("-")[0]].caption(frames)))
    shown = [root / "speedup.json.d" / "speedup.json", root / "device" / "tables" / "h200_wide.json"]
    for path in shown:
        path.parent.mkdir(parents=True)
        tables.save(TABLE, [path])
    origins = {"scale smoke": "made here", "device reference h200": "recorded"}
    (root / "check.json").write_text(json.dumps({"claims": [CLAIM, RECORD], "origins": origins}))
    (root / "deepseek_v2_lite.json").write_text('{"identical": ["a", "b"]}')
    directory, manifest = write_run(root, "specter", ["k=2"])
    out = root / "report.html"
    report.main(
        report.Options(
            "smoke", out, root / "check.json", tuple(figures), tuple(captions), tuple(shown),
            (root / "deepseek_v2_lite.json",), (directory,), (manifest,),
        )
    )  # fmt: skip
    return out


def test_the_page_leads_with_what_was_found_and_has_everything(made: Path) -> None:
    page = made.read_text()
    finding = FIGURES["speedup"].caption(frames_of("speedup"))["finding"]
    assert finding and 0 < page.index(finding.replace("'", "&#39;")) < page.index('id="claims"') < page.index(
        'id="figures"'
    )
    assert "1 PASS, 0 FAIL, 1 NOT COMPARABLE, 0 NOT RUN" in page and "2 runs of DeepSeek-V2-Lite were repeated" in page
    for line in FIGURES["speedup"].caption(frames_of("speedup"))["footer"]:
        assert line.replace("'", "&#39;") in page
    assert "The same of Qwen1.5-MoE" in page and page.count("<img ") == 3
    assert page.count("<td>1.50</td>") >= 2 and page.count(">A note.</p>") == 2
    assert "abc" in page


def test_the_page_needs_no_other_file(made: Path) -> None:
    page = re.sub(r'(?<=src=")data:[^"]*', "", made.read_text())
    assert not re.search(r'(src|href)="(?!#|data:|")', page) and "@import" not in page and "url(" not in page


def test_links_lead_somewhere(made: Path) -> None:
    page = made.read_text()
    ids = re.findall(r'id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)
    assert '<a href="#table-h200_wide">' in page and '<a href="#figure-speedup">' in page and "figure nowhere" in page


def test_pictures_keep_their_size_on_the_page(made: Path) -> None:
    from PIL import Image

    path = made.parent / "figures" / "smoke" / "speedup.png"
    assert len(report.picture(path)["data"]) < path.stat().st_size
    assert not report.picture(path)["is_narrow"] and Image.open(path).width > report.WIDE_PIXELS
    assert report.picture(path.with_name("acceptance.png"))["is_narrow"]


@pytest.mark.parametrize("system", ["specter", "lru", "specter_plus"])
def test_the_command_repeats_the_run(system: str) -> None:
    config = compose([
        f"system={system}", "model=qwen1_5_moe", "dataset=prose", "budget.experts_per_layer=8", "budget.tier=custom",
        "input=1", "sampling=seeded", "prompt_tokens=0", "hardware=h200_pcie5", "k=4", "warmup_tokens=3",
    ])  # fmt: skip
    words = drill.command(config).split()
    assert words[:3] == [".venv/bin/python", "-m", "specter.run"]
    again = compose(words[3:])
    same: dict[str, Any] = {"results": config.results, "trace": config.trace, "budget": config.budget, "k": config.k}
    assert replace(again, **same) == config and again.trace and again.depth == config.depth
    assert again.budget.experts_per_layer == 8


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if not PROGRAM:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


OVERFLOWING = """
[...document.querySelectorAll("body *")].filter(one => {
  const reaches = one.getBoundingClientRect().right > document.documentElement.clientWidth + 1;
  return reaches && !one.closest(".wide, pre");
}).map(one => one.outerHTML.slice(0, 80))
"""
UNREACHABLE = """
[...document.querySelectorAll("table, img, svg")].filter(one => {
  const box = one.closest(".wide");
  return !box || getComputedStyle(box).overflowX !== "auto" || one.scrollWidth > box.scrollWidth;
}).length
"""
SMALL = "[...document.images].filter(one => one.clientWidth < 0.4 * one.naturalWidth || !one.naturalWidth).length"
DRILLED = """
new Promise(done => {
  const drill = document.getElementById("drill");
  drill.open = true;
  const look = () => document.querySelectorAll("#run details").length ? done(document.getElementById("run").textContent)
                                                                      : setTimeout(look, 20);
  look();
})
"""


@pytest.mark.browser
@pytest.mark.parametrize("width", SIZES)
def test_the_page_is_usable(page: Page, made: Path, width: int) -> None:
    page.open(made, width)
    text = page.value(DRILLED)
    for words in ("Specter, K = 2, DeepSeek-V2-Lite", "12.3457", "15.123", "9.0 ms from the first draft", "planner:"):
        assert words in text
    assert page.value("document.querySelectorAll('#run rect').length") == 6
    page.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert page.value(OVERFLOWING) == []
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    assert page.value("document.querySelectorAll('table').length") >= 7 and page.value(UNREACHABLE) == 0
    assert page.value("document.images.length") == 3 and page.value(SMALL) == 0
    assert page.errors == []


@pytest.mark.browser
def test_a_link_opens_what_encloses_its_target(page: Page, made: Path) -> None:
    page.open(made, SIZES[0])
    assert not page.value("document.getElementById('table-h200_wide').open")
    page.value("location.hash = '#table-h200_wide'; new Promise(done => setTimeout(done, 100))")
    assert page.value("document.getElementById('table-h200_wide').open")


@pytest.mark.browser
def test_an_error_of_the_page_is_seen(page: Page, tmp_path: Path) -> None:
    (tmp_path / "broken.html").write_text("<script>throw new Error('planted')</script><img src='missing.png'>")
    page.open(tmp_path / "broken.html", SIZES[0])
    assert any("planted" in error for error in page.errors) and any("missing.png" in error for error in page.errors)
    page.errors.clear()
