"""The schemas of conf/scale, conf/experiment and conf/probe.

Nothing here imports torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from specter.errors import SpecterError
from specter.execution import ExecutionConfig
from specter.typed import load_typed

CONF = Path("conf")
# Tables that come from jobs of their own, and the experiment whose recordings or models these jobs use.
PROBES = {
    "probe": "main", "fidelity": "main", "decomposition": "main", "transformers_offload": "main", "claims": "main",
    "lanes": "timeline",
}  # fmt: skip
ROUNDS = "rounds/"  # before an experiment: the table of its rounds, in place of its runs
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
    num_probe_texts: int  # held-out texts that the probe reads with the CPU's decoder; 0: recordings only
    hardware: list[str] = field(default_factory=list)  # instead of the experiments'; on the device clock, this machine
    ignore_eos: bool = True  # of every run: the paper's fixed length
    num_repeats: int = 1  # of every run, on the device clock; the virtual one is deterministic
    others: Share | None = None  # none: every model runs all of it

    def share(self, model: str) -> Share:
        """What `model` runs of this scale."""
        if self.others is None or model == self.models[0]:
            return Share(self.experiments, len(self.datasets), self.max_inputs)
        return self.others

    def models_of(self, *experiments: str) -> list[str]:
        """The models that run all of these experiments; a probe runs on the models of its experiment."""
        needed = {PROBES.get(name, name.removeprefix(ROUNDS)) for name in experiments}
        if "transformers_offload" in experiments and self.checkpoint_kind == "hub":
            return []  # it loads the model a second time, in fp32
        if {"decomposition", "lanes"} & set(experiments) and self.clock == "device":
            return []  # they replay runs on the virtual clock
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
    executions: dict[str, list[str]] = field(default_factory=dict)  # systems that run with others than `default`
    payload_bits: list[float] = field(default_factory=list)  # of residual experts, beside the measured bits per weight
    kv_capacity: int = 256
    max_new_tokens: int | None = None  # instead of the scale's
    trace: bool = False  # write a Chrome trace beside each run

    @property
    def needs_device(self) -> bool:
        """Whether only the device clock can time one of its executions."""
        names = {name for listed in self.executions.values() for name in listed}
        return any(load(ExecutionConfig, "execution", name).needs_device for name in sorted(names))


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
    total_requests: int | None = None  # in all, evenly over the data sets, instead of num_requests of each


def load(schema: type[Schema], group: str, name: str) -> Schema:
    """One file of a configuration group, strictly typed; shared, so not to be changed.

    Raises:
        SpecterError: an unknown name, with the known ones; a wrong key or type.
    """
    loaded: Schema = _load(schema, group, name)  # type: ignore[arg-type]
    return loaded


@functools.cache
def _load(schema: type[Any], group: str, name: str) -> Any:
    return load_typed(schema, CONF / group / f"{name}.yaml")


def load_scale(name: str) -> Scale:
    """Raises SpecterError for what is wrong with conf/scale/`name`.yaml."""
    scale = load(Scale, "scale", name)
    if scale.clock == "device" and not scale.hardware:
        raise SpecterError(f"conf/scale/{name}.yaml measures on no machine", "name the GPU at hand: hardware: [...]")
    if scale.clock == "virtual" and scale.num_repeats != 1:
        raise SpecterError(
            f"conf/scale/{name}.yaml: num_repeats={scale.num_repeats} on the virtual clock, which is deterministic",
            "leave num_repeats out, or measure with clock: device",
        )
    for experiment in {*scale.experiments, *(scale.others.experiments if scale.others else ())}:
        check_clock(scale, load_experiment(experiment))
    return scale


def check_clock(scale: Scale, experiment: Experiment) -> None:
    """Raises SpecterError if the experiment needs the device clock, and the scale is on the virtual one."""
    if scale.clock == "virtual" and experiment.needs_device:
        raise SpecterError(
            f"experiment {experiment.name} switches executions, which only the device clock times; scale {scale.name} "
            "is on the virtual clock",
            "measure it at a scale on the device clock, on a machine with a GPU: snakemake --config scale=standin",
        )


def check_listed(scale: str, experiment: str) -> None:
    """Raises SpecterError if the scale does not run the experiment."""
    size = load_scale(scale)
    check_clock(size, load_experiment(experiment))
    if experiment not in size.experiments:
        known = ", ".join(size.experiments)
        raise SpecterError(f"scale {scale} runs {known}, not {experiment}", f"add it to conf/scale/{scale}.yaml")


def load_experiment(name: str) -> Experiment:
    return load(Experiment, "experiment", name)


def load_probe(name: str) -> Probe:
    return load(Probe, "probe", name)


def datasets(scale: str, experiment: str, model: str) -> list[str]:
    """The data sets that an experiment runs on with a model, at a scale."""
    size = load_scale(scale)
    return size.datasets[: min(load_experiment(experiment).num_datasets, size.share(model).num_datasets)]
