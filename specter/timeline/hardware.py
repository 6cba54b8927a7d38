"""The rates of a machine, for the virtual clock and the floors.

conf/hardware/ has one file per machine, with the source of every number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from specter.errors import SpecterError
from specter.timeline.base import Work

NS_PER_S = 1_000_000_000


def ceil_div(dividend: int, divisor: int) -> int:
    """Rounds up, as the virtual clock does everywhere."""
    return -(-dividend // divisor)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU, its host and the link between them. Rates are achieved ones, not peaks, unless `source` says so."""

    name: str
    hbm_bytes_per_s: int
    device_memory_bytes: int
    bf16_flops: int  # operations per second; a multiply-add is two
    link_bytes_per_s: int  # host to device, pinned, large copies
    link_latency_ns: int  # per copy, on the link lane
    launch_ns: int  # host time per launch
    kernel_ns: int  # device time per kernel beyond its bytes and flops
    sync_ns: int  # host time of a blocking read of a small result that exists already
    source: str  # one line per number: "<field>: where it comes from"
    title: str = ""  # how figures and tables show it

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str) -> Hardware:
        """Builds from flat keys.

        Raises:
            SpecterError: unknown or missing key, wrong type, a rate below 1 or a time below 0.
        """
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - names):
            raise SpecterError(f"{where}: unknown hardware key {unknown[0]!r}", f"use only {', '.join(sorted(names))}")
        if missing := sorted(names - set(values) - {"title"}):
            raise SpecterError(f"{where}: hardware key {missing[0]!r} is missing", "add it (see conf/hardware/)")
        for key, value in values.items():
            if key in ("name", "source", "title"):
                if not isinstance(value, str) or not (value.strip() or key == "title"):
                    raise SpecterError(f"{where}: {key} is {value!r}", "give a text that is not empty")
                continue
            least = 0 if key.endswith("_ns") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise SpecterError(f"{where}: {key} is {value!r}", f"give a whole number of at least {least}")
        return cls(**values)

    def compute_ns(self, work: Work) -> int:
        """Roofline: max(bytes / HBM, flops / peak), rounded up, plus a floor per kernel."""
        memory = -(-work.hbm_bytes * NS_PER_S // self.hbm_bytes_per_s)
        arithmetic = -(-work.flops * NS_PER_S // self.bf16_flops)
        return (memory if memory > arithmetic else arithmetic) + work.kernels * self.kernel_ns

    def hbm_ns(self, num_bytes: int) -> int:
        """Time to move these bytes through device memory."""
        return ceil_div(num_bytes * NS_PER_S, self.hbm_bytes_per_s)

    def copy_ns(self, num_bytes: int) -> int:
        """Time that one copy of `num_bytes` occupies the link."""
        return self.link_latency_ns + -(-num_bytes * NS_PER_S // self.link_bytes_per_s)


def load_hardware(path: Path) -> Hardware:
    """Reads one profile, e.g. conf/hardware/a100_40gb_pcie4.yaml; its name is the file's stem.

    Raises:
        SpecterError: no such file, not a YAML mapping, or a bad key or value.
    """
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml"))) or "none"
        raise SpecterError(f"no hardware profile {path}", f"choose one of those in {path.parent}: {known}")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise SpecterError(f"{path} cannot be read: {error}", "repair the YAML") from None
    if not isinstance(values, dict):
        raise SpecterError(f"{path} is not a mapping", "write one `key: value` per line")
    hardware = Hardware.from_mapping({str(key): value for key, value in values.items()}, str(path))
    if hardware.name != path.stem:
        raise SpecterError(f"{path}: name is {hardware.name!r}", f"name it {path.stem!r}, like its file")
    return hardware
