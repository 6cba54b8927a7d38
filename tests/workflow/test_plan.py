"""Plans: which runs an experiment is, and which live runs it needs."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness import catalogue, plan, scales
from harness.jobs.live_check import choose
from harness.jobs.replay import same_replay
from harness.jobs.tidy import settings
from specter.errors import SpecterError
from specter.resolve import resolve
from specter.results import run_id, write_misfit

ARGUMENTS = ("laptop", "main", "deepseek_v2_lite", "gsm8k")


def test_compose_names_a_wrong_key() -> None:
    with pytest.raises(SpecterError, match="kk"):
        plan.compose(["kk=3"])
    with pytest.raises(SpecterError, match="k=0 is outside"):
        plan.compose(["k=0"])
    assert plan.compose(["k=3", "system=lru"]).system.name == "lru"


def test_runs_have_names_of_their_own_and_are_recorded() -> None:
    for experiment in scales.load_scale("laptop").experiments:
        arguments = ("laptop", experiment, *ARGUMENTS[2:])
        runs = plan.experiment_runs(*arguments)
        assert len({run_id(config) for config in runs}) == len(runs)
        assert {plan.text_key(config) for config in runs} <= set(map(plan.text_key, plan.recording_runs(*arguments)))


def test_a_system_without_a_cache_runs_at_one_budget_only() -> None:
    runs = plan.experiment_runs(*ARGUMENTS)
    budgets = {name: {c.budget.tier for c in runs if c.system.name == name} for name in ("specter", "resident")}
    assert budgets == {"specter": {"high", "low"}, "resident": {"high"}}


def test_every_text_is_recorded_once_and_by_plain_decoding_too() -> None:
    keys = [plan.text_key(config) for config in plan.recording_runs(*ARGUMENTS)]
    assert len(set(keys)) == len(keys) and {key.plain for key in keys} <= set(keys)
    assert {key.draft for key in plan_keys("rivals")} == {"shared", "own"}  # "own_int4" drafts as "own" does


def plan_keys(experiment: str) -> set[plan.TextKey]:
    return set(map(plan.text_key, plan.recording_runs("laptop", experiment, *ARGUMENTS[2:])))


def test_the_digest_tells_plans_apart() -> None:
    here = plan.digest(plan.experiment_runs(*ARGUMENTS))
    assert here == plan.digest(plan.experiment_runs(*ARGUMENTS))
    assert here != plan.digest(plan.experiment_runs("smoke", *ARGUMENTS[1:]))


def test_every_system_is_repeated_live_and_samplings_take_turns() -> None:
    runs = {
        Path(dataset, f"{system}-{sampling}-{tier}"): {"system": {"name": system}, "sampling": {"kind": sampling}}
        for system, sampling, dataset, tier in itertools.product(
            ("lru", "specter", "on_demand", "resident"), ("greedy", "seeded"), "ab", ("high", "low")
        )
    }
    chosen = choose(runs)
    assert [path.name.split("-")[:2] for path in chosen] == [
        ["lru", "greedy"], ["on_demand", "seeded"], ["resident", "greedy"], ["specter", "seeded"]
    ]  # fmt: skip
    assert choose(dict(reversed(runs.items()))) == chosen
    again = [path.name.split("-")[1] for path in choose(runs, turn=1)]  # of another model
    assert again == ["seeded", "greedy", "seeded", "greedy"]
    assert [path.name.split("-")[0] for path in choose(runs, turn=2)] == ["on_demand"]  # of the models after them


def test_live_runs_are_spread_over_data_sets_and_budgets_and_share_plain_decoding() -> None:
    systems = [f"system{number:02}" for number in range(14)]
    runs = {
        Path(dataset, f"{system}-greedy-{tier}"): {"system": {"name": system}, "sampling": {"kind": "greedy"}}
        for system, dataset, tier in itertools.product(systems, "abc", ("high", "low"))
    }
    places = [(path.parent.name, path.name.split("-")[2]) for path in choose(runs)]
    assert len(places) == len(systems) and len(set(places)) == 3
    assert {dataset for dataset, _ in places} == set("abc")


def test_budgets_that_buy_equally_many_slots_share_a_replay() -> None:
    """Of Phi, the published residents of Mixtral-Offloading are what equal bytes leave; those of LRU are fewer."""

    def key(*overrides: str) -> str:
        return same_replay(resolve(plan.compose(["model=phi3_5_moe", *overrides])))

    policies = [[f"system={system}", f"budget.policy={policy}"] for system in ("mixtral_offloading", "lru")
                for policy in ("published", "same_bytes")]  # fmt: skip
    mixtral, equal, lru, more = (key(*one) for one in policies)
    assert mixtral == equal and lru != more
    for changed in ("input=1", "sampling=seeded", "hardware=h200_pcie5", "budget=low"):
        assert key(*policies[0], changed) != mixtral


def test_a_tidy_row_says_whose_residents_a_run_has_and_whether_they_are_assumed(tmp_path: Path) -> None:
    cells = [
        ("deepseek_v2_lite", "specmoeoff", "specmoeoff", False),
        ("phi3_5_moe", "specmoeoff", "specmoeoff", True),
        ("phi3_5_moe", "lru", "mixtral_offloading", True),
        ("phi3_5_moe", "specter", "specter", False),
    ]
    for model, system, residents_of, assumes in cells:
        config = plan.compose([f"model={model}", f"system={system}", "budget.policy=published"])
        write_misfit(tmp_path / system, config, {})
        row = settings(tmp_path / system)
        assert (row["residents_of"], row["assumes_residents"]) == (residents_of, assumes)


def test_the_main_experiment_has_every_system_under_both_policies_on_every_model() -> None:
    for model in scales.load_scale("laptop").models:
        runs = plan.experiment_runs("laptop", "main", model, "gsm8k")
        cells = {(c.system.name, c.budget.tier, c.budget.policy, c.sampling.kind) for c in runs}
        for system in {"specter", "specter_deadline", "specmoeoff", "specmoeoff_tuned", "mixtral_offloading",
                       "mixtral_speculative_loading", "lru", "on_demand"}:  # fmt: skip
            axes = (("high", "low"), ("published", "same_bytes"), ("greedy", "seeded"))
            assert {(system, *cell) for cell in itertools.product(*axes)} <= cells
        assert len(scales.datasets("laptop", "main", model)) >= 3 and {c.input for c in runs} >= {0, 1}


def test_models_after_the_first_run_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = scales.load_scale("laptop")
    assert len(scale.models) == 3 and scale.others is not None
    first, second = scale.models[:2]
    assert scale.models_of("rivals", "decomposition") == [first]
    assert scale.models_of("main", "probe") == scale.models
    assert scales.datasets("laptop", "main", first) == scale.datasets
    assert len(scales.datasets("laptop", "main", second)) == scale.others.num_datasets
    runs = plan.experiment_runs("laptop", "main", second, scale.datasets[0])
    assert {config.input for config in runs} == set(range(scale.others.num_inputs))
    assert {config.system.name for config in runs} == set(scales.load_experiment("main").systems)
    monkeypatch.setattr(scale, "others", None)
    assert scale.models_of("rivals") == scale.models


def test_a_model_runs_at_the_papers_k_where_an_experiment_names_none() -> None:
    depths = {
        model: {
            config.k
            for config in plan.experiment_runs("laptop", "main", model, "gsm8k")
            if config.system.speculative and config.system.draft_len is None
        }
        for model in ("deepseek_v2_lite", "qwen1_5_moe")
    }
    assert depths == {"deepseek_v2_lite": {16}, "qwen1_5_moe": {8}}


def test_a_scale_lists_the_figures_and_tables_that_it_can_fill() -> None:
    names = catalogue.figures("laptop")
    assert names[0] == catalogue.tables("laptop")[0] == "speedup"  # it leads
    assert {"tpot", "tpot-qwen1_5_moe", "models", "rivals"} <= set(names) and "rivals-qwen1_5_moe" not in names
    assert catalogue.figure_model("laptop", "tpot") == "deepseek_v2_lite"
    assert catalogue.figure_model("laptop", "tpot-phi3_5_moe") == "phi3_5_moe"
    assert catalogue.figure_model("laptop", "models") == ""
    known = {*(path.stem for path in Path("conf/experiment").glob("*.yaml")), *scales.PROBES}
    for registry in (catalogue.FIGURES, catalogue.TABLES):
        for name in registry.names():
            assert (
                name.startswith("device.")
                or {one.removeprefix(scales.ROUNDS) for one in registry[name].sources} <= known
            ), name
    assert "depth_profile_published" not in catalogue.tables("laptop")
    assert "depth_profile_published" in catalogue.tables("paper")


def test_bits_per_weight_are_charged_to_residual_experts_only() -> None:
    runs = plan.experiment_runs("laptop", "payload_bits", *ARGUMENTS[2:])
    for run in runs:
        assert run.payload_bits is None or run.decodes
    mine = {run.payload_bits for run in runs if run.system.name == "specter_plus"}
    assert mine == {None, 7.2, 7.7, 8.3, 9.0}
    recorded = plan.recording_runs("laptop", "payload_bits", *ARGUMENTS[2:])
    assert {run.payload_bits for run in recorded} == {None} and not any(run.decodes for run in recorded)


def test_an_experiment_needs_residual_directories_where_a_system_runs_on_them() -> None:
    assert plan.runs_on_residual("residual") and plan.runs_on_residual("everything_fits")
    assert not plan.runs_on_residual("k_sweep")


def test_a_system_runs_under_the_executions_that_an_experiment_gives_it() -> None:
    runs = plan.experiment_runs("standin", "ablation", "deepseek_v2_lite", "gsm8k")
    labels = {name: {c.execution.label for c in runs if c.system.name == name} for name in load_systems("ablation")}
    assert labels.pop("specter_deadline") == {"", "by_expert", "unfused", "ungraphed", "serial"}
    assert labels.pop("specter") == labels.pop("specter_no_prefetch") == {"", "by_expert", "unfused"}
    assert len(labels) == 4 and all(others == {""} for others in labels.values())
    assert {(c.clock, c.budget.policy, c.hardware.name) for c in runs} == {("device", "same_experts", "h200_pcie5")}
    names = [run_id(config) for config in runs]
    assert len(set(names)) == len(names) and any(name.endswith("-unfused") for name in names)
    stress = plan.experiment_runs("standin", "stress", "deepseek_v2_lite", "gsm8k")
    assert {c.execution.stress_seed for c in stress} == {None, 0}
    assert {c.max_new_tokens for c in stress} == {35}


def test_a_named_sampling_has_the_temperature_of_the_model_and_texts_of_its_own() -> None:
    at = {}
    for model in ("deepseek_v2_lite", "qwen1_5_moe", "phi3_5_moe"):
        runs = plan.experiment_runs("laptop", "paper_like", model, "gsm8k")
        [(kind, at[model])] = {(c.sampling.kind, c.sampling.temperature) for c in runs}
        assert kind == "seeded" and at[model] == runs[0].model.paper_like_temperature
        assert {plan.text_key(c).sampling for c in runs} == {"paper_like"} and "-paper_like-" in run_id(runs[0])
    assert len(set(at.values())) == 3
    with pytest.raises(SpecterError, match="deepseek_v2_lite_hub states no paper_like_temperature"):
        plan.compose(["model=deepseek_v2_lite_hub", "sampling=paper_like"])


def test_an_experiment_can_leave_traces_of_runs_of_its_own_length() -> None:
    runs = plan.experiment_runs("smoke", "trace", "deepseek_v2_lite", "gsm8k")
    assert {(config.trace, config.max_new_tokens) for config in runs} == {(True, 52)}
    assert not any(config.trace for config in plan.recording_runs("smoke", "trace", "deepseek_v2_lite", "gsm8k"))
    assert not any(config.trace for config in plan.experiment_runs(*ARGUMENTS))


def test_a_measured_run_is_repeated_and_a_charged_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("main", "deepseek_v2_lite", "gsm8k")
    scale = scales.load_scale("standin")
    once = plan.experiment_runs("standin", *arguments)
    monkeypatch.setattr(scale, "num_repeats", 3)
    runs = plan.experiment_runs("standin", *arguments)
    assert {c.repeat for c in runs} == {0, 1, 2} and len(runs) == 3 * len(once)
    assert len({run_id(config) for config in runs}) == len(runs) and {run_id(c) for c in once} < {
        run_id(c) for c in runs
    }
    assert {plan.text_key(c) for c in runs} == {plan.text_key(c) for c in once}
    listed = yaml.safe_load(Path("conf/scale/smoke.yaml").read_text()) | {"name": "twice", "num_repeats": 2}
    (tmp_path / "conf/scale").mkdir(parents=True)
    (tmp_path / "conf/scale/twice.yaml").write_text(yaml.safe_dump(listed))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecterError, match="num_repeats=2 on the virtual clock, which is deterministic"):
        scales.load_scale("twice")


def load_systems(experiment: str) -> list[str]:
    return scales.load_experiment(experiment).systems


def test_an_experiment_of_executions_is_refused_on_the_virtual_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecterError, match="(?s)ablation switches executions.* virtual clock.*device clock"):
        plan.experiment_runs("laptop", "ablation", *ARGUMENTS[2:])
    for clock in ("virtual", "device"):
        name = f"lists_families_{clock}"
        listed = yaml.safe_load(Path("conf/scale/standin.yaml").read_text()) | {"clock": clock, "name": name}
        path = tmp_path / f"conf/scale/{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(listed | {"experiments": ["main"]}))  # `others` lists families
    (tmp_path / "conf/experiment").symlink_to(Path("conf/experiment").resolve())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecterError, match="families switches executions"):
        scales.load_scale("lists_families_virtual")
    assert scales.load_scale("lists_families_device").clock == "device"


def test_a_scale_says_what_it_does_not_run() -> None:
    with pytest.raises(SpecterError, match="(?s)scale smoke runs main, .*, not hardware.*conf/scale/smoke.yaml"):
        scales.check_listed("smoke", "hardware")
    with pytest.raises(SpecterError, match="device clock"):
        scales.check_listed("smoke", "stress")
    for scale in ("smoke", "laptop", "paper", "standin"):
        for experiment in scales.load_scale(scale).experiments:
            scales.check_listed(scale, experiment)


def test_what_needs_the_virtual_clock_is_not_in_a_measured_scale() -> None:
    size = scales.load_scale("standin")
    measured = dataclasses.replace(size, experiments=["main", "rivals"])
    assert measured.models_of("rivals") == [size.models[0]] and measured.models_of("rivals", "decomposition") == []


@pytest.mark.parametrize(("key", "changes"), [("title", False), ("colour", False), ("num_staging", True)])
def test_labels_are_not_in_a_plans_digest(key: str, changes: bool) -> None:
    runs = plan.experiment_runs(*ARGUMENTS)
    value: Any = 3 if key == "num_staging" else "another"
    other = [dataclasses.replace(one, system=dataclasses.replace(one.system, **{key: value})) for one in runs]
    assert (plan.digest(other) != plan.digest(runs)) == changes
