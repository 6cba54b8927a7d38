"""The typed schema of one run. A typo in a key or a value fails here, before anything is loaded.

Defaults live here alone: files in conf/ state what they change.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from specter.errors import SpecterError
from specter.execution import ExecutionConfig, check_execution
from specter.experts.policies.base import EVICTIONS, PLANNERS, PREDICTORS
from specter.experts.transfer import TRANSFERS
from specter.registry import Registry, import_modules
from specter.speculation.depth import AUTO, MAX_AUTO
from specter.speculation.drafts import DRAFTS, SHARED
from specter.speculation.profile import PROFILED, ProfileKey, profiled_depth
from specter.timeline.hardware import Hardware
from specter.typed import build_typed, default_values, legal_names, one_of, to_dict

MAX_VERIFY_TILES = 3  # a verification pass is at most this many tiles
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former needs libyaml, and is ten times as fast
CODECS = BF16, RESIDUAL = "bf16", "residual"
LABELS = ("title", "colour")  # of groups: how figures and tables show them


def registered(registry: Registry[Any], default: str) -> Any:
    """A field that names an entry of a registry."""
    return field(default=default, metadata={"names": registry.names})


@dataclass
class ModelConfig:
    name: str
    checkpoint: str  # directory in hub format
    checkpoint_kind: str = field(metadata=one_of("standin", "hub"))  # printed beside every number
    quantized: str  # AutoGPTQ-v1 directory of the routed experts: the draft
    charged_as: str  # full-size model whose bytes and flops the virtual clock charges; "itself": the checkpoint
    tokenizer: str
    residents: dict[str, float]  # experts per MoE layer that Specter holds on the GPU, by budget tier
    residual: str = ""  # residual directory of the routed experts, for codec=residual
    published_k: int = 16  # the paper's best depth
    profile: str = ""  # file of the depths that were found offline, for k=profiled
    paper_like_temperature: float | None = None  # at which its text is nearest to the paper's, for sampling=paper_like
    published: dict[str, dict[str, float]] = field(default_factory=dict)  # of other systems, where the paper gives them
    assumed: dict[str, dict[str, float]] = field(default_factory=dict)  # of other systems, where it does not
    title: str = ""


@dataclass
class SystemConfig:
    name: str
    speculative: bool = False  # drafts K tokens with the INT4 copy; otherwise plain decoding
    planner: str = registered(PLANNERS, "none")  # what to load during drafting
    eviction: str = registered(EVICTIONS, "lru")  # what to displace; "resident" holds all experts, whatever the budget
    predictor: str = registered(PREDICTORS, "none")  # what to load for the layer after the one that runs
    transfer: str = registered(TRANSFERS, "copy_stream")
    draft: str = registered(DRAFTS, SHARED)  # whose non-expert weights and KV the draft uses
    draft_len: int | str | None = None  # overrides the run's k
    codec: str = field(default="bf16", metadata=one_of(*CODECS))  # of the payloads in store and slots
    num_buffers: int = 0  # spare device buffers of one expert each
    num_staging: int = 0  # slots, of the budget, for experts loaded ahead (eviction "retain")
    residents_of: str = ""  # the system whose published residents it has; empty: its own
    title: str = ""
    colour: str = ""

    @property
    def holds_all(self) -> bool:
        """Whether every expert has a slot, whatever the budget."""
        return self.eviction == "resident"


@dataclass
class BudgetConfig:
    """Device memory for 16-bit experts, as Specter has it. Give one of the two numbers, or leave both to the tier."""

    tier: str
    experts_per_layer: float | None = None  # in BF16 experts of the full-size model, per MoE layer
    num_bytes: int | None = None
    # What another system gets for it (docs/decisions/0008).
    policy: str = field(default="same_bytes", metadata=one_of("same_bytes", "same_experts", "published"))


@dataclass
class DatasetConfig:
    name: str
    source: str = field(metadata=one_of("shipped", "hub"))  # data/prompts, or through `datasets`
    path: str
    licence: str
    hub_id: str | None = None
    hub_config: str | None = None
    split: str | None = None
    column: str | None = None
    title: str = ""


@dataclass
class SamplingConfig:
    kind: str = field(metadata=one_of("greedy", "seeded", "rejection"))
    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    seed: int = 0
    is_paper_like: bool = False  # the temperature is the model's paper_like_temperature

    @property
    def label(self) -> str:
        """Its name in runs, figures and tables."""
        return "paper_like" if self.is_paper_like else self.kind


@dataclass
class RunConfig:
    model: ModelConfig
    system: SystemConfig
    budget: BudgetConfig
    dataset: DatasetConfig
    sampling: SamplingConfig
    hardware: Hardware
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    extensions: list[str] = field(default_factory=list)  # packages that register policies
    # "device" measures on this machine's GPU, whose memory `hardware` caps.
    clock: str = field(default="virtual", metadata=one_of("virtual", "device"))
    codec: str | None = None  # overrides the system's
    payload_bits: float | None = None  # charged per weight of a residual expert, instead of what was measured
    k: int | str = 16  # draft tokens per round, "auto", or "profiled": read from the model's profile, once
    k_from: str = ""  # the profile that k was read from
    max_new_tokens: int = 128
    ignore_eos: bool = True  # the paper's fixed length; False: an end-of-sequence token of the checkpoint ends the text
    prompt_tokens: int = 16  # the prompt is cut to its first tokens; 0 keeps it whole
    prompt: str | None = None  # a text instead of the data set's input
    input: int = 0  # which input of the data set
    repeat: int = 0  # which repetition of the same measurement
    warmup_tokens: int = 64  # generated before timing; every input starts from the expert cache that they leave
    tile_rows: int = 16  # every product of the target has this many rows; a pass stacks tiles
    kv_capacity: int = 256
    threads: int = 1
    trace: bool = False  # also write a Chrome trace of the lanes
    results: str = "results/adhoc"

    @property
    def payload_codec(self) -> str:
        return self.system.codec if self.codec is None else self.codec

    @property
    def decodes(self) -> bool:
        """Whether experts are stored, moved and kept as residual blobs."""
        return self.payload_codec == RESIDUAL

    @property
    def depth(self) -> int | str:
        """Draft tokens per round, or "auto"; 0 decodes plainly."""
        if not self.system.speculative:
            return 0
        return self.k if self.system.draft_len is None else self.system.draft_len

    @property
    def is_auto(self) -> bool:
        """Whether every round has a K of its own."""
        return self.depth == AUTO

    @property
    def draft_len(self) -> int:
        """The most draft tokens of a round."""
        return min(MAX_AUTO, self.max_len) if self.is_auto else int(self.depth)

    @property
    def max_len(self) -> int:
        """The longest draft that one verification pass takes: K+1 positions in its tiles."""
        return MAX_VERIFY_TILES * self.tile_rows - 1


def validate(config: RunConfig) -> RunConfig:
    """Checks what a type cannot, and reads what refers to the model: a paper-like temperature, a profiled depth.

    Raises SpecterError naming the key and the remedy; returns the config.
    """
    for package in config.extensions:
        import_modules(package)
    config = _with_profiled_depth(_with_temperature(config))
    for check in (_check_names, _check_codec, _check_system):
        check(config)
    check_execution(config.execution, config.clock)
    num_cores = os.cpu_count() or 1
    if config.threads > num_cores:
        raise SpecterError(f"threads={config.threads} on {num_cores} cores", f"use threads <= {num_cores}")
    budget, sampling = config.budget, config.sampling
    if not all(math.isfinite(number) for number in (budget.experts_per_layer or 0, sampling.temperature)):
        raise SpecterError(
            f"budget.experts_per_layer={budget.experts_per_layer}, sampling.temperature={sampling.temperature}",
            "give finite numbers",
        )
    zero, one = ("prompt_tokens", "input", "repeat", "warmup_tokens"), ("max_new_tokens", "threads")
    for key, least in (dict.fromkeys(zero, 0) | dict.fromkeys(one, 1)).items():
        if getattr(config, key) < least:
            raise SpecterError(f"{key}={getattr(config, key)} is too small", f"use {key} >= {least}")
    if sampling.temperature <= 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise SpecterError(
            f"sampling temperature={sampling.temperature}, top_p={sampling.top_p}, top_k={sampling.top_k}",
            "use temperature > 0, 0 < top_p <= 1, top_k >= 0 (0: no limit); sampling=greedy for the argmax",
        )
    if budget.experts_per_layer is not None and budget.num_bytes is not None:
        raise SpecterError("budget.experts_per_layer and budget.num_bytes are both set", "give one of the two")
    if config.prompt is not None and not config.prompt.strip():
        raise SpecterError("the prompt is empty", "give a text, or leave prompt out to use the data set")
    return config


def legal_values(extensions: Sequence[str]) -> str:
    """The legal values of each key that has a list of them, a line each, for `--help`."""
    for package in extensions:
        import_modules(package)
    return "\n".join(f"{key}: {', '.join(names())}" for key, names in legal_names(RunConfig).items())


def _check_names(config: RunConfig) -> None:
    for key, names in legal_names(RunConfig).items():
        value: Any = functools.reduce(getattr, key.split("."), config)
        if value not in names():
            raise SpecterError(f"{key}={value!r} is unknown", f"use one of: {', '.join(names())}")


def _with_temperature(config: RunConfig) -> RunConfig:
    temperature = config.model.paper_like_temperature
    if not config.sampling.is_paper_like:
        return config
    if temperature is None:
        raise SpecterError(
            f"sampling={config.sampling.label}, and {config.model.name} states no paper_like_temperature",
            f"find it: python -m harness.jobs.temperatures model={config.model.name}; or use another sampling",
        )
    return replace(config, sampling=replace(config.sampling, temperature=temperature))


def _with_profiled_depth(config: RunConfig) -> RunConfig:
    """`config` with the K of its profile in the place of `profiled`."""
    if config.depth != PROFILED:
        return config
    budget, sampling, model = config.budget, config.sampling, config.model
    per_layer = budget.experts_per_layer or (model.residents.get(budget.tier, 0) if budget.num_bytes is None else 0)
    key = ProfileKey(
        config.system.name, config.hardware.name, per_layer, sampling.label, sampling.temperature, config.dataset.name
    )
    return replace(config, k=profiled_depth(model.profile, key, model.name), k_from=model.profile)


def _check_codec(config: RunConfig) -> None:
    bits = config.payload_bits
    if config.payload_codec not in CODECS:
        raise SpecterError(f"codec={config.codec!r} is unknown", f"use one of: {', '.join(CODECS)}")
    if bits is not None and (not config.decodes or config.clock != "virtual" or not 0 < bits <= 16):
        raise SpecterError(
            f"payload_bits={bits} with codec={config.payload_codec} and clock={config.clock}",
            "it charges residual experts on the virtual clock: give codec=residual and 0 < payload_bits <= 16",
        )
    if config.decodes and config.clock == "virtual" and not config.hardware.int_ops:
        remedy = "state hardware.int_ops, 32-bit integer operations per second"
        raise SpecterError(f"{config.hardware.name} states no int_ops, which decoding is charged by", remedy)


def _check_system(config: RunConfig) -> None:
    system, max_k = config.system, config.max_len
    # A k that a system without a draft does not read is checked, too.
    stated = config.k if isinstance(config.k, str) and config.k not in (AUTO, PROFILED) else config.depth
    if isinstance(stated, str) and stated != AUTO:
        raise SpecterError(f"k={stated!r} is not a depth", f"give a number, k={AUTO} or k={PROFILED}")
    if system.speculative and not 1 <= config.draft_len <= max_k:
        raise SpecterError(
            f"k={config.draft_len} is outside 1..{max_k} (K+1 positions must fit {MAX_VERIFY_TILES} tiles of "
            f"{config.tile_rows} rows)",
            f"choose k between 1 and {max_k}, or system=lru for decoding without a draft",
        )
    if system.planner != "none" and not system.speculative:
        raise SpecterError(f"system.planner={system.planner} needs a draft", "set system.speculative=true")
    if system.draft != SHARED and not system.speculative:
        raise SpecterError(f"system.draft={system.draft} without a draft", "set system.speculative=true")
    if DRAFTS[system.draft].copies_kv and config.clock != "virtual":
        raise SpecterError(f"system.draft={system.draft} is charged and not run", "set clock=virtual")
    if EVICTIONS[system.eviction].uses_staging != (system.num_staging > 0):
        users = ", ".join(name for name in EVICTIONS.names() if EVICTIONS[name].uses_staging)
        raise SpecterError(
            f"system.num_staging={system.num_staging} with system.eviction={system.eviction}",
            f"give the evictions with staging slots ({users}) at least one of them, and any other none",
        )
    if system.num_buffers < 0:
        raise SpecterError(f"system.num_buffers={system.num_buffers} is too small", "use num_buffers >= 0")


def without_labels(values: Any) -> Any:
    """Plain values without titles and colours, for names and digests: a label changes no result."""
    if isinstance(values, dict):
        return {key: without_labels(value) for key, value in values.items() if key not in LABELS}
    return [without_labels(value) for value in values] if isinstance(values, list) else values


def to_yaml(config: RunConfig) -> str:
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def read_values(path: Path) -> dict[str, Any]:
    """A file of `to_yaml` as plain, unchecked values: typed, it takes ten times as long."""
    values: dict[str, Any] = yaml.load(path.read_text(), _LOADER)
    return values


def from_values(values: Any) -> RunConfig:
    """A checked config from plain values (a resolved YAML, or a composition of Hydra), strictly typed.

    Raises:
        SpecterError: an unknown key, a missing key or a value of the wrong type, by name.
    """
    return validate(build_typed(RunConfig, values))


# A command line may override every key that has a default, whether or not a file in conf/ states it.
OmegaConf.register_new_resolver("legal_values", legal_values, replace=True)
ConfigStore.instance().store(name="defaults", node=default_values(RunConfig))
