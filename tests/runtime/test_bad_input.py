"""Bad input: an error that names the key and the remedy, before any weight is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from rich.console import Console

from specter import run
from specter.config import SystemConfig, from_values
from specter.errors import SpecterError
from specter.models.checkpoint import Checkpoint
from specter.quantize.gptq_format import check_draft_origin
from specter.typed import to_dict
from tests.helpers import BASELINES

CONF = str(Path("conf").absolute())
DRAFT = "model.quantized=conf"  # some directory that exists: loading never comes to it


def values(*overrides: str) -> DictConfig:
    with initialize_config_dir(CONF, version_base="1.3"):
        return compose("config", overrides=list(overrides))


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object) -> None:
        pytest.fail("weights were loaded before the input was checked")

    monkeypatch.setattr(run, "load_model", load)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("overrides", "what", "remedy"),
    [
        (["k=0"], "k=0 is outside 1..47", "choose k"),
        (["k=48"], "k=48 is outside 1..47", "choose k"),
        (["k=many"], "k='many' is not a depth", "k=auto"),
        (["budget.num_bytes=30000000"], "fewer than 2 slots", "budget.num_bytes=34603008"),
        (["budget.experts_per_layer=0.01"], "fewer than 2 slots", "budget.num_bytes"),
        (["budget.tier=vast"], "'vast' is unknown", "high, low, card, smallest"),
        (["budget.experts_per_layer=3", "budget.num_bytes=10"], "both set", "one of the two"),
        (["sampling.kind=beam"], "sampling.kind='beam'", "greedy, seeded, rejection"),
        (["sampling=seeded", "sampling.temperature=0"], "temperature=0", "temperature > 0"),
        (["system.planner=oracle"], "system.planner='oracle'", "three_phase"),
        (["system=lru", "system.planner=three_phase"], "needs a draft", "speculative=true"),
        (["hardware.launch_ns=-1"], "launch_ns is -1", "at least 0"),
        (["hardware.link_bytes_per_s=0"], "link_bytes_per_s is 0", "at least 1"),
        (["prompt=' '"], "prompt is empty", "give a text"),
        (["input=99"], "input=99", "between 0 and 4"),
        (["max_new_tokens=1000"], "exceed kv_capacity=256", "kv_capacity=1016"),
        (["max_new_tokens=0"], "max_new_tokens=0", ">= 1"),
        (["model.checkpoint=no/such/place"], "no/such/place does not exist", "correct the path"),
        (["model.quantized=no/draft"], "no/draft does not exist", "python -m specter.quantize"),
        (["model.charged_as=gpt"], "'gpt' is unknown", "deepseek_v2_lite"),
        (["model.tokenizer=README.md"], "README.md is not a tokenizer", "tokenizer.json"),
        (["warmup_tokens=400"], "warmup_tokens=400", "warmup_tokens <="),
        (["budget.experts_per_layer=nan"], "experts_per_layer=nan", "finite"),
        (["system=lru", "system.draft=own"], "without a draft", "speculative=true"),
        (["system.num_buffers=-1"], "num_buffers=-1", ">= 0"),
        (["budget.policy=fair"], "'fair' is unknown", "same_bytes, same_experts, published"),
        (["system=specmoeoff", "budget=low"], "does not fit: .*0 slots", "same_experts"),
        (["system=specter_deadline", "system.num_staging=0"], "num_staging=0", "at least one"),
        (["system=specter_deadline", "system.eviction=lru"], "num_staging=64", "any other none"),
        (["execution=serial"], "execution .serial. changes", "clock=device"),
        (["execution=by_expert", "execution.fused=false", "clock=device"], "uses none", "one of the two"),
        (["execution.stress_seed=3"], "execution .stress3. changes", "clock=device"),
        (["clock=device", "execution=serial", "execution.stress_seed=3"], "stress_seed reorders", "one of the two"),
        (["extensions=[no_such_package]"], "no_such_package is not a package", "extensions"),
        (["results=/proc/nowhere"], "/proc/nowhere/.* cannot be written", "results="),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_is_refused_before_anything_is_loaded(overrides: list[str], what: str, remedy: str) -> None:
    with pytest.raises(SpecterError, match=what) as caught:
        run.run(from_values(values(DRAFT, *overrides)), Console(quiet=True))
    assert remedy in caught.value.remedy
    assert len(str(caught.value)) < 600, "fits a screen"


def test_unknown_and_missing_keys_are_named() -> None:
    plain = to_dict(from_values(values()))
    with pytest.raises(SpecterError, match="depth"):
        from_values({**plain, "depth": 3})
    del plain["model"]["charged_as"]
    with pytest.raises(SpecterError, match="model.charged_as"):
        from_values(plain)


def test_a_resolved_config_reads_back_unchanged() -> None:
    config = from_values(values("system=lru", "sampling=seeded", "budget=low"))
    assert from_values(to_dict(config)) == config


def test_different_single_runs_have_different_directories() -> None:
    overrides = [[], ["prompt=A"], ["prompt=B"], ["k=8"], ["sampling=seeded"], ["sampling=seeded", "sampling.seed=1"]]
    directories = {run.adhoc_directory(from_values(values(*one))) for one in overrides}
    assert len(directories) == len(overrides)
    assert run.adhoc_directory(from_values(values("trace=true"))) in directories


def test_run_names_hold_the_switched_execution_options() -> None:
    default, switched = (
        from_values(values("clock=device", *one))
        for one in ([], ["execution.fused=false", "execution.graphs=false", "execution.stress_seed=3"])
    )
    assert run.run_id(switched) == run.run_id(default) + "-unfused-ungraphed-stress3"
    assert run.adhoc_directory(switched) != run.adhoc_directory(default)


def test_titles_and_colours_do_not_change_run_names() -> None:
    labels = ["system.title=Another", "system.colour=red", "model.title=M", "dataset.title=D", "hardware.title=H"]
    assert run.adhoc_directory(from_values(values(*labels))) == run.adhoc_directory(from_values(values()))


def test_a_draft_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open("data/standins/deepseek_v2_lite")
    assert check_draft_origin(tmp_path, checkpoint) == "unknown"
    report = tmp_path / "quantization.json"
    report.write_text(json.dumps({"checkpoint": {"sha256": checkpoint.digest()}}))
    assert check_draft_origin(tmp_path, checkpoint) == "this checkpoint"
    report.write_text(json.dumps({"checkpoint": {"sha256": "0" * 64}}))
    with pytest.raises(SpecterError, match="made from another checkpoint"):
        check_draft_origin(tmp_path, checkpoint)


@pytest.mark.parametrize("system", BASELINES, ids=lambda system: system.name)
def test_baselines_of_the_tests_are_those_of_the_workflow(system: SystemConfig) -> None:
    assert from_values(values(f"system={system.name}")).system == system


def test_the_command_line_prints_a_short_error_and_exits_with_2() -> None:
    command = [sys.executable, "-m", "specter.run", "k=0", DRAFT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "k=0 is outside 1..47" in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) < 10
