"""From a name and a few options to a configuration."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from harness.plan import compose
from specter.cli import choice
from specter.cli.choice import Choice, configure, find_budget, find_model, find_system, parse_bytes
from specter.errors import SpecterError
from specter.generation import GREEDY
from specter.models.checkpoint import write_checkpoint
from specter.models.full_size import FULL_SIZE
from specter.resolve import resolve
from tests.helpers import TINY, random_tensors

STANDIN = "data/standins/deepseek_v2_lite"


def silent() -> Console:
    return Console(file=io.StringIO(), width=200)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("name", ["deepseek_v2_lite", STANDIN, f"./{STANDIN}/", str(Path(STANDIN).absolute())])
def test_a_stand_in_is_found_by_name_and_by_directory(name: str) -> None:
    found = find_model(name, silent())
    assert (found.name, found.charged_as, found.checkpoint_kind) == ("deepseek_v2_lite", "deepseek_v2_lite", "standin")


def test_a_checkpoint_of_ones_own_keeps_its_draft_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECTER_HOME", str(tmp_path / "home"))
    directory = tmp_path / "models" / "mine"
    write_checkpoint(directory, TINY, random_tensors(TINY, seed=0))
    found = find_model(str(directory), silent())
    assert (found.checkpoint_kind, found.charged_as) == ("hub", "itself")
    assert Path(found.quantized).parent == Path(found.residual).parent
    assert Path(found.quantized).is_relative_to(tmp_path / "home")
    assert found.tokenizer == str(directory / "tokenizer.json")
    (tmp_path / "models" / "tokenizer.json").write_text("{}")
    assert find_model(str(directory), silent()).tokenizer == str(tmp_path / "models" / "tokenizer.json")
    other = tmp_path / "others" / "mine"  # of the same name
    write_checkpoint(other, TINY, random_tensors(TINY, seed=1))
    assert find_model(str(other), silent()).quantized != found.quantized


def test_a_name_that_is_nothing_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(SpecterError, match="no model of conf/model, no directory and no hub id") as caught:
        find_model("deepseek", silent())
    assert "deepseek_v2_lite" in caught.value.remedy
    with pytest.raises(SpecterError, match=r"config\.json"):
        find_model(str(tmp_path), silent())


def test_the_fastest_system_whose_files_exist_is_chosen_and_what_is_missing_is_said(tmp_path: Path) -> None:
    model = replace(compose([]).model, quantized=str(tmp_path / "int4"), residual=str(tmp_path / "residual"))
    console = silent()
    assert find_system(None, model, console).name == "lru"
    assert "no INT4 draft" in written(console) and f"specter quantize {STANDIN}" in written(console)
    (tmp_path / "int4").mkdir()
    (tmp_path / "int4" / "quantization.json").write_text("{}")
    console = silent()
    assert find_system(None, model, console).name == "specter_deadline"
    assert "no residual experts" in written(console)
    (tmp_path / "residual").mkdir()
    (tmp_path / "residual" / "residual.json").write_text("{}")
    console = silent()
    assert find_system(None, model, console).name == "specter_plus" and not written(console)
    assert find_system(None, model, console, on_cpu=True).name == "specter_deadline"
    assert find_system("on_demand", model, console).name == "on_demand"
    with pytest.raises(SpecterError, match="system 'fastest' is unknown"):
        find_system("fastest", model, console)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("24GB", 24 * 10**9), ("1.5 GB", 1_500_000_000), ("512MiB", 2**29), ("24", None), ("high", None), ("GB", None)],
)
def test_sizes_have_units(text: str, expected: int | None) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("system", ["lru", "specter_deadline", "specter_plus"])
@pytest.mark.parametrize("size", ["24GB", "17.5GB"])
def test_a_system_fills_the_device_memory_it_is_given_and_no_more(system: str, size: str) -> None:
    config = configure(Choice("deepseek_v2_lite", system=system, budget=size), silent(), 256, GREEDY, is_plan=True)
    run = resolve(config)
    memory, used = parse_bytes(size), int(run.fit()["device_total_bytes"])
    assert memory is not None
    is_whole = run.num_slots == run.spec.num_moe_layers * run.spec.num_experts
    assert used <= memory and (is_whole or memory - used < 2 * run.costs.expert_bytes + run.spec.num_experts * 2**20)


def test_too_little_memory_is_refused_with_what_is_needed() -> None:
    with pytest.raises(SpecterError, match=r"needs 10\.\d GB of device memory beside 2 experts of 17 MB.*is 8\.0 GB"):
        configure(Choice("deepseek_v2_lite", "specter_deadline", "8GB"), silent(), 256, GREEDY, is_plan=True)
    assert configure(Choice("deepseek_v2_lite", "lru", "8GB"), silent(), 256, GREEDY, is_plan=True)
    with pytest.raises(SpecterError, match="neither a tier .* nor a size"):
        find_budget("medium", compose([]))


def test_a_checkpoint_without_tiers_gets_the_whole_card(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY, random_tensors(TINY, seed=0))
    config = configure(Choice(str(tmp_path)), silent(), 100, GREEDY)
    assert config.budget.tier == "card" and config.kv_capacity == 128
    assert resolve(config).num_slots == TINY.num_moe_layers * TINY.num_experts
    assert choice.capacity_for(128) == 128 and choice.capacity_for(129) == 192


def test_a_narrow_model_gets_one_thread_and_a_wide_one_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    write_checkpoint(tmp_path, TINY, random_tensors(TINY, seed=0))
    assert configure(Choice(str(tmp_path)), silent(), 100, GREEDY).threads == 1
    assert [choice.useful_threads(Path("specter/models/full_size") / name) for name in FULL_SIZE] == [3, 3, 3]


def test_a_stand_in_that_is_not_here_is_refused_but_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecterError, match="stand-in .* is not here") as caught:
        find_model("deepseek_v2_lite", silent())
    assert "root of the repository" in caught.value.remedy
    assert resolve(configure(Choice("deepseek_v2_lite", "lru", "20GB"), silent(), 256, GREEDY, is_plan=True))
