"""`python -m specter.calibrate name=mine out=conf/hardware/mine.yaml`: measures this machine's GPU, and writes the
hardware profile that the virtual clock charges by; every number has its spread and where it comes from. Two minutes.

Beside the profile, `<name>.json` keeps all samples: both directions of the link and ordinary memory, and the runtime's
graphs on the first layers of `model`, at full size. Loading that takes its experts' bytes of host memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from specter import provenance
from specter.arguments import run_command
from specter.calibrate import profile
from specter.calibrate.profile import Measured
from specter.config import BudgetConfig, DatasetConfig, ModelConfig, RunConfig, SamplingConfig, SystemConfig
from specter.errors import SpecterError
from specter.files import write_json
from specter.resolve import check_paths
from specter.timeline.hardware import Hardware
from specter.typed import load_typed

CONF = Path("conf/model")
NUM_TOKENS = 48  # of plain decoding, and of its warm-up


@dataclass(frozen=True)
class Options:
    """Measures this machine and writes its hardware profile."""

    name: str = "calibrated"  # of the profile
    title: str = ""  # in figures; by default the GPU's name
    model: str = "deepseek_v2_lite"  # a file of conf/model: whose kernels are measured, at full size
    out: Path | None = None  # by default results/hardware/NAME.yaml
    commit: str = ""  # of the code, where there is no git


def run_config(model: ModelConfig, num_experts: int) -> RunConfig:
    """Plain decoding through the cache, with slots for all experts."""
    return RunConfig(
        model=model,
        system=SystemConfig(name="lru"),
        budget=BudgetConfig("all", experts_per_layer=float(num_experts), policy="same_experts"),
        dataset=DatasetConfig("none", "shipped", "", ""),
        sampling=SamplingConfig(kind="greedy"),
        hardware=Hardware("none", 1, 2**50, 1, 1, 0, 0, 0, 0, "a placeholder until this machine is measured"),
        clock="device",
        k=1,
        max_new_tokens=NUM_TOKENS,
        warmup_tokens=NUM_TOKENS,
    )


def calibrate(config: RunConfig, options: Options, console: Console) -> tuple[Hardware, dict[str, Any]]:
    """The profile of this machine, and all samples.

    Raises SpecterError: a faulty checkpoint, too little memory, or times that no profile explains.
    """
    from specter.calibrate import rates

    device, start = torch.device("cuda"), time.perf_counter()
    numbers, samples = dict[str, Measured](), dict[str, Any]()
    name, title = options.name, options.title or torch.cuda.get_device_name(device)

    def section(what: str, measure: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
        begin = time.perf_counter()
        samples[what] = found = measure()
        gc.collect()
        torch.cuda.empty_cache()
        console.print(f"{what}: {time.perf_counter() - begin:.1f} s")
        return found

    def so_far(*missing: str) -> Hardware:
        return profile.hardware(name, title, {**numbers, **dict.fromkeys(missing, Measured(0, ""))})

    numbers["device_memory_bytes"] = Measured(torch.cuda.mem_get_info(device)[1], "as the driver reports")
    numbers |= profile.link(section("link, ms by bytes", lambda: rates.copies(device))["to the device"])
    alone = section("device, ms", lambda: rates.device_alone(device))
    memory, flops = (alone[what].rate(amount * 1e3) for what, amount in rates.AMOUNTS.items())
    numbers["hbm_bytes_per_s"] = profile.stated(memory, 1, "device copy, read and written bytes")
    numbers["bf16_flops"] = profile.stated(flops, 1, f"BF16 product of n={rates.FLOPS_SIZE}")
    numbers |= profile.kernels(alone["graph of one kernel"], alone["graph of many"], rates.NUM_KERNELS)
    host = section("host, us", lambda: rates.host_calls(device))
    numbers["launch_ns"] = profile.stated(host["copy"], 1e3, "a copy issued through the device clock")
    numbers["issue_ns"] = profile.stated(host["issue"], 1e3, "a captured operation issued through the device clock")
    decoded = section("decoding, us per expert", lambda: rates.decode_us(config, device))
    numbers["int_ops"] = profile.decode(decoded["us"], decoded["weights"])

    runtime = rates.RuntimeRates.load(config, console)
    waves, charged = runtime.waves_of(section("graphs, ms", runtime.graphs), so_far("wave_ns", "sync_ns"), config)
    numbers["wave_ns"] = profile.wave(waves, charged)
    hardware = so_far("sync_ns")
    plain = section("plain decoding, ms per token", lambda: runtime.plain(config, hardware))
    numbers["sync_ns"] = profile.sync(plain["measured"], plain["charged"], runtime.model.spec.num_moe_layers + 1)
    samples["seconds"] = round(time.perf_counter() - start, 1)
    return so_far(), samples


def main(options: Options) -> None:
    """Raises SpecterError: no CUDA device, no draft, or a section that cannot be measured."""
    if not torch.cuda.is_available():
        raise SpecterError("no CUDA device", "run this on the machine whose profile is wanted")
    from specter.models.full_size import FULL_SIZE

    model = load_typed(ModelConfig, CONF / f"{options.model}.yaml")
    config = run_config(model, FULL_SIZE[model.charged_as].num_experts)
    check_paths(replace(config, system=SystemConfig(name="specter", speculative=True)))
    where = provenance.of_device(torch.device("cuda"), options.commit)
    console = Console(width=120)
    found, samples = calibrate(config, options, console)
    out = options.out or Path("results/hardware") / f"{options.name}.yaml"
    from specter.calibrate.rates import as_json

    write_json(out.with_suffix(".json"), {"provenance": where, "samples": as_json(samples)})
    profile.write(out, found, where)
    console.print(out.read_text(), soft_wrap=True)


if __name__ == "__main__":
    run_command(main, Options)
