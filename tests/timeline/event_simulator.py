"""A second opinion on the virtual clock: a discrete-event simulator that shares no code or method with it.

Where `VirtualTimeline` computes each start in issue order from running maxima, this steps time from event to
event: the host is a process that works through its program, each lane is a queue that starts its head once
all that it waits for is done, and stall is integrated over time.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True)
class Command:
    """One call of the host. `ops` are numbers of earlier compute or copy commands."""

    kind: str  # compute | copy | wait
    ops: tuple[int, ...] = ()
    num_bytes: int = 0
    flops: int = 0
    kernels: int = 0
    launches: int = 1


@dataclass
class Op:
    command: Command
    start: int = -1  # not yet
    end: int = -1
    done: bool = False
    stall: int = 0


@dataclass
class Lane:
    queue: list[int] = field(default_factory=list)
    running: int | None = None


@dataclass
class Outcome:
    ops: dict[int, Op]
    host_after: list[int]  # host time after each command


def duration(command: Command, machine: dict[str, int]) -> int:
    """Exact rationals, rounded up once per term."""
    if command.kind == "copy":
        return machine["link_latency_ns"] + math.ceil(
            Fraction(command.num_bytes, machine["link_bytes_per_s"]) * 1_000_000_000
        )
    seconds = max(
        Fraction(command.num_bytes, machine["hbm_bytes_per_s"]), Fraction(command.flops, machine["bf16_flops"])
    )
    return math.ceil(seconds * 1_000_000_000) + command.kernels * machine["kernel_ns"]


def simulate(program: list[Command], machine: dict[str, int]) -> Outcome:
    ops = {index: Op(command) for index, command in enumerate(program) if command.kind != "wait"}
    lanes = {"compute": Lane(), "copy": Lane()}
    host_after: list[int] = []
    host_wakes: int | None = None  # end of what the host is busy with
    now, alarms = 0, [0]

    def alarm(at: int) -> int:
        heapq.heappush(alarms, at)
        return at

    def step_host() -> bool:
        nonlocal host_wakes
        current = len(host_after)
        if host_wakes is not None:
            if host_wakes > now:
                return False
            if program[current].kind != "wait":
                lanes[program[current].kind].queue.append(current)
            host_after.append(now)
            host_wakes = None
            return True
        if current == len(program):
            return False
        command = program[current]
        if command.kind == "wait":
            if not ops[command.ops[0]].done:
                return False
            host_wakes = alarm(now + machine["sync_ns"])
        else:
            host_wakes = alarm(now + machine["launch_ns"] * (1 if command.kind == "copy" else command.launches))
        return True

    def step_lane(lane: Lane) -> bool:
        if lane.running is not None:
            op = ops[lane.running]
            if op.end < 0 or op.end > now:
                return False
            op.done, lane.running = True, None
            return True
        if not lane.queue or not all(ops[index].done for index in ops[lane.queue[0]].command.ops):
            return False
        lane.running = lane.queue.pop(0)
        op = ops[lane.running]
        op.start, op.end = now, alarm(now + duration(op.command, machine))
        return True

    while alarms:
        following = heapq.heappop(alarms)
        compute = lanes["compute"]
        if compute.running is None and compute.queue:
            head = ops[compute.queue[0]]
            missing = [index for index in head.command.ops if not ops[index].done]
            if missing and all(program[index].kind == "copy" for index in missing):
                head.stall += following - now
        now = following
        while step_host() or step_lane(lanes["compute"]) or step_lane(lanes["copy"]):
            pass
    return Outcome(ops, host_after)
