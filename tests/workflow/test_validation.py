"""Every file of conf/, broken in every way, stops the workflow with one screen that names it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import scales, validation
from specter.errors import SpecterError

FILES = [f"{group}/{name}" for group in validation.GROUPS for name in validation.names(group)]


def _retyped(text: str) -> str:
    return "\n".join([line for line in text.splitlines() if not line.startswith("name:")] + ["name: [1]"])


BROKEN: dict[str, Callable[[str], str]] = {
    "syntax": lambda text: text + "\n: [\n",
    "key": lambda text: text + "\nno_such_key: 1\n",
    "empty": lambda text: "",
    "type": _retyped,
}


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    copy = tmp_path / "conf"
    shutil.copytree("conf", copy)
    for module in (scales, validation):
        monkeypatch.setattr(module, "CONF", copy)
    scales._load.cache_clear()
    yield copy
    scales._load.cache_clear()


def test_all_of_conf_is_sound() -> None:
    validation.check_all()


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("file", FILES)
def test_a_broken_file_is_named(conf: Path, file: str, fault: str) -> None:
    path = conf / f"{file}.yaml"
    text = path.read_text()
    group = file.partition("/")[0]
    if (fault == "type" and "name:" not in text) or (fault == "empty" and group == "execution"):
        pytest.skip("the file has no such line, or may be empty")
    path.write_text(BROKEN[fault](text))
    with pytest.raises(SpecterError, match=path.stem):
        validation.check_all()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("num_inputs: 0", "num_inputs has 0"),
        ("ks: [0, -4]", "ks has 0"),
        ("systems: []", "systems is empty"),
        ("systems: [spectre]", "names 'spectre'"),
        ("budgets: [middle]", "names 'middle'"),
        ("samplings: [hot]", "names 'hot'"),
        ("hardware: [abacus]", "names 'abacus'"),
        ("prompt_tokens: [-1]", "prompt_tokens has -1"),
    ],
)
def test_absurd_lists_of_an_experiment_are_refused(conf: Path, line: str, message: str) -> None:
    path = conf / "experiment" / "main.yaml"
    key = line.partition(":")[0]
    lines, kept = path.read_text().splitlines(), []
    skipping = False
    for one in lines:
        skipping = one.startswith(f"{key}:") or (skipping and one.startswith((" ", "-")))
        kept += [] if skipping else [one]
    path.write_text("\n".join([*kept, line]) + "\n")
    with pytest.raises(SpecterError, match=message):
        validation.check_all()


@pytest.mark.parametrize(("line", "message"), [("max_k: 0", "max_k has 0"), ("datasets: []", "datasets is empty")])
def test_absurd_values_of_a_scale_are_refused(conf: Path, line: str, message: str) -> None:
    path = conf / "scale" / "smoke.yaml"
    key = line.partition(":")[0]
    kept = [one for one in path.read_text().splitlines() if not one.startswith(f"{key}:")]
    path.write_text("\n".join([*kept, line]) + "\n")
    with pytest.raises(SpecterError, match=message):
        validation.check_all()


@pytest.mark.parametrize("arguments", [["all"], ["-n", "all"], ["-n", "figures/smoke/tpot.pdf"]])
def test_snakemake_stops_with_one_screen(tmp_path: Path, arguments: list[str]) -> None:
    for name in ("conf", "harness", "specter", "baselines", "rules", "captions", "profiles", "data"):
        (tmp_path / name).symlink_to(Path(name).resolve())
    for name in ("Snakefile", "claims.yaml", "pyproject.toml", "environment.yml"):
        shutil.copy(name, tmp_path / name)
    (tmp_path / "conf").unlink()
    shutil.copytree("conf", tmp_path / "conf")
    with (tmp_path / "conf" / "experiment" / "hardware.yaml").open("a") as file:
        file.write("\nno_such_key: 1\n")
    command = [sys.executable, "-m", "snakemake", "--cores", "1", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    shown = done.stdout + done.stderr
    assert done.returncode != 0 and "no_such_key" in shown
    assert len(shown.splitlines()) < 30
