"""The rates of a machine, for the virtual clock and the floors.

conf/hardware/ has one file per machine, with the source of every number.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from specter.errors import SpecterError
from specter.timeline.base import Work

NS_PER_S = 1_000_000_000


def ceil_div(dividend: int, divisor: int) -> int:
    """Rounds up, as the virtual clock does everywhere."""
    return -(-dividend // divisor)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU, its host and the link between them. Rates are achieved ones, not peaks, unless `source` says so.

    Raises SpecterError: an empty text, a rate below 1 or a time below 0.
    """

    name: str
    hbm_bytes_per_s: int
    device_memory_bytes: int
    bf16_flops: int  # operations per second; a multiply-add is two
    link_bytes_per_s: int  # host to device, pinned, large copies
    link_latency_ns: int  # per copy, on the link lane
    launch_ns: int  # host time per launch
    kernel_ns: int  # device time per kernel beyond its bytes and flops
    sync_ns: int  # host time of a blocking read of a small result that exists, and of the Python that follows it
    source: str  # one line per number: "<field>: where it comes from"
    title: str = ""  # how figures and tables show it
    int_ops: int = 0  # 32-bit integer operations per second; 0: not stated, and codecs that decode are refused
    # Of the device runtime, which captures each operation of the engine as a CUDA graph. `issue_ns` 0: not measured on
    # this machine, and the target's kernels are launched one by one.
    issue_ns: int = 0  # host time to issue a captured operation, its events and its Python included
    graph_ns: int = 0  # device time of a captured operation beyond its kernels
    wave_ns: int = 0  # device time of a wave of experts beyond its bytes and kernels: few programs, a long reduction

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name.endswith("_ns") or field.name == "int_ops" else 1
            if isinstance(value, str) and not value.strip() and field.name != "title":
                raise SpecterError(f"hardware.{field.name} is {value!r}", "give a text that is not empty")
            if isinstance(value, int) and value < least:
                raise SpecterError(f"hardware.{field.name} is {value}", f"give a whole number of at least {least}")

    def compute_ns(self, work: Work) -> int:
        """Roofline: max(bytes / HBM, operations / rate), rounded up, plus a floor per kernel, graph and wave."""
        memory = -(-work.hbm_bytes * NS_PER_S // self.hbm_bytes_per_s)
        arithmetic = -(-work.flops * NS_PER_S // self.bf16_flops)
        if work.int_ops:
            arithmetic = max(arithmetic, -(-work.int_ops * NS_PER_S // self.int_ops))
        fixed = work.kernels * self.kernel_ns + work.waves * self.wave_ns + (self.graph_ns if work.launches else 0)
        return (memory if memory > arithmetic else arithmetic) + fixed

    def host_ns(self, work: Work) -> int:
        """Host time to issue `work`: one graph where the profile states what that costs, or else its launches."""
        return self.issue_ns if self.issue_ns and work.launches else work.launches * self.launch_ns

    def hbm_ns(self, num_bytes: int) -> int:
        """Time to move these bytes through device memory."""
        return ceil_div(num_bytes * NS_PER_S, self.hbm_bytes_per_s)

    def copy_ns(self, num_bytes: int) -> int:
        """Time that one copy of `num_bytes` occupies the link."""
        return self.link_latency_ns + -(-num_bytes * NS_PER_S // self.link_bytes_per_s)
