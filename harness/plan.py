"""From scales and experiments to runs: a job's plan is the list of typed configurations that it runs.

Snakemake makes the plan while it parses, and its digest is among the rule's `params`; the job makes the same plan from
the same names. A comment in conf/ therefore re-runs nothing, and a changed experiment re-runs its own jobs only.
Nothing here imports torch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException

from harness.scales import CONF, Experiment, Scale, Schema, check_clock, load, load_experiment, load_scale
from specter.config import (
    LABELS,
    RESIDUAL,
    BudgetConfig,
    RunConfig,
    SamplingConfig,
    SystemConfig,
    from_values,
    validate,
)
from specter.errors import SpecterError
from specter.execution import ExecutionConfig
from specter.speculation.drafts import DRAFTS, SHARED
from specter.timeline.hardware import Hardware

OURS = "specter"  # prefix of our systems' names


@functools.cache
def _composed(overrides: tuple[str, ...]) -> RunConfig:
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF.resolve()), version_base="1.3"):
            return from_values(hydra_compose("config", overrides=list(overrides)))
    except HydraException as error:
        raise SpecterError(" ".join(str(error).split()), "see conf/ for the known groups and keys") from None


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """The checked configuration of these Hydra overrides, a fresh copy. Raises SpecterError naming the key."""
    return copy.deepcopy(_composed(tuple(overrides)))


class TextKey(NamedTuple):
    """What decides the tokens of a run, within one model and data set. K is 0 for plain decoding, and "auto" for a
    dense recording; a draft is `shared`, or has non-expert weights and KV of its `own`."""

    sampling: str
    prompt_tokens: int
    k: int | str
    input: int
    draft: str = SHARED

    @property
    def plain(self) -> TextKey:
        """The same text by plain decoding."""
        return TextKey(self.sampling, self.prompt_tokens, 0, self.input)


def text_key(config: RunConfig) -> TextKey:
    """The key of the recording that this run replays."""
    draft = _recorded_draft(config.system.draft) if config.draft_len else SHARED
    return TextKey(config.sampling.label, config.prompt_tokens, config.depth, config.input, draft)


def _recorded_draft(draft: str) -> str:
    """The kind of draft whose recordings this one replays."""
    return DRAFTS[draft].recorded_as or draft


def experiment_runs(scale: str, experiment: str, model: str, dataset: str) -> list[RunConfig]:
    """The runs of one experiment on one model and data set, at a scale; their results are in results/.

    A system that ignores the budget runs at the first one only.
    """
    size, what = load_scale(scale), load_experiment(experiment)
    base = _base(size, what, model, dataset, f"results/{scale}/{experiment}/{model}/{dataset}")
    runs = []
    for system in _systems(what):
        runs += _product(
            replace(base, system=system, trace=what.trace),
            budget=_budgets(what)[:1] if system.holds_all else _budgets(what),
            sampling=_all(SamplingConfig, "sampling", what.samplings),
            hardware=_all(Hardware, "hardware", size.hardware or what.hardware),
            execution=_all(ExecutionConfig, "execution", what.executions.get(system.name, ["default"])),
            k=_depths(size, what, model, system),
            prompt_tokens=what.prompt_tokens,
            input=_inputs(size, what, model),
            repeat=range(size.num_repeats),
            payload_bits=[None, *(what.payload_bits if system.codec == RESIDUAL else ())],
        )
    return runs


def recording_runs(scale: str, experiment: str, model: str, dataset: str) -> list[RunConfig]:
    """The live runs that an experiment replays on one model and data set; first the plain runs of all texts.

    Budgets, machines and most of a system change no token: they are not in this plan, and make no recording stale.
    A recording does not depend on where experts are, so it is made with all of them on the device.
    """
    size, what = load_scale(scale), load_experiment(experiment)
    base = _base(size, what, model, dataset, f"results/{scale}/recordings/{model}")
    kinds = {
        (k, _recorded_draft(system.draft))
        for system in _systems(what)
        if system.speculative
        for k in _depths(size, what, model, system)
    }
    plain, drafting = (load(SystemConfig, "system", name) for name in ("resident", OURS))
    drafting = replace(drafting, name="recorder", planner="none", eviction="resident")
    runs = []
    for k, draft in [(0, SHARED), *sorted(kinds, key=_by_depth)]:
        runs += _product(
            replace(base, system=replace(drafting, draft=draft) if k else plain, k=k or 1),
            sampling=_all(SamplingConfig, "sampling", sorted(what.samplings)),
            prompt_tokens=what.prompt_tokens,
            input=_inputs(size, what, model),
        )
    return runs


def runs_on_residual(experiment: str) -> bool:
    """Whether a system of the experiment needs the model's residual directory."""
    return any(system.codec == RESIDUAL for system in _systems(load_experiment(experiment)))


def decomposed_pairs(scale: str, model: str, dataset: str) -> list[tuple[RunConfig, RunConfig]]:
    """Pairs (baseline, ours) whose speed-up is explained on one model and data set, from recordings of `main`.

    Every baseline is compared under the first policy on the first machine; the paper's own also under all others.
    """
    size, what = load_scale(scale), load_experiment("main")
    base = replace(
        _base(size, what, model, dataset, f"results/{scale}/decomposition"),
        sampling=load(SamplingConfig, "sampling", what.samplings[0]),
        prompt_tokens=what.prompt_tokens[0],
        k=_depths(size, what, model, load(SystemConfig, "system", OURS))[0],
    )
    systems = _systems(what)
    ours = [system for system in systems if system.name.startswith(OURS) and system.planner != "none"]
    pairs = []
    for baseline in (system for system in systems if not (system.name.startswith(OURS) or system.holds_all)):
        is_papers = baseline.name == "specmoeoff"
        compared = _product(
            replace(base, system=baseline),
            hardware=_all(Hardware, "hardware", [*what.hardware, "a100_12gbps"] if is_papers else what.hardware[:1]),
            budget=[one for one in _budgets(what) if is_papers or one.policy == what.policies[0]],
            input=_inputs(size, what, model)[:1],
        )
        pairs += [(run, validate(replace(run, system=system))) for run in compared for system in ours]
    return pairs


class ProbePlan(NamedTuple):
    """What one probe job measures of a model's draft: on recordings of `main`, and on held-out text."""

    base: RunConfig
    num_texts: int
    temperatures: dict[str, float]  # by sampling


def probe_plan(scale: str, model: str) -> ProbePlan:
    """The plan of a model at a scale."""
    size, what = load_scale(scale), load_experiment("main")
    base = _base(size, what, model, size.datasets[0], f"results/{scale}/probe")
    samplings = _all(SamplingConfig, "sampling", what.samplings)
    return ProbePlan(base, size.num_probe_texts, {one.label: one.temperature for one in samplings})


def digest(plan: Any) -> str:
    """A short name of a job's plan; in the rule's `params`, so that a change re-runs the job."""
    return hashlib.sha256(json.dumps(_plain(plan)).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Dataclasses as mappings, without labels."""
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value) if field.name not in LABELS)
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


# -- axes ------------------------------------------------------------------------------------------


def _base(scale: Scale, experiment: Experiment, model: str, dataset: str, results: str) -> RunConfig:
    """What all runs share. Raises SpecterError if the experiment needs another clock than the scale's."""
    check_clock(scale, experiment)
    return replace(
        compose([f"model={model}", f"dataset={dataset}"]),
        kv_capacity=experiment.kv_capacity,
        max_new_tokens=experiment.max_new_tokens or scale.max_new_tokens,
        ignore_eos=scale.ignore_eos,
        warmup_tokens=scale.warmup_tokens,
        results=results,
        clock=scale.clock,
    )


def _product(base: RunConfig, **axes: Iterable[Any]) -> list[RunConfig]:
    """`base` with every combination of the axes' values, checked."""
    return [
        validate(replace(base, **dict(zip(axes, values, strict=True)))) for values in itertools.product(*axes.values())
    ]


def _all(schema: type[Schema], group: str, names: Sequence[str]) -> list[Schema]:
    return [load(schema, group, name) for name in names]


def _systems(experiment: Experiment) -> list[SystemConfig]:
    return _all(SystemConfig, "system", experiment.systems)


def _budgets(experiment: Experiment) -> list[BudgetConfig]:
    return [_budget(name, policy) for policy in experiment.policies for name in experiment.budgets]


def _budget(name: str, policy: str) -> BudgetConfig:
    """A tier of conf/budget, or a number of experts per MoE layer."""
    try:
        return BudgetConfig("custom", experts_per_layer=float(name), policy=policy)
    except ValueError:
        return replace(load(BudgetConfig, "budget", name), policy=policy)


def _depths(scale: Scale, experiment: Experiment, model: str, system: SystemConfig) -> list[int | str]:
    """The K that a system runs at. Plain decoding, and a system with a K of its own, run once."""
    if not system.speculative:
        return [1]
    ks = experiment.depths.get(system.name, experiment.ks) if system.draft_len is None else [system.draft_len]
    ks = ks or [compose([f"model={model}"]).model.published_k]
    return sorted({k if isinstance(k, str) else min(k, scale.max_k) for k in ks}, key=lambda k: _by_depth((k, "")))


def _by_depth(kind: tuple[int | str, str]) -> tuple[float, str]:
    """Sorts kinds of recordings by K, and `auto` behind them."""
    k, draft = kind
    return (math.inf if isinstance(k, str) else k), draft


def _inputs(scale: Scale, experiment: Experiment, model: str) -> range:
    return range(min(scale.share(model).num_inputs, experiment.num_inputs))
