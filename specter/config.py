"""The typed schema of one run. A typo in a key or a value fails here, before anything is loaded."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specter.errors import SpecterError
from specter.timeline.hardware import Hardware

MAX_VERIFY_TILES = 3  # a verification pass is at most this many tiles
SHARED, OWN, OWN_INT4 = "shared", "own", "own_int4"  # see SystemConfig.draft


@dataclass
class ModelConfig:
    name: str
    checkpoint: str  # directory in hub format
    checkpoint_kind: str  # "standin" or "hub": printed beside every number
    quantized: str  # AutoGPTQ-v1 directory of the routed experts: the draft
    charged_as: str  # full-size model whose bytes and flops the virtual clock charges
    tokenizer: str
    residents: dict[str, float]  # experts per MoE layer that Specter holds on the GPU, by budget tier
    published_k: int = 16  # the paper's best depth
    published: dict[str, dict[str, float]] = field(default_factory=dict)  # of other systems: by system, then tier


@dataclass
class SystemConfig:
    name: str
    speculative: bool  # drafts K tokens with the INT4 copy; otherwise plain decoding
    # What to load while drafting: "three_phase", "deadline" (with one published choice: "deadline_cold" or
    # "deadline_joined"), "two_plans" or "none".
    planner: str
    eviction: str  # "lru", "retain", "drop" (keep nothing) or "resident" (all experts held, budget ignored)
    foresight: str = "none"  # what to load for the layer after this one: "next_gate", "next_gate_2" or "none"
    transfer: str = "copy_stream"  # or "swap": two ways, on the compute stream
    draft: str = SHARED  # non-expert weights and KV of the draft: the target's, its own, or its own with INT4 weights
    draft_len: int | None = None  # a depth of its own, whatever the run's k
    num_buffers: int = 0  # spare device buffers of one expert each
    num_staging: int = 0  # of eviction "retain": slots for experts loaded ahead, of the budget


@dataclass
class BudgetConfig:
    """Device memory for 16-bit experts, as Specter has it. Give one of the two numbers, or leave both to the tier."""

    tier: str
    experts_per_layer: float | None = None  # in BF16 experts of the full-size model, per MoE layer
    num_bytes: int | None = None
    policy: str = "same_bytes"  # what another system gets for it: "same_bytes", "same_experts" or "published"


@dataclass
class DatasetConfig:
    name: str
    source: str  # "shipped" (data/prompts) or "hub" (through `datasets`)
    path: str
    licence: str
    hub_id: str | None = None
    hub_config: str | None = None
    split: str | None = None
    column: str | None = None


@dataclass
class SamplingConfig:
    kind: str  # "greedy", "seeded" or "rejection"
    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    seed: int = 0


@dataclass
class RunConfig:
    model: ModelConfig
    system: SystemConfig
    budget: BudgetConfig
    dataset: DatasetConfig
    sampling: SamplingConfig
    hardware: Hardware
    clock: str = "virtual"  # or "device": on this machine's GPU, measured; `hardware` then caps its memory
    k: int = 16
    max_new_tokens: int = 128
    prompt_tokens: int = 16  # the prompt is cut to its first tokens; 0 keeps it whole
    prompt: str | None = None  # a text of one's own instead of the data set's input
    input: int = 0  # which input of the data set
    warmup_tokens: int = 64  # generated before timing; the expert cache they leave is what every input starts from
    tile_rows: int = 16  # every product of the target has this many rows; a pass stacks tiles
    kv_capacity: int = 256
    threads: int = 1
    trace: bool = False  # also write a Chrome trace of the lanes
    results: str = "results/adhoc"

    @property
    def depth(self) -> int:
        """Draft tokens per round; 0 decodes plainly."""
        if not self.system.speculative:
            return 0
        return self.k if self.system.draft_len is None else self.system.draft_len


_CHOICES: dict[str, tuple[str, ...]] = {
    "model.checkpoint_kind": ("standin", "hub"),
    "system.planner": ("three_phase", "deadline", "deadline_cold", "deadline_joined", "two_plans", "none"),
    "system.eviction": ("lru", "retain", "drop", "resident"),
    "system.foresight": ("next_gate", "next_gate_2", "none"),
    "system.transfer": ("copy_stream", "swap"),
    "system.draft": (SHARED, OWN, OWN_INT4),
    "budget.policy": ("same_bytes", "same_experts", "published"),
    "dataset.source": ("shipped", "hub"),
    "clock": ("virtual", "device"),
    "sampling.kind": ("greedy", "seeded", "rejection"),
}


def validate(config: RunConfig) -> RunConfig:
    """Checks what a type cannot say. Raises SpecterError naming the key and the remedy; returns the config."""
    for path, choices in _CHOICES.items():
        value = functools.reduce(getattr, path.split("."), config)
        if value not in choices:
            raise SpecterError(f"{path}={value!r} is unknown", f"use one of: {', '.join(choices)}")
    max_k = MAX_VERIFY_TILES * config.tile_rows - 1
    if config.system.speculative and not 1 <= config.depth <= max_k:
        raise SpecterError(
            f"k={config.depth} is outside 1..{max_k} (K+1 positions must fit {MAX_VERIFY_TILES} tiles of "
            f"{config.tile_rows} rows)",
            f"choose k between 1 and {max_k}, or system=lru for decoding without a draft",
        )
    if config.system.planner != "none" and not config.system.speculative:
        raise SpecterError(
            f"system.planner={config.system.planner} needs a draft to look ahead", "set system.speculative=true"
        )
    if (config.system.eviction == "retain") != (config.system.num_staging > 0):
        raise SpecterError(
            f"system.num_staging={config.system.num_staging} with system.eviction={config.system.eviction}",
            "give eviction retain at least one staging slot, and any other none",
        )
    num_cores = os.cpu_count() or 1
    if config.threads > num_cores:
        raise SpecterError(f"threads={config.threads} on {num_cores} cores", f"use threads <= {num_cores}")
    if config.system.draft != SHARED and not config.system.speculative:
        raise SpecterError(f"system.draft={config.system.draft} without a draft", "set system.speculative=true")
    if config.system.num_buffers < 0:
        raise SpecterError(f"system.num_buffers={config.system.num_buffers} is too small", "use num_buffers >= 0")
    if not all(math.isfinite(number) for number in (config.budget.experts_per_layer or 0, config.sampling.temperature)):
        raise SpecterError(
            f"budget.experts_per_layer={config.budget.experts_per_layer}, "
            f"sampling.temperature={config.sampling.temperature}",
            "give finite numbers",
        )
    for key, least in (("max_new_tokens", 1), ("prompt_tokens", 0), ("input", 0), ("warmup_tokens", 0), ("threads", 1)):
        if getattr(config, key) < least:
            raise SpecterError(f"{key}={getattr(config, key)} is too small", f"use {key} >= {least}")
    sampling = config.sampling
    if sampling.temperature <= 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise SpecterError(
            f"sampling temperature={sampling.temperature}, top_p={sampling.top_p}, top_k={sampling.top_k}",
            "use temperature > 0, 0 < top_p <= 1, top_k >= 0 (0: no limit); sampling=greedy for the argmax",
        )
    Hardware.from_mapping(to_dict(config.hardware), "hardware")
    if config.budget.experts_per_layer is not None and config.budget.num_bytes is not None:
        raise SpecterError("budget.experts_per_layer and budget.num_bytes are both set", "give one of the two")
    if config.prompt is not None and not config.prompt.strip():
        raise SpecterError("the prompt is empty", "give a text, or leave prompt out to use the data set")
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """A config (or a group of it) as plain values, ready for YAML."""
    return {f.name: to_dict(value) if is_dataclass(value := getattr(config, f.name)) else value for f in fields(config)}


def to_yaml(config: RunConfig) -> str:
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def from_values(values: Any) -> RunConfig:
    """A checked config from plain values (a resolved YAML, or what Hydra composed), strictly typed.

    Raises:
        SpecterError: an unknown key, a missing key or a value of the wrong type, by name.
    """
    try:
        schema = OmegaConf.structured(RunConfig)
        # A frozen dataclass becomes a read-only node, which would refuse even its first values.
        OmegaConf.set_readonly(schema._get_node("hardware"), None)
        config = OmegaConf.to_object(OmegaConf.merge(schema, values))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "configuration"
        raise SpecterError(
            f"{key}: {str(error).splitlines()[0]}", "see conf/ for the known keys and their types"
        ) from None
    assert isinstance(config, RunConfig)
    return validate(config)
