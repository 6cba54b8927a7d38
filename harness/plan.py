"""From scales and experiments to runs: the configurations that each job gets.

Every job's plan is composed while Snakemake parses, and its digest is the rule's `params`; the job composes it again
from the same names. So a comment in conf/ changes nothing, a changed experiment re-runs its own jobs only, and any
job can be run by hand. Nothing here imports torch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException

from harness.scales import CONF, Experiment, Probe, Scale, Values, load_experiment, load_scale, option
from specter.config import OWN, SHARED, RunConfig, from_values, to_dict, validate
from specter.errors import SpecterError

# A recording does not depend on where experts lie, so it is made where nothing has to be moved.
RECORDER = {"name": "recorder", "planner": "none", "eviction": "resident"}
# Everything that decides a recording's tokens and routing.
LIVE_CODE = (
    "specter/models/*.py",
    "specter/kernels/__init__.py",
    "specter/kernels/reference.py",
    "specter/quantize/gptq_format.py",
    "specter/quantize/int4.py",
    "specter/speculation/*.py",
    "specter/experts/slots.py",
    "specter/experts/store.py",
    "specter/engine.py",
    "specter/models/cpu/live.py",
    "specter/prompts.py",
    "specter/recording.py",
    "specter/session.py",
    "harness/recordings.py",
    "baselines/specmoeoff.py",
)


@functools.cache
def _composed(overrides: tuple[str, ...]) -> RunConfig:
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF.resolve()), version_base="1.3"):
            return from_values(hydra_compose("config", overrides=list(overrides)))
    except HydraException as error:
        raise SpecterError(" ".join(str(error).split()), "see conf/ for the known groups and keys") from None


def compose(overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """The run that these Hydra overrides describe, checked. Raises SpecterError naming the key."""
    return copy.deepcopy(_composed(tuple(overrides)))


@functools.cache
def _typed(group: str, text: str) -> Any:
    """One group's values, strictly typed; cached, since a matrix has many runs of few groups."""
    values = yaml.safe_load(text)
    return getattr(from_values(to_dict(_composed(())) | {group: values}), group)


def _group(group: str, name: str) -> Values:
    """One option of a configuration group, checked."""
    values: Values = to_dict(_typed(group, yaml.safe_dump(option(group, name))))
    return values


def _budget(name: str) -> Values:
    try:
        number = float(name)
    except ValueError:
        return _group("budget", name)
    return {"tier": "custom", "experts_per_layer": number, "num_bytes": None, "policy": "same_bytes"}


def _run(base: RunConfig, groups: Values, **numbers: Any) -> RunConfig:
    """`base` with some groups (plain values) and numbers replaced, checked."""
    typed = {group: _typed(group, yaml.safe_dump(values)) for group, values in groups.items()}
    return validate(copy.deepcopy(dataclasses.replace(base, **typed, **numbers)))


@dataclass(frozen=True)
class Matrix:
    """What one replay job runs: a base configuration, and the axes whose product replaces parts of it."""

    base: Values
    systems: list[Values]
    budgets: list[Values]
    samplings: list[Values]
    hardware: list[Values]
    depths: dict[str, list[int]]  # K by system
    prompt_tokens: list[int]
    inputs: list[int]

    def runs(self) -> list[RunConfig]:
        """All runs. A system that ignores the budget runs at the first one only."""
        base = from_values(self.base)
        return [
            _run(
                base,
                {"system": system, "budget": budget, "sampling": sampling, "hardware": hardware},
                k=k,
                prompt_tokens=prompt_tokens,
                input=index,
            )
            for system in self.systems
            for budget in (self.budgets if system["eviction"] != "resident" else self.budgets[:1])
            for sampling in self.samplings
            for hardware in self.hardware
            for k in self.depths[system["name"]]
            for prompt_tokens in self.prompt_tokens
            for index in self.inputs
        ]


class Live(NamedTuple):
    """What decides a run's tokens, within one model and data set. K is 0 for plain decoding; a draft is `shared`, or
    has non-expert weights and KV of its `own`."""

    sampling: str
    prompt_tokens: int
    k: int
    input: int
    draft: str = SHARED


@dataclass(frozen=True)
class LivePlan:
    """What one record job runs live: a base configuration, and the texts to be generated."""

    base: Values
    drafting: Values  # the system that records K > 0
    plain: Values  # the system that records K = 0
    samplings: dict[str, Values]
    lives: list[list[Any]]

    def runs(self) -> list[RunConfig]:
        base = from_values(self.base)
        return [
            _run(
                base,
                {
                    "system": self.drafting | {"draft": live.draft} if live.k else self.plain,
                    "sampling": self.samplings[live.sampling],
                },
                k=live.k or 1,
                prompt_tokens=live.prompt_tokens,
                input=live.input,
            )
            for live in (Live(*values) for values in self.lives)
        ]


def _base(scale: Scale, model: str, dataset: str, results: str, kv_capacity: int = 256) -> Values:
    base = compose([f"model={model}", f"dataset={dataset}"])
    base.kv_capacity = kv_capacity
    base.max_new_tokens, base.warmup_tokens, base.results = scale.max_new_tokens, scale.warmup_tokens, results
    base.clock = scale.clock
    return to_dict(base)


def _depths(scale: Scale, experiment: Experiment, model: str, system: Values) -> list[int]:
    """The K that a system runs at. Plain decoding, and a system with a K of its own, run once."""
    if not system["speculative"]:
        return [1]
    ks = experiment.depths.get(system["name"], experiment.ks) if system["draft_len"] is None else [system["draft_len"]]
    return sorted({min(k, scale.max_k) for k in ks or [compose([f"model={model}"]).model.published_k]})


def _inputs(scale: Scale, experiment: Experiment, model: str) -> list[int]:
    return list(range(min(scale.share(model).num_inputs, experiment.num_inputs)))


def matrix(scale: str, experiment: str, model: str, dataset: str) -> Matrix:
    """The runs of one experiment on one model and data set, at a scale."""
    size, what = load_scale(scale), load_experiment(experiment)
    systems = [_group("system", name) for name in size.systems(what, model)]
    return Matrix(
        base=_base(size, model, dataset, f"results/{scale}/{experiment}/{model}/{dataset}", what.kv_capacity),
        systems=systems,
        budgets=[_budget(name) | {"policy": policy} for policy in what.policies for name in what.budgets],
        samplings=[_group("sampling", name) for name in what.samplings],
        hardware=[_group("hardware", name) for name in size.hardware or what.hardware],
        depths={system["name"]: _depths(size, what, model, system) for system in systems},
        prompt_tokens=what.prompt_tokens,
        inputs=_inputs(size, what, model),
    )


def live_plan(scale: str, experiment: str, model: str, dataset: str) -> LivePlan:
    """The live runs that an experiment needs of one model and data set, and the plain run of every text.

    Systems, budgets and machines do not show: they change no token, and so make no recording stale.
    """
    size, what = load_scale(scale), load_experiment(experiment)
    kinds = {(0, SHARED)}  # K and draft
    for system in (_group("system", name) for name in size.systems(what, model)):
        if system["speculative"]:
            kinds |= {(k, _recorded_draft(system["draft"])) for k in _depths(size, what, model, system)}
    lives = [
        Live(sampling, prompt_tokens, k, index, draft)
        for sampling in sorted(what.samplings)
        for prompt_tokens in what.prompt_tokens
        for k, draft in sorted(kinds)
        for index in _inputs(size, what, model)
    ]
    return LivePlan(
        base=_base(size, model, dataset, f"results/{scale}/recordings/{model}", what.kv_capacity),
        drafting=_group("system", "specter") | RECORDER,
        plain=_group("system", "resident"),
        samplings={name: _group("sampling", name) for name in sorted(what.samplings)},
        lives=[list(live) for live in lives],
    )


def live_of(config: RunConfig) -> Live:
    """The live run that this run replays."""
    draft = _recorded_draft(config.system.draft) if config.depth else SHARED
    return Live(config.sampling.kind, config.prompt_tokens, config.depth, config.input, draft)


def _recorded_draft(draft: str) -> str:
    """An own draft with INT4 weights drafts with the 16-bit values (see baselines/specmoeoff.py)."""
    return SHARED if draft == SHARED else OWN


@dataclass(frozen=True)
class ProbePlan:
    """What one probe job measures: a model with its draft, on recordings and on held-out text."""

    base: Values
    num_texts: int
    temperatures: dict[str, float]  # of the samplings of the experiment `main`, whose recordings are used


def probe_plan(scale: str, model: str) -> ProbePlan:
    """What is measured about a model's draft: on the recordings of a scale, and on held-out text."""
    size = load_scale(scale)
    base = _base(size, model, size.datasets[0], f"results/{scale}/probe")
    samplings = [_group("sampling", name) for name in load_experiment("main").samplings]
    return ProbePlan(base, size.num_probe_texts, {one["kind"]: one["temperature"] for one in samplings})


@dataclass(frozen=True)
class DecompositionPlan:
    """Which pairs of a rival and a system of ours one job explains."""

    base: Values
    rivals: dict[str, Values]
    heroes: dict[str, Values]
    budgets: list[Values]
    hardware: list[Values]  # the first for every rival under the first policy, all of them for the papers' own
    inputs: list[int]
    k: int

    def pairs(self) -> list[tuple[RunConfig, RunConfig]]:
        base = from_values(self.base)
        found = []
        for name, rival in self.rivals.items():
            everywhere = name == "specmoeoff"  # what the paper compares with, hence under every policy and link
            hardware = self.hardware if everywhere else self.hardware[:1]
            budgets = [one for one in self.budgets if everywhere or one["policy"] == self.budgets[0]["policy"]]
            for machine, budget, index in itertools.product(hardware, budgets, self.inputs):
                shared = {"budget": budget, "hardware": machine}
                found += [
                    (
                        _run(base, shared | {"system": rival}, input=index, k=self.k),
                        _run(base, shared | {"system": hero}, input=index, k=self.k),
                    )
                    for hero in self.heroes.values()
                ]
        return found


def decomposition_plan(scale: str, model: str, dataset: str) -> DecompositionPlan:
    """What is explained on one model and data set: from the recordings of the experiment `rivals`."""
    size, what = load_scale(scale), load_experiment("rivals")
    base = _base(size, model, dataset, f"results/{scale}/decomposition") | {
        "sampling": _group("sampling", what.samplings[0]),
        "prompt_tokens": what.prompt_tokens[0],
    }
    systems = {name: _group("system", name) for name in size.systems(what, model)}
    heroes = {name: values for name, values in systems.items() if name.startswith("specter")}
    return DecompositionPlan(
        base=base,
        rivals={name: values for name, values in systems.items() if name not in heroes},
        heroes=heroes,
        budgets=[_group("budget", name) | {"policy": policy} for policy in what.policies for name in what.budgets],
        hardware=[_group("hardware", name) for name in (*what.hardware, "a100_12gbps")],
        inputs=_inputs(size, what, model)[:1],
        k=_depths(size, what, model, _group("system", "specter"))[0],
    )


def digest(plan: Matrix | LivePlan | ProbePlan | Probe | DecompositionPlan | Scale) -> str:
    """A short name of everything that a job is told; the rule's `params`, so that a change re-runs the job."""
    return hashlib.sha256(yaml.safe_dump(dataclasses.asdict(plan), sort_keys=False).encode()).hexdigest()[:16]
