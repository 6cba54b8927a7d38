"""The virtual clock against an independent simulator, and against three rounds computed by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specter.timeline.base import LaneTotals, Timeline, Work, difference
from specter.timeline.hardware import Hardware
from specter.timeline.virtual import VirtualEvent, VirtualTimeline
from tests.timeline.event_simulator import Command, simulate


def nothing() -> None:
    return None


def make_hardware(**numbers: Any) -> Hardware:
    return Hardware(name="test", device_memory_bytes=1, source="test", **numbers)


# 1 GB/s link = 1 byte per ns, 2 GB/s device memory = 2 bytes per ns, 4 flops per ns.
ROUND_NUMBERS = make_hardware(
    hbm_bytes_per_s=2_000_000_000,
    bf16_flops=4_000_000_000,
    link_bytes_per_s=1_000_000_000,
    link_latency_ns=10,
    launch_ns=5,
    kernel_ns=1,
    sync_ns=20,
)
#                                                             device            host
DRAFT = Work("draft", hbm_bytes=196, flops=0, kernels=2, launches=1)  # 98 + 2 = 100      5
MIX = Work("mix", hbm_bytes=76, flops=8, kernels=2, launches=2)  # 38 + 2 = 40      10
EXPERTS = Work("experts", hbm_bytes=58, flops=0, kernels=1, launches=1)  # 29 + 1 = 30   5
COMBINE = Work("combine", hbm_bytes=7, flops=0, kernels=1, launches=1)  # ceil(3.5) + 1 = 5   5
HEAD = Work("head", hbm_bytes=10, flops=76, kernels=1, launches=1)  # max(5, 19) + 1 = 20   5
PAYLOAD = 90  # one copy: 10 + 90 = 100 on the link, 5 on the host


class Rounds:
    """The three rounds below, one after another on one timeline (one MoE layer)."""

    def __init__(self) -> None:
        self.timeline = VirtualTimeline(ROUND_NUMBERS, trace=True)

    def compute(self, work: Work, *after: VirtualEvent) -> VirtualEvent:
        return self.timeline.compute(work, nothing, after)[1]

    def copy(self, *after: VirtualEvent) -> VirtualEvent:
        return self.timeline.copy(PAYLOAD, nothing, after)

    def on_demand(self) -> None:
        routing = self.compute(MIX)  # host 0-10; compute 10-50
        self.timeline.wait(routing)  # host max(10, 50) + 20 = 70
        miss = self.copy()  # host 75; link 75-175
        self.compute(EXPERTS, miss)  # host 80; ready at 80, copy at 175: stall 95; compute 175-205
        self.compute(COMBINE)  # host 85; compute 205-210
        token = self.compute(HEAD)  # host 90; compute 210-230
        self.timeline.wait(token)  # host 250

    def prefetched(self) -> None:
        first = self.compute(DRAFT)  # host 255; compute 255-355
        self.timeline.wait(first)  # host 375
        prefetch = self.copy()  # host 380; link 380-480
        second = self.compute(DRAFT)  # host 385; compute 385-485
        self.timeline.wait(second)  # host 505
        routing = self.compute(MIX)  # host 515; compute 515-555
        self.timeline.wait(routing)  # host 575
        self.compute(EXPERTS)  # hits: host 580; compute 580-610
        self.compute(EXPERTS, prefetch)  # host 585; compute 610-640, copy long done
        self.compute(COMBINE)  # host 590; compute 640-645
        token = self.compute(HEAD)  # host 595; compute 645-665
        self.timeline.wait(token)  # host 685

    def late_hit_and_miss(self) -> None:
        draft = self.compute(DRAFT)  # host 690; compute 690-790
        prefetches = self.copy(), self.copy()  # host 695, 700; link 695-795, 795-895
        self.timeline.wait(draft)  # host 810
        routing = self.compute(MIX)  # host 820; compute 820-860
        self.timeline.wait(routing)  # host 880
        hits = self.compute(EXPERTS)  # host 885; compute 885-915
        fetch = self.copy(hits)  # into a hit's slot. host 890; link free at 895, slot at 915; link 915-1015
        self.compute(EXPERTS, *prefetches)  # host 895, lane 915, copies 895; compute 915-945, no stall
        self.compute(EXPERTS, fetch)  # host 900; lane 945, copy 1015: stall 70; compute 1015-1045
        self.compute(COMBINE)  # host 905; compute 1045-1050
        token = self.compute(HEAD)  # host 910; compute 1050-1070
        self.timeline.wait(token)  # host 1090


EXPECTED = [
    # host after, (compute busy, link busy, stall, bytes, copies) of the round, compute spans, link spans
    (250, LaneTotals(95, 100, 95, 90, 1), [(10, 50), (175, 205), (205, 210), (210, 230)], [(75, 175)]),
    (
        685,
        LaneTotals(325, 100, 0, 90, 1),
        [(255, 355), (385, 485), (515, 555), (580, 610), (610, 640), (640, 645), (645, 665)],
        [(380, 480)],
    ),
    (
        1090,
        LaneTotals(255, 300, 70, 270, 3),
        [(690, 790), (820, 860), (885, 915), (915, 945), (1015, 1045), (1045, 1050), (1050, 1070)],
        [(695, 795), (795, 895), (915, 1015)],
    ),
]


def test_three_rounds_by_hand() -> None:
    rounds = Rounds()
    timeline = rounds.timeline
    assert timeline.ops is not None
    for play, expected in zip((rounds.on_demand, rounds.prefetched, rounds.late_hit_and_miss), EXPECTED, strict=True):
        host, totals, compute_spans, link_spans = expected
        before, num_ops = timeline.totals(), len(timeline.ops)
        play()
        ops = timeline.ops[num_ops:]
        assert timeline.now_ns() == host
        assert difference(timeline.totals(), before) == totals
        assert [(op.start_ns, op.end_ns) for op in ops if op.lane == "compute"] == compute_spans
        assert [(op.start_ns, op.end_ns) for op in ops if op.lane == "link"] == link_spans


def random_case(seed: int) -> tuple[list[Command], dict[str, int]]:
    """A random program on a random machine; every fifth seed has instantaneous work and launches in it."""
    rng = random.Random(seed)
    zeros = seed % 5 == 0
    machine = {
        "hbm_bytes_per_s": rng.randint(10**8, 10**10),
        "bf16_flops": rng.randint(10**8, 10**10),
        "link_bytes_per_s": rng.randint(10**8, 10**10),
        "link_latency_ns": rng.randint(0, 50),
        "launch_ns": 0 if zeros else rng.randint(1, 60),
        "kernel_ns": rng.randint(0, 20),
        "sync_ns": rng.choice([0, 14, 90]),
    }
    program: list[Command] = []
    issued: list[int] = []
    for _ in range(rng.randint(5, 60)):
        kind = rng.choices(["compute", "copy", "wait"], weights=[5, 4, 2])[0]
        if kind == "wait":
            if issued:
                program.append(Command("wait", (rng.choice(issued),)))
            continue
        ops = tuple(rng.sample(issued[-8:], k=min(len(issued[-8:]), rng.choice([0, 0, 1, 1, 2, 3]))))
        issued.append(len(program))
        program.append(
            Command(
                kind,
                ops,
                num_bytes=rng.randint(0 if zeros else 1, 1000),
                flops=rng.randint(0, 1000) if kind == "compute" else 0,
                kernels=rng.randint(0, 4) if kind == "compute" else 0,
                launches=rng.randint(0 if zeros else 1, 4) if kind == "compute" else 1,
            )
        )
    return program, machine


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_agrees_with_event_simulator(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        program, machine = random_case(seed)
        expected = simulate(program, machine)
        timeline = VirtualTimeline(make_hardware(**machine), trace=True)
        assert timeline.ops is not None
        events: dict[int, VirtualEvent] = {}
        for index, command in enumerate(program):
            after = [events[op] for op in command.ops]
            if command.kind == "compute":
                work = Work(str(index), command.num_bytes, command.flops, command.kernels, command.launches)
                _, events[index] = timeline.compute(work, nothing, after)
            elif command.kind == "copy":
                events[index] = timeline.copy(command.num_bytes, nothing, after, label=str(index))
            else:
                timeline.wait(after[0])
            where = f"seed {seed}, command {index}"
            assert timeline.now_ns() == expected.host_after[index], where
            for number, event in events.items():
                assert event.end_ns == expected.ops[number].end, where
                assert timeline.is_done(event) == (expected.ops[number].end <= timeline.now_ns()), where
        spans = {int(op.label): op for op in timeline.ops if op.lane != "host"}
        assert spans.keys() == expected.ops.keys()
        for index, op in expected.ops.items():
            found = spans[index]
            assert found[2:4] + found[6:] == (op.start, op.end, op.stall), f"seed {seed}, command {index}"
        kinds = {kind: [op for op in expected.ops.values() if op.command.kind == kind] for kind in ("compute", "copy")}
        assert timeline.totals() == LaneTotals(
            compute_busy_ns=sum(op.end - op.start for op in kinds["compute"]),
            link_busy_ns=sum(op.end - op.start for op in kinds["copy"]),
            stall_ns=sum(op.stall for op in kinds["compute"]),
            copied_bytes=sum(op.command.num_bytes for op in kinds["copy"]),
            num_copies=len(kinds["copy"]),
        )


def test_random_schedules_reach_every_case() -> None:
    stalls = waits = queued = 0
    for seed in range(200):
        program, machine = random_case(seed)
        outcome = simulate(program, machine)
        stalls += sum(op.stall > 0 for op in outcome.ops.values())
        waits += sum(command.kind == "wait" for command in program)
        queued += sum(op.start > outcome.host_after[index] for index, op in outcome.ops.items())
    assert min(stalls, waits, queued) > 200


def test_runs_at_once_in_issue_order() -> None:
    timeline: Timeline = VirtualTimeline(ROUND_NUMBERS)
    calls: list[str] = []
    late = timeline.copy(10**6, lambda: calls.append("copy"))
    result, _ = timeline.compute(MIX, lambda: calls.append("compute") or 7, after=[late])
    assert (calls, result) == (["copy", "compute"], 7)
    assert not timeline.is_done(late)


def test_elapsed_needs_the_host_to_have_waited() -> None:
    timeline = VirtualTimeline(ROUND_NUMBERS)
    _, start = timeline.compute(MIX, nothing)
    _, end = timeline.compute(DRAFT, nothing)
    with pytest.raises(RuntimeError, match="has not waited"):
        timeline.elapsed_ns(start, end)
    timeline.wait(end)
    assert timeline.elapsed_ns(start, end) == 100


def test_wait_first_ends_with_the_earliest_and_charges_no_read() -> None:
    timeline = VirtualTimeline(ROUND_NUMBERS, trace=True)
    late, later = timeline.copy(PAYLOAD, nothing), timeline.copy(PAYLOAD, nothing)
    _, done = timeline.compute(DRAFT, nothing)
    timeline.wait_first([later, done, late])
    assert timeline.now_ns() == late.end_ns == 105
    assert timeline.is_done(late) and not timeline.is_done(done)
    timeline.wait_first([late, later])  # has happened: no time passes
    assert timeline.now_ns() == 105
