"""From scales and experiments to runs: the typed plan of every job.

Snakemake composes a job's plan while it parses, and the plan's digest is among the rule's `params`; the job composes
the same plan from the same names. A comment in conf/ therefore re-runs nothing, and a changed experiment re-runs its
own jobs only. Nothing here imports torch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException

from harness.scales import CONF, Experiment, Probe, Scale, load, load_experiment, load_scale
from specter.config import OWN, SHARED, BudgetConfig, RunConfig, SamplingConfig, SystemConfig, from_values, validate
from specter.errors import SpecterError
from specter.timeline.hardware import Hardware

OURS = "specter"  # prefix of our systems' names
NOT_IN_KEYS = ("title", "colour")  # of a system: for readers only


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


def _system(name: str) -> SystemConfig:
    return load(SystemConfig, "system", name)


def _budget(name: str, policy: str) -> BudgetConfig:
    """A tier of conf/budget, or a number of experts per MoE layer."""
    try:
        return BudgetConfig("custom", experts_per_layer=float(name), policy=policy)
    except ValueError:
        return replace(load(BudgetConfig, "budget", name), policy=policy)


def _budgets(experiment: Experiment) -> list[BudgetConfig]:
    return [_budget(name, policy) for policy in experiment.policies for name in experiment.budgets]


def _samplings(experiment: Experiment) -> list[SamplingConfig]:
    return [load(SamplingConfig, "sampling", name) for name in experiment.samplings]


def _hardware(names: list[str]) -> list[Hardware]:
    return [load(Hardware, "hardware", name) for name in names]


@dataclass(frozen=True)
class Matrix:
    """The runs of one replay or measure job: a base configuration, and axes whose product replaces parts of it."""

    base: RunConfig
    systems: list[SystemConfig]
    budgets: list[BudgetConfig]
    samplings: list[SamplingConfig]
    hardware: list[Hardware]
    depths: dict[str, list[int]]  # K by system
    prompt_tokens: list[int]
    inputs: list[int]

    def runs(self) -> list[RunConfig]:
        """All runs, checked. A system that ignores the budget runs at the first one only."""
        return [
            validate(
                replace(
                    self.base,
                    system=system,
                    budget=budget,
                    sampling=sampling,
                    hardware=hardware,
                    k=k,
                    prompt_tokens=prompt_tokens,
                    input=index,
                )
            )
            for system in self.systems
            for budget in (self.budgets if system.eviction != "resident" else self.budgets[:1])
            for sampling in self.samplings
            for hardware in self.hardware
            for k in self.depths[system.name]
            for prompt_tokens in self.prompt_tokens
            for index in self.inputs
        ]


class TextKey(NamedTuple):
    """What decides the tokens of a run, within one model and data set. K is 0 for plain decoding; a draft is `shared`,
    or has non-expert weights and KV of its `own`."""

    sampling: str
    prompt_tokens: int
    k: int
    input: int
    draft: str = SHARED

    @property
    def plain(self) -> TextKey:
        """The same text by plain decoding."""
        return TextKey(self.sampling, self.prompt_tokens, 0, self.input)


def text_key(config: RunConfig) -> TextKey:
    """The key of the recording that this run replays."""
    draft = _recorded_draft(config.system.draft) if config.depth else SHARED
    return TextKey(config.sampling.kind, config.prompt_tokens, config.depth, config.input, draft)


def _recorded_draft(draft: str) -> str:
    """An own draft with INT4 weights drafts with the 16-bit values (see baselines/specmoeoff.py)."""
    return SHARED if draft == SHARED else OWN


@dataclass(frozen=True)
class RecordingPlan:
    """The live runs of one record job: a base configuration, and the texts to generate."""

    base: RunConfig
    drafting: SystemConfig  # the system that records K > 0
    plain: SystemConfig  # the system that records K = 0
    samplings: dict[str, SamplingConfig]
    keys: list[TextKey]

    def runs(self) -> list[RunConfig]:
        """A run of each key, checked."""
        return [
            validate(
                replace(
                    self.base,
                    system=replace(self.drafting, draft=key.draft) if key.k else self.plain,
                    sampling=self.samplings[key.sampling],
                    k=key.k or 1,
                    prompt_tokens=key.prompt_tokens,
                    input=key.input,
                )
            )
            for key in self.keys
        ]


def _base(scale: Scale, model: str, dataset: str, results: str, kv_capacity: int = 256) -> RunConfig:
    return replace(
        compose([f"model={model}", f"dataset={dataset}"]),
        kv_capacity=kv_capacity,
        max_new_tokens=scale.max_new_tokens,
        warmup_tokens=scale.warmup_tokens,
        results=results,
        clock=scale.clock,
    )


def _depths(scale: Scale, experiment: Experiment, model: str, system: SystemConfig) -> list[int]:
    """The K that a system runs at. Plain decoding, and a system with a K of its own, run once."""
    if not system.speculative:
        return [1]
    ks = experiment.depths.get(system.name, experiment.ks) if system.draft_len is None else [system.draft_len]
    return sorted({min(k, scale.max_k) for k in ks or [compose([f"model={model}"]).model.published_k]})


def _inputs(scale: Scale, experiment: Experiment, model: str) -> list[int]:
    return list(range(min(scale.share(model).num_inputs, experiment.num_inputs)))


def matrix(scale: str, experiment: str, model: str, dataset: str) -> Matrix:
    """The runs of one experiment on one model and data set, at a scale."""
    size, what = load_scale(scale), load_experiment(experiment)
    systems = [_system(name) for name in size.systems(what, model)]
    return Matrix(
        base=_base(size, model, dataset, f"results/{scale}/{experiment}/{model}/{dataset}", what.kv_capacity),
        systems=systems,
        budgets=_budgets(what),
        samplings=_samplings(what),
        hardware=_hardware(size.hardware or what.hardware),
        depths={system.name: _depths(size, what, model, system) for system in systems},
        prompt_tokens=what.prompt_tokens,
        inputs=_inputs(size, what, model),
    )


def recording_plan(scale: str, experiment: str, model: str, dataset: str) -> RecordingPlan:
    """The live runs that an experiment replays on one model and data set, and the plain run of every text.

    Budgets, machines and most of a system change no token: they are not in this plan, and make no recording stale.
    """
    size, what = load_scale(scale), load_experiment(experiment)
    kinds = {(0, SHARED)}  # K and draft
    for system in map(_system, size.systems(what, model)):
        if system.speculative:
            kinds |= {(k, _recorded_draft(system.draft)) for k in _depths(size, what, model, system)}
    samplings = {one.kind: one for one in _samplings(what)}
    return RecordingPlan(
        base=_base(size, model, dataset, f"results/{scale}/recordings/{model}", what.kv_capacity),
        # A recording does not depend on where experts are, so it is made with all of them on the device.
        drafting=replace(_system(OURS), name="recorder", planner="none", eviction="resident"),
        plain=_system("resident"),
        samplings=samplings,
        keys=[
            TextKey(sampling, prompt_tokens, k, index, draft)
            for sampling in sorted(samplings)
            for prompt_tokens in what.prompt_tokens
            for k, draft in sorted(kinds)
            for index in _inputs(size, what, model)
        ],
    )


@dataclass(frozen=True)
class ProbePlan:
    """What one probe job measures of a model's draft: on recordings and on held-out text."""

    base: RunConfig
    num_texts: int
    temperatures: dict[str, float]  # of the samplings of the experiment `main`, whose recordings are read


def probe_plan(scale: str, model: str) -> ProbePlan:
    """What is measured of a model's draft at a scale."""
    size = load_scale(scale)
    base = _base(size, model, size.datasets[0], f"results/{scale}/probe")
    temperatures = {one.kind: one.temperature for one in _samplings(load_experiment("main"))}
    return ProbePlan(base, size.num_probe_texts, temperatures)


@dataclass(frozen=True)
class DecompositionPlan:
    """The pairs of a baseline and a system of ours whose speed-up one job explains."""

    base: RunConfig
    baselines: list[SystemConfig]
    ours: list[SystemConfig]
    budgets: list[BudgetConfig]
    hardware: list[Hardware]  # of all pairs the first; the others of the paper's own baseline only
    inputs: list[int]
    k: int

    def pairs(self) -> list[tuple[RunConfig, RunConfig]]:
        """(baseline, ours), checked."""
        found = []
        for baseline in self.baselines:
            everywhere = baseline.name == "specmoeoff"  # the paper's baseline, under every policy and link
            hardware = self.hardware if everywhere else self.hardware[:1]
            budgets = [one for one in self.budgets if everywhere or one.policy == self.budgets[0].policy]
            for machine, budget, index in itertools.product(hardware, budgets, self.inputs):
                shared = replace(self.base, budget=budget, hardware=machine, input=index, k=self.k)
                found += [
                    (validate(replace(shared, system=baseline)), validate(replace(shared, system=system)))
                    for system in self.ours
                ]
        return found


def decomposition_plan(scale: str, model: str, dataset: str) -> DecompositionPlan:
    """What is explained on one model and data set, from the recordings of the experiment `rivals`."""
    size, what = load_scale(scale), load_experiment("rivals")
    systems = [_system(name) for name in size.systems(what, model)]
    base = _base(size, model, dataset, f"results/{scale}/decomposition")
    return DecompositionPlan(
        base=replace(base, sampling=_samplings(what)[0], prompt_tokens=what.prompt_tokens[0]),
        baselines=[system for system in systems if not system.name.startswith(OURS)],
        ours=[system for system in systems if system.name.startswith(OURS)],
        budgets=_budgets(what),
        hardware=_hardware([*what.hardware, "a100_12gbps"]),
        inputs=_inputs(size, what, model)[:1],
        k=_depths(size, what, model, _system(OURS))[0],
    )


def digest(plan: Matrix | RecordingPlan | ProbePlan | Probe | DecompositionPlan | Scale) -> str:
    """A short name of a job's plan; in the rule's `params`, so that a change re-runs the job."""
    return hashlib.sha256(json.dumps(_plain(plan), sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Dataclasses as mappings, without what is only for readers."""
    if dataclasses.is_dataclass(value):
        kept = (field.name for field in dataclasses.fields(value) if field.name not in NOT_IN_KEYS)
        return {name: _plain(getattr(value, name)) for name in kept}
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
