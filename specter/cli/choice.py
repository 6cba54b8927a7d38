"""From a checkpoint and a few options to a `RunConfig`: what the subcommands share."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from specter.config import (
    RESIDUAL,
    BudgetConfig,
    DatasetConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    SystemConfig,
    validate,
)
from specter.errors import SpecterError
from specter.hub import find_checkpoint, is_hub_id, with_local_paths
from specter.memory import MIN_SLOTS, DoesNotFit, fixed_bytes
from specter.models.hub_config import read_spec
from specter.quantize import gptq_format
from specter.quantize.residual import directory as residual_directory
from specter.resolve import build_costs
from specter.timeline.hardware import Hardware
from specter.typed import load_typed

CONF = Path(__file__).parents[1] / "conf"
ASSUMED_BITS = 7.3  # per weight of a residual expert: the most of our stand-ins (docs/codec.md)
NO_DATASET = DatasetConfig("none", "shipped", "", "")
_GPUS = {"H200": "h200_pcie5", "A100": "a100_40gb_pcie4", "4090": "rtx4090_ddr4"}  # by a part of the driver's name
_UNKNOWN_GPU, _NO_GPU = "h200_pcie5", "a100_40gb_pcie4"
_DEVICE_MARGIN = 0.04  # of device memory: the driver's context, the allocator's free blocks, activations
_KV_STEP = 64
_WIDE = 1024  # hidden size from which a product is worth the synchronization of threads
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True, slots=True)
class Choice:
    """What a user may choose. None: chosen here, by what exists and what fits."""

    model: str  # of conf/model, a directory or a hub id
    system: str | None = None
    budget: str | None = None  # a tier of conf/model, or device memory in all, such as 24GB
    k: int | str | None = None
    hardware: str | None = None
    int4: Path | None = None
    residual: Path | None = None


def drafts_home() -> Path:
    """Where drafts of checkpoints that conf/ does not name are kept: SPECTER_HOME, or the user's cache."""
    return Path(os.environ.get("SPECTER_HOME") or Path.home() / ".cache" / "specter")


def find_model(name: str, console: Console, *, is_plan: bool = False) -> ModelConfig:
    """The model that a user names: of conf/model, a directory, or a hub id, which is downloaded.

    Args:
        is_plan: a stand-in need not be here.
    Raises SpecterError: none of these, a stand-in that is not here; or as `find_checkpoint`.
    """
    stated = {path.stem: path for path in (CONF / "model").glob("*.yaml")}
    if name in stated:
        model = load_typed(ModelConfig, stated[name])
        if not is_plan and model.checkpoint_kind == "standin" and not Path(model.checkpoint).is_dir():
            raise SpecterError(
                f"the stand-in {model.checkpoint} is not here",
                "run from the root of the repository, or give the directory of a checkpoint, or ORG/NAME",
            )
        return model
    if not Path(name).is_dir() and not is_hub_id(name):
        raise SpecterError(
            f"{name} is no model of conf/model, no directory and no hub id",
            f"give a checkpoint directory, ORG/NAME, or one of: {', '.join(sorted(stated))}",
        )
    directory = find_checkpoint(name, console)
    for path in stated.values():
        model = load_typed(ModelConfig, path)
        if Path(model.checkpoint).is_dir() and Path(model.checkpoint).samefile(directory):
            return model
    read_spec(directory)
    home = drafts_home() / re.sub(r"[^\w.-]+", "--", name if is_hub_id(name) else str(directory.resolve()).strip("/"))
    return ModelConfig(
        name=Path(name).name,
        checkpoint=str(directory),
        checkpoint_kind="hub",
        quantized=str(home / "int4"),
        residual=str(home / "residual"),
        charged_as="itself",
        tokenizer=str(_tokenizer_of(directory)),
        residents={},
        title=Path(name).name,
    )


def _tokenizer_of(directory: Path) -> Path:
    """Its own tokenizer.json, or the one beside it, which several checkpoints may share."""
    own, shared = directory / "tokenizer.json", directory.resolve().parent / "tokenizer.json"
    return shared if shared.is_file() and not own.is_file() else own


def find_system(name: str | None, model: ModelConfig, console: Console, *, on_cpu: bool = False) -> SystemConfig:
    """The system asked for, or the fastest one whose files exist; says why it is not a faster one.

    Args:
        on_cpu: the CPU computes: it decodes residual experts at a tenth of the speed.
    """
    if name is None:
        quantize = f"specter quantize {model.checkpoint}"
        if not (Path(model.quantized) / gptq_format.REPORT_FILE).is_file():
            name = "lru"
            console.print(f"no INT4 draft in {model.quantized}: decoding without speculation. To make it: {quantize}")
        elif on_cpu:
            name = "specter_deadline"
        elif not has_residual(model):
            name = "specter_deadline"
            console.print(f"no residual experts in {model.residual}: moving 16-bit ones. To make them: {quantize}")
        else:
            name = "specter_plus"
    return load_typed(SystemConfig, CONF / "system" / f"{name}.yaml")


def has_residual(model: ModelConfig) -> bool:
    return (Path(model.residual) / residual_directory.REPORT_FILE).is_file()


def find_hardware(name: str | None) -> tuple[Hardware, str]:
    """The machine, and its clock: this machine's GPU where there is one and none is named."""
    if name is not None or not torch.cuda.is_available():
        return load_typed(Hardware, CONF / "hardware" / f"{name or _NO_GPU}.yaml"), "virtual"
    gpu = torch.cuda.get_device_name()
    profile = next((file for part, file in _GPUS.items() if part in gpu), _UNKNOWN_GPU)
    free, _ = torch.cuda.mem_get_info()
    hardware = load_typed(Hardware, CONF / "hardware" / f"{profile}.yaml")
    return replace(hardware, device_memory_bytes=int(free * (1 - _DEVICE_MARGIN)), title=gpu), "device"


def useful_threads(checkpoint: Path) -> int:
    """Threads of torch: all that this process may use, or one for a narrow model, which several slow down."""
    return len(os.sched_getaffinity(0)) if read_spec(checkpoint).hidden >= _WIDE else 1


def parse_bytes(text: str) -> int | None:
    """Bytes of a text such as 24GB or 512MiB; None if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)", text)
    return None if found is None else round(float(found[1]) * _UNITS[found[2]])


def find_budget(text: str | None, config: RunConfig) -> BudgetConfig:
    """A tier, or what a device memory leaves for experts; by default the whole card.

    Raises SpecterError: neither a tier nor a size; DoesNotFit: too little memory for the parts beside the experts.
    """
    tiers = config.model.residents
    if text in tiers:
        return BudgetConfig(text)
    memory = config.hardware.device_memory_bytes if text is None else parse_bytes(text)
    if memory is None:
        known = ", ".join([*tiers, "a size such as 24GB"])
        raise SpecterError(f"budget {text!r} is neither a tier of {config.model.name} nor a size", f"use {known}")
    costs = build_costs(config)
    # Blobs are bought with what the parts of a system with the INT4 draft and 16-bit experts leave.
    speculating = SystemConfig("reference", speculative=True)
    fixed = sum(fixed_bytes(costs, speculating if config.decodes else config.system).values())
    if memory - fixed < MIN_SLOTS * costs.expert_bytes:
        raise DoesNotFit(
            f"{config.system.name} on {config.model.name} needs {fixed / 1e9:.1f} GB of device memory beside "
            f"{MIN_SLOTS} experts of {costs.expert_bytes / 1e6:.0f} MB; the budget is {memory / 1e9:.1f} GB",
            "give a larger budget, a smaller model, or a system without a draft (--system lru)",
        )
    policy = "same_bytes" if config.decodes else "same_experts"
    return BudgetConfig("card", num_bytes=memory - fixed, policy=policy)


def capacity_for(num_tokens: int) -> int:
    """Positions of a KV cache for so many tokens: some lengths share kernels and graphs."""
    return -(-num_tokens // _KV_STEP) * _KV_STEP


def configure(
    choice: Choice, console: Console, num_tokens: int, sampling: SamplingConfig, *, is_plan: bool = False
) -> RunConfig:
    """The run of a choice.

    Args:
        num_tokens: of the longest prompt with its continuation.
        is_plan: nothing will run: missing residual experts are assumed to have `ASSUMED_BITS` per weight.
    Raises:
        SpecterError: as the functions above, or `validate`.
    """
    model = find_model(choice.model, console, is_plan=is_plan)
    quantized, residual = str(choice.int4 or model.quantized), str(choice.residual or model.residual)
    model = replace(model, quantized=quantized, residual=residual)
    hardware, clock = find_hardware(choice.hardware)
    system = find_system(choice.system, model, console, on_cpu=clock == "virtual" and not is_plan)
    is_assumed = is_plan and system.codec == RESIDUAL and not has_residual(model)
    config = RunConfig(
        model=model,
        system=system,
        budget=BudgetConfig("high"),
        dataset=NO_DATASET,
        sampling=sampling,
        hardware=hardware,
        extensions=["baselines"],
        clock="virtual" if is_plan else clock,
        payload_bits=ASSUMED_BITS if is_assumed else None,
        k=choice.k or model.published_k,
        prompt_tokens=0,
        warmup_tokens=0,
        kv_capacity=capacity_for(num_tokens),
    )
    config = with_local_paths(config, console)
    if clock == "virtual" and not is_plan:  # more threads slow down the host beside a device
        config = replace(config, threads=useful_threads(Path(config.model.checkpoint)))
    validate(config)
    # What the CPU runs is a demonstration of offloading, not a use of a card.
    default = "high" if clock == "virtual" and "high" in model.residents and not is_plan else None
    return replace(config, budget=find_budget(choice.budget or default, config))
