"""From conf/ to runs: scales and experiments, and the run configurations that each job gets.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specter.config import OWN, SHARED, RunConfig, from_values, to_dict, validate
from specter.errors import SpecterError

CONF = Path("conf")
# A recording does not depend on where experts lie, so it is made where nothing has to be moved.
RECORDER = {"name": "recorder", "planner": "none", "eviction": "resident"}
# Everything that decides a recording's tokens and routing.
LIVE_CODE = (
    "specter/model/*.py",
    "specter/kernels/__init__.py",
    "specter/kernels/reference.py",
    "specter/quantize/gptq_format.py",
    "specter/quantize/int4.py",
    "specter/speculation/*.py",
    "specter/experts/slots.py",
    "specter/experts/store.py",
    "specter/engine.py",
    "specter/live.py",
    "specter/prompts.py",
    "specter/recording.py",
    "specter/session.py",
    "harness/recordings.py",
    "baselines/specmoeoff.py",
)
# What each figure and table shows: experiments, or the probes.
FIGURES = {
    "models": ("main",),
    "tpot": ("main",),
    "speedup": ("main",),
    "acceptance": ("main", "probe"),
    "fidelity": ("probe",),
    "methods": ("fidelity",),
    "union": ("probe",),
    "runs": ("probe",),
    "k_sweep": ("k_sweep",),
    "budget_sweep": ("budget_sweep",),
    "hardware": ("hardware",),
    "rivals": ("rivals",),
    "prompt_length": ("prompt_length",),
    "decomposition": ("rivals", "decomposition"),
}
TABLES = {
    "models": ("main",),
    "main": ("main",),
    "systems": ("main",),
    "fidelity": ("probe",),
    "methods": ("fidelity",),
    "union": ("probe",),
    "runs": ("probe",),
    "k_sweep": ("k_sweep",),
    "depth_profile": ("k_sweep",),
    "depth_profile_published": ("depth_profile",),
    "budget_sweep": ("budget_sweep",),
    "hardware": ("hardware",),
    "rivals": ("rivals",),
    "memory": ("rivals",),
    "best_depth": ("k_sweep", "probe"),
    "prompt_length": ("prompt_length",),
    "decomposition": ("rivals", "decomposition"),
    "published_ratio": ("rivals", "decomposition"),
    "transformers_offload": ("transformers_offload",),
}
# Figures that show one model each; all others show every model in panels of its own.
OF_ONE_MODEL = {
    "tpot", "speedup", "acceptance", "k_sweep", "budget_sweep", "hardware", "rivals", "prompt_length", "decomposition",
}  # fmt: skip
# Tidy tables that come from jobs of their own, and the experiment whose recordings they need.
DERIVED = {"probe": "main", "fidelity": "main", "decomposition": "rivals", "transformers_offload": "main"}
Values = dict[str, Any]
Schema = TypeVar("Schema")


@dataclass
class Share:
    """What the models after a scale's first run of it."""

    experiments: list[str]
    num_datasets: int  # the first ones
    num_inputs: int  # of each


@dataclass
class Scale:
    """How much is run, on what, and what it needs (conf/scale)."""

    name: str
    about: str
    checkpoint_kind: str
    clock: str
    needs: str
    models: list[str]
    datasets: list[str]
    experiments: list[str]
    max_inputs: int
    max_k: int
    max_new_tokens: int
    warmup_tokens: int
    num_live_checks: int
    num_probe_texts: int
    others: Share | None = None  # none: every model runs all of it

    def share(self, model: str) -> Share:
        """What `model` runs of this scale."""
        if self.others is None or model == self.models[0]:
            return Share(self.experiments, len(self.datasets), self.max_inputs)
        return self.others

    def models_of(self, *experiments: str) -> list[str]:
        """The models that run all of these experiments; those of `DERIVED` go with their source."""
        needed = {DERIVED.get(name, name) for name in experiments}
        return [model for model in self.models if needed.issubset(self.share(model).experiments)]


@dataclass
class Experiment:
    """A product of settings (conf/experiment). A budget is a tier, or a number of experts per MoE layer, as Specter has
    them; a policy is what another system gets for it (see `specter.memory`)."""

    name: str
    about: str
    systems: list[str]
    budgets: list[str]
    samplings: list[str]
    ks: list[int]  # none: the K that the paper gives the model
    hardware: list[str]
    prompt_tokens: list[int]
    num_inputs: int
    num_datasets: int  # the first ones of the scale
    policies: list[str] = field(default_factory=lambda: ["same_bytes"])
    depths: dict[str, list[int]] = field(default_factory=dict)  # systems that run at other K than `ks`
    kv_capacity: int = 256


@dataclass
class Probe:
    """What the fidelity study runs (conf/probe, named like the scale)."""

    name: str
    methods: list[str]
    texts: str  # "recorded" or "datasets"
    samplings: list[str]
    datasets: list[str]
    num_requests: int
    num_tokens: int
    prompt_tokens: int
    window: int
    device: str


def _option(group: str, name: str) -> Values:
    """One file of a configuration group. Raises SpecterError naming the known ones."""
    path = CONF / group / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
        raise SpecterError(f"{group} {name!r} is unknown", f"use one of: {known}")
    values: Values = yaml.safe_load(path.read_text())
    return values


def _load(schema: type[Schema], group: str, name: str) -> Schema:
    values = _option(group, name)
    try:
        loaded = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    except OmegaConfBaseException as error:
        what = f"conf/{group}/{name}.yaml: {str(error).partition(chr(10))[0]}"
        raise SpecterError(what, f"see {schema.__name__} in {__name__.replace('.', '/')}.py") from None
    assert isinstance(loaded, schema)
    return loaded


@functools.cache
def load_scale(name: str) -> Scale:
    return _load(Scale, "scale", name)


@functools.cache
def load_experiment(name: str) -> Experiment:
    return _load(Experiment, "experiment", name)


@functools.cache
def load_probe(name: str) -> Probe:
    return _load(Probe, "probe", name)


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
    values: Values = to_dict(_typed(group, yaml.safe_dump(_option(group, name))))
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
    return to_dict(base)


def _depths(scale: Scale, experiment: Experiment, model: str, system: Values) -> list[int]:
    """The K that a system runs at. Plain decoding, and a system with a K of its own, run once."""
    if not system["speculative"]:
        return [1]
    ks = experiment.depths.get(system["name"], experiment.ks) if system["draft_len"] is None else [system["draft_len"]]
    return sorted({min(k, scale.max_k) for k in ks or [compose([f"model={model}"]).model.published_k]})


def _inputs(scale: Scale, experiment: Experiment, model: str) -> list[int]:
    return list(range(min(scale.share(model).num_inputs, experiment.num_inputs)))


def datasets(scale: str, experiment: str, model: str) -> list[str]:
    """The data sets that an experiment runs on with a model, at a scale."""
    size = load_scale(scale)
    return size.datasets[: min(load_experiment(experiment).num_datasets, size.share(model).num_datasets)]


def matrix(scale: str, experiment: str, model: str, dataset: str) -> Matrix:
    """The runs of one experiment on one model and data set, at a scale."""
    size, what = load_scale(scale), load_experiment(experiment)
    systems = [_group("system", name) for name in what.systems]
    return Matrix(
        base=_base(size, model, dataset, f"results/{scale}/{experiment}/{model}/{dataset}", what.kv_capacity),
        systems=systems,
        budgets=[_budget(name) | {"policy": policy} for policy in what.policies for name in what.budgets],
        samplings=[_group("sampling", name) for name in what.samplings],
        hardware=[_group("hardware", name) for name in what.hardware],
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
    for system in (_group("system", name) for name in what.systems):
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
    systems = {name: _group("system", name) for name in what.systems}
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


def figures(scale: str) -> list[str]:
    """The figures that a scale can fill, as files are named: of a model but the scale's first, `figure-model`."""
    size = load_scale(scale)
    return [
        figure if model == size.models[0] else f"{figure}-{model}"
        for figure, sources in FIGURES.items()
        for model in (size.models_of(*sources) if figure in OF_ONE_MODEL else size.models_of(*sources)[:1])
    ]


def tables(scale: str) -> list[str]:
    """The tables that a scale can fill."""
    size = load_scale(scale)
    return [table for table, sources in TABLES.items() if size.models_of(*sources)]


def drawn(scale: str, name: str) -> str:
    """What `harness.figures` is asked for one of `figures`: the figure, and its model if it shows one."""
    figure, _, model = name.partition("-")
    return f"{figure} {model or load_scale(scale).models[0]}" if figure in OF_ONE_MODEL else figure


def digest(plan: Matrix | LivePlan | ProbePlan | Probe | DecompositionPlan | Scale) -> str:
    """A short name of everything that a job is told; the rule's `params`, so that a change re-runs the job."""
    return hashlib.sha256(yaml.safe_dump(dataclasses.asdict(plan), sort_keys=False).encode()).hexdigest()[:16]
