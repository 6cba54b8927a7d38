"""Every command of README and ARTIFACT.md is run by CI, or its options are read here.

`pytest -m commands` runs those that need neither a GPU nor the network, in a copy of the repository; CI calls it.
"""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import kernels
from harness.jobs import fidelity
from harness.plan import compose
from specter.arguments import parse_arguments
from specter.cli.app import app
from specter.quantize import cli
from tests.workflow.conftest import ROOT, environment

PYTHON, SNAKEMAKE = ".venv/bin/python -m ", ".venv/bin/snakemake "
QUANTIZE = f"{PYTHON}specter.quantize checkpoint="
STANDIN = f"{QUANTIZE}data/standins/deepseek_v2_lite "
CI = {"make test", "make smoke"}  # .ci/run has them as they are
RUN = [  # a later one reads what an earlier one made
    f"{STANDIN}out=results/quantized/deepseek_v2_lite/gptq",
    f"{PYTHON}specter.run",
    f"{PYTHON}specter.run budget=low k=8 trace=true",
    f"{PYTHON}specter.run system=specter dataset=gsm8k budget=high k=16",
    f"{PYTHON}specter.run system=lru dataset=humaneval input=2",
    f"{PYTHON}specter.run hardware=rtx4090_ddr4 budget.experts_per_layer=10.5 sampling=seeded sampling.temperature=0.7",
    f'{PYTHON}specter.run prompt="The ferry left the harbour" max_new_tokens=64',
    f"{PYTHON}specter.run -m system=specter,lru,specmoeoff budget=high budget.policy=published",
    "less docs/structure.md specter/engine.py",
    f"{STANDIN}out=my-draft",
    f"{PYTHON}harness.jobs.fidelity model=deepseek_v2_lite methods=gptq,q4_k texts=datasets datasets=gsm8k,prose",
    f"{PYTHON}specter.quantize.residual encode checkpoint=data/standins/deepseek_v2_lite quantized=my-draft "
    "out=my-residual",
    f"{PYTHON}specter.quantize.residual rebuild quantized=my-draft residual=my-residual out=my-experts",
    f"{PYTHON}specter doctor",
    f"{PYTHON}specter plan deepseek_v2_lite --hardware rtx4090_ddr4",
    f"{PYTHON}specter quantize deepseek_v2_lite",
    f'{PYTHON}specter generate deepseek_v2_lite "The ferry left the harbour"',
    f"{SNAKEMAKE}-n",
]
PLANNED = [  # longer than CI may take, or an installation: run with -n
    "make reproduce", "make env",
    "make env TORCH_INDEX=https://download.pytorch.org/whl/cpu",
    "make env TORCH_INDEX=https://download.pytorch.org/whl/cu130",
    f"{SNAKEMAKE}--cores 1 all", f"{SNAKEMAKE}--cores 1 --config scale=smoke -- all",
    f"{SNAKEMAKE}--cores 1 --config scale=standin -- all", f"{SNAKEMAKE}--cores 1 check",
    f"{SNAKEMAKE}--cores 1 figures/laptop/k_sweep.pdf", f"{SNAKEMAKE}--cores 1 figures/laptop/speedup.png",
]  # fmt: skip
READ = [  # need a GPU or the network: only their options are read
    f"{QUANTIZE}Qwen/Qwen1.5-MoE-A2.7B-Chat out=results/quantized/qwen device=cuda",
    f"{QUANTIZE}deepseek-ai/DeepSeek-V2-Lite out=my-draft device=cuda calibration=my-text.txt",
    f"{PYTHON}specter.run model=qwen1_5_moe_hub model.checkpoint=Qwen/Qwen1.5-MoE-A2.7B-Chat "
    "model.tokenizer=Qwen/Qwen1.5-MoE-A2.7B-Chat/tokenizer.json model.quantized=results/quantized/qwen",
    f"{PYTHON}specter.run clock=device system=specter_deadline hardware=h200_pcie5 budget=low trace=true",
    f"{PYTHON}specter.run clock=device system=mixtral_offloading hardware=h200_pcie5",
    f"{PYTHON}specter.run clock=device system=specter_deadline hardware=h200_pcie5 execution=unfused",
    f"{PYTHON}bench kernels model=deepseek_v2_lite",
    f'{PYTHON}specter generate Qwen/Qwen1.5-MoE-A2.7B-Chat --chat "Why is the sky blue?" --temperature 0.7',
]
ELSEWHERE = {  # command: the test or job that runs it or checks what it needs
    "conda env create -f environment.yml": "test_environment_yml_carries_the_same_pins",
    f"{SNAKEMAKE}--cores 1 --report results/snakemake-report.html": "test_snakemake_writes_its_report",
}
OPTIONS = {"specter.quantize": cli.Options, "harness.jobs.fidelity": fidelity.Options, "bench": kernels.Options}
COMMAND = re.compile(r"`((?:make \w|\.venv/bin/|conda ).*?)`", re.DOTALL)


def commands(text: str) -> Iterator[str]:
    """Those in blocks of sh and in inline code, without comments, in single spaces."""
    blocks = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ").splitlines()
    inline = COMMAND.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for command in [*blocks, *inline]:
        yield " ".join(re.sub(r"\s#\s.*", "", command).split())


def settings(command: str) -> tuple[str, list[str]]:
    """The module and the options of `.venv/bin/python -m MODULE OPTIONS`."""
    module, *options = shlex.split(command.removeprefix(PYTHON))
    return module, options


def test_every_command_is_in_one_list() -> None:
    found = {command for name in ("README.md", "ARTIFACT.md") for command in commands(Path(name).read_text())}
    listed = [*CI, *RUN, *PLANNED, *READ, *ELSEWHERE]
    assert len(listed) == len(set(listed))
    assert found - set(listed) == set(), "new commands: add each to the list that says how it is run"
    assert set(listed) - found == set(), "no longer in README or ARTIFACT.md"
    assert list(commands("```sh\na b   # c\nd \\\n  e\n```\nx `make y` `.venv`")) == ["a b", "d e", "make y"]


def test_ci_runs_them() -> None:
    script = Path(".ci/run").read_text().splitlines()
    assert set(script) >= CI
    assert f"{PYTHON}pytest -m commands tests/workflow" in script and "snakemake" in "".join(script)
    tests = "".join(path.read_text() for path in Path("tests/workflow").glob("test_*.py"))
    assert all(f"def {name}(" in tests for name in ELSEWHERE.values())


@pytest.mark.parametrize("command", [one for one in [*RUN, *READ] if one.startswith(PYTHON)])
def test_options_are_understood(command: str) -> None:
    module, options = settings(command)
    if module == "specter.run":
        axes = [[option] if "-m" not in options else _swept(option) for option in options if option != "-m"]
        for overrides in itertools.product(*axes):
            compose(overrides)
    elif module in OPTIONS:
        parse_arguments(OPTIONS[module], [option for option in options if "=" in option])
    elif module == "specter":
        assert CliRunner().invoke(app, [options[0], "--help"]).exit_code == 0
    else:
        assert module == "specter.quantize.residual" and options[0] in ("encode", "rebuild")


def _swept(option: str) -> list[str]:
    key, _, values = option.partition("=")
    return [f"{key}={value}" for value in values.split(",")]


# -- what CI runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files, with this interpreter's environment and no results."""
    root = tmp_path_factory.mktemp("copy")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    for name in tracked.stdout.split("\0")[:-1]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name, follow_symlinks=False)
    (root / ".venv").symlink_to(sys.prefix)
    return root


def run_in(root: Path, command: str) -> None:
    done = subprocess.run(["bash", "-c", command], cwd=root, env=environment(), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.commands
@pytest.mark.parametrize("command", RUN)
def test_a_command_runs(copy: Path, command: str) -> None:
    run_in(copy, command)


@pytest.mark.commands
@pytest.mark.parametrize("command", PLANNED)
def test_a_long_command_can_be_planned(copy: Path, command: str) -> None:
    program, rest = command.split(" ", 1)
    run_in(copy, f"{program} -n {rest}")


@pytest.mark.commands
def test_snakemake_writes_its_report(copy: Path) -> None:
    """As ARTIFACT.md has it, of the smallest figure instead of all."""
    target = "figures/device/h200_clock.png"
    (command,) = (one for one in ELSEWHERE if "--report" in one)
    run_in(copy, f"{SNAKEMAKE}--cores 1 {target} && {command} {target}")
    assert (copy / "results/snakemake-report.html").is_file()
