"""What a call of Snakemake would run, and would not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from harness.scales import load_scale
from specter.sources import imported_files
from tests.workflow.conftest import ROOT, Checkout

NUM_RUN = len(load_scale("smoke").experiments)  # on one model and data set each


def test_lint_is_clean(checkout: Checkout) -> None:
    assert "good condition" in checkout.snakemake("--lint")


def test_every_scale_can_be_planned(checkout: Checkout) -> None:
    scales = [path.stem for path in sorted(Path("conf/scale").glob("*.yaml"))]
    text = checkout.snakemake("-n", "--", *[f"results/{scale}/report.html" for scale in scales])
    for scale in scales:
        assert f"results/{scale}/report.html" in text
    assert text.index("Scale laptop:") < text.index("Job stats:")


def test_a_scale_that_cannot_run_here_is_refused_before_any_work(checkout: Checkout) -> None:
    text = checkout.snakemake("results/paper/report.html", expect=1)
    assert "scale paper" in text and "needs a CUDA GPU" in text and "or use the default scale" in text
    assert not list(checkout.root.glob("results/quantized/*/gptq"))


def test_an_unknown_scale_is_named_with_the_known_ones(checkout: Checkout) -> None:
    text = checkout.snakemake("-n", "--config", "scale=desktop", expect=1)
    assert "scale 'desktop' is unknown" in text and "laptop, paper, smoke, standin" in text


def test_only_what_changed_runs_again(checkout: Checkout) -> None:
    checkout.pretend_to_run("smoke")
    assert checkout.pending("smoke") == {}

    for path in checkout.root.glob("conf/**/*.yaml"):
        path.write_text(f"# a comment\n{path.read_text()}")
    assert checkout.pending("smoke") == {}

    path = checkout.root / "conf/experiment/budget_sweep.yaml"
    experiment = yaml.safe_load(path.read_text())
    experiment["budgets"].remove(8)
    path.write_text(yaml.safe_dump(experiment))
    expected = {"replay": 1, "tidy": 1, "figure": 1, "table": 1, "page": 1, "smoke": 1}
    assert checkout.pending("smoke") == expected

    # One more K is recorded, but only the experiment that lists it is replayed.
    checkout.pretend_to_run("smoke")
    path = checkout.root / "conf/experiment/k_sweep.yaml"
    experiment = yaml.safe_load(path.read_text())
    experiment["ks"] = [1, 2, 3, 4]
    path.write_text(yaml.safe_dump(experiment))
    assert checkout.pending("smoke") == {
        "record": 1, **expected, "table": 4, "claims": 1, "tidy_probe": 1,
    }  # fmt: skip


def test_code_is_stale_where_it_runs_and_comments_are_not_code(checkout: Checkout) -> None:
    checkout.own_code()
    checkout.pretend_to_run("smoke")
    for name in ("specter/experts/cache.py", "specter/quantize/gptq.py", "harness/plan.py", "harness/jobs/tidy.py"):
        path = checkout.root / name
        path.write_text(f"{path.read_text()}\n\n# A comment.\n".replace('"""', '"""More words. ', 1))
    assert checkout.pending("smoke") == {}

    # A module that jobs import through others: jobs that run an engine are stale, the others are not.
    path = checkout.root / "specter/experts/cache.py"
    text = path.read_text()
    path.write_text(f"{text}\nCHANGED = True\n")
    stale = checkout.pending("smoke")
    assert (stale["record"], stale["replay"], stale["decompose"], stale["live_check"]) == (NUM_RUN, NUM_RUN, 1, 1)
    assert not {"preflight", "quantize", "residual"} & set(stale)
    path.write_text(text)

    path = checkout.root / "harness/jobs/tidy.py"
    path.write_text(f"{path.read_text()}\nCHANGED = True\n")
    stale = checkout.pending("smoke")
    assert (stale["tidy"], stale["tidy_probe"]) == (NUM_RUN, 6)
    assert not {"preflight", "quantize", "residual", "record", "replay", "probe", "fidelity"} & set(stale)


@pytest.mark.parametrize(
    ("job", "imports", "does_not"),
    [
        (
            "record",
            ["specter/models/cpu/decoder.py", "specter/engine.py", "baselines/specmoeoff.py"],
            ["cuda", "studies"],
        ),
        ("replay", ["specter/experts/policies/retain.py", "baselines/on_demand.py"], ["cuda", "cpu", "studies"]),
        ("measure", ["specter/models/cuda/draft.py", "baselines/specmoeoff.py"], ["studies", "bench"]),
        ("tidy", ["specter/config.py"], ["engine.py", "studies", "cuda", "cpu"]),
    ],
)
def test_the_code_of_a_job_is_what_it_imports(job: str, imports: list[str], does_not: list[str]) -> None:
    rule = Path("rules/runs.smk").read_text()
    call = re.search(rf'code_digest\("harness.jobs.{job}"(, "baselines")?\)', rule)
    assert call is not None
    modules = [f"harness.jobs.{job}", *(["baselines"] if call.group(1) else [])]
    files = {path.relative_to(ROOT).as_posix() for path in imported_files(*modules)}
    assert set(imports) <= files
    parts = {
        part for file in files if not file.startswith("baselines/transformers_offload") for part in file.split("/")
    }
    assert not parts & set(does_not)


def test_every_module_in_a_key_exists() -> None:
    paths = [path for pattern in ("rules/*.smk", "harness/**/*.py") for path in Path().glob(pattern)]
    calls = [call for path in paths for call in re.findall(r"code_digest\(([^()]*)\)", path.read_text())]
    named = {name for call in calls for name in re.findall(r'"([a-z_0-9.]+)"', call)}
    assert {"harness.jobs.record", "specter.models.cpu.live", "specter.models.cuda.model", "baselines"} <= named
    for name in named:
        path = ROOT.joinpath(*name.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


def test_the_log_that_a_failure_names_has_its_error(checkout: Checkout) -> None:
    text = checkout.snakemake("results/paper/preflight.json", expect=1)
    log = (checkout.root / "results/paper/logs/preflight.log").read_text()
    assert "error: " in log and "needs a CUDA GPU" in log
    assert "results/paper/logs/preflight.log" in text and "needs a CUDA GPU" in text
