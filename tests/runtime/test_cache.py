"""The expert cache alone: waves, late hits, protections, needs, and the order of copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from specter.experts.cache import ExpertCache, Wave
from specter.experts.policies.base import Plan, Pool, layer_quotas
from specter.experts.policies.lru import LruEviction
from specter.experts.residency import Residency, State
from specter.experts.transfer import Backend, Transfer
from specter.models.spec import ExpertId
from specter.timeline.base import Event, Work
from specter.timeline.virtual import VirtualEvent, VirtualTimeline
from tests.runtime.fakes import MACHINE

COMPUTE = Work("compute", hbm_bytes=1000, flops=0, kernels=1, launches=1)


def plan(loads: list[ExpertId], protect: list[ExpertId]) -> Plan:
    mask = np.zeros((2, 8), np.bool_)
    for expert in protect:
        mask[expert] = True
    return Plan(loads, mask)


class Bench:
    """A cache of `num_slots` slots over two layers, with copies of 1 ms and a log of the moves."""

    def __init__(self, num_slots: int) -> None:
        self.timeline = VirtualTimeline(MACHINE)
        self.moved: list[tuple[ExpertId, int]] = []
        backend = Backend(self.timeline, lambda expert, slot: self.moved.append((expert, slot)))
        self.transfer = Transfer(backend, lambda expert: MACHINE.link_bytes_per_s // 1000)
        self.residency = Residency(num_slots)
        self.cache = ExpertCache(self.residency, LruEviction(Pool(layer_quotas(num_slots, 2), 8, 1)), self.transfer)

    def verify(self, layer: int, experts: list[int]) -> list[list[int]]:
        """Computes the waves of one layer; returns the experts of each."""
        seen = []
        for wave in self.waves(layer, experts):
            seen.append(wave.experts)
            self.compute(wave)
        return seen

    def waves(self, layer: int, experts: list[int]) -> Iterator[Wave]:
        _, known = self.timeline.compute(COMPUTE, lambda: None)
        self.timeline.wait(known)
        return self.cache.waves(layer, np.bincount(experts, minlength=8), known)

    def settle_need(self) -> int:
        return self.cache.queue.settle(self.cache.queue.num_met())

    def prefetch(self, plan: Plan) -> list[Event]:
        _, known = self.timeline.compute(COMPUTE, lambda: None)
        self.timeline.wait(known)
        return self.cache.submit(replace(plan, at_once=True), known)

    def compute(self, wave: Wave) -> None:
        _, done = self.timeline.compute(COMPUTE, lambda: None, after=wave.after)
        self.cache.release(wave, done)


def test_hits_come_first_and_together_then_arrivals_one_by_one() -> None:
    bench = Bench(8)
    bench.cache.place([ExpertId(0, 3), ExpertId(0, 5)])
    assert bench.verify(0, [1, 3, 4, 5]) == [[3, 5], [1], [4]]
    counters = bench.cache.counters
    assert (counters.num_hits, counters.num_late_hits, counters.num_misses) == (2, 0, 2)


def test_a_loading_prefetch_counts_as_a_late_hit() -> None:
    bench = Bench(8)
    copies = bench.prefetch(plan([ExpertId(0, 1), ExpertId(0, 2)], []))
    bench.timeline.wait(copies[0])
    assert bench.verify(0, [1, 2]) == [[1], [2]]
    counters = bench.cache.counters
    assert (counters.num_hits, counters.num_late_hits, counters.num_misses) == (1, 1, 0)
    assert (counters.num_prefetched, counters.num_prefetched_used) == (2, 2)


def test_a_reused_slot_is_filled_behind_the_compute_that_reads_it() -> None:
    bench = Bench(2)
    bench.cache.place([ExpertId(0, 0), ExpertId(1, 0)])
    slow = Work("slow", hbm_bytes=MACHINE.hbm_bytes_per_s, flops=0, kernels=0, launches=1)  # one second
    for wave in bench.waves(0, [0, 1]):
        _, done = bench.timeline.compute(slow, lambda: None, after=wave.after)
        bench.cache.release(wave, done)
    bench.timeline.wait(done)
    assert bench.timeline.now_ns() > 2_001_000_000, "expert 1's copy waited for expert 0's compute"
    assert bench.moved[-1] == (ExpertId(0, 1), bench.moved[0][1])


def test_a_fetch_displaces_experts_protected_for_later_layers() -> None:
    bench = Bench(2)
    bench.prefetch(plan([ExpertId(1, 6)], []))
    bench.cache.place([ExpertId(1, 6), ExpertId(1, 7)])
    bench.prefetch(plan([], [ExpertId(1, 6), ExpertId(1, 7)]))
    assert bench.verify(0, [0, 1, 2]) == [[0], [1], [2]]


def test_a_fetch_waits_for_a_slot_that_a_prefetch_fills() -> None:
    bench = Bench(2)
    bench.prefetch(plan([ExpertId(1, 6), ExpertId(1, 7)], []))
    assert {bench.residency.state(ExpertId(1, e)) for e in (6, 7)} == {State.LOADING}
    assert bench.verify(0, [0, 1, 2]) == [[0], [1], [2]]


def test_a_prefetch_without_an_evictable_expert_is_left_out() -> None:
    bench = Bench(2)
    bench.cache.place([ExpertId(0, 0), ExpertId(1, 0)])
    assert bench.prefetch(plan([ExpertId(0, 1)], [ExpertId(0, 0)])) == []
    assert bench.cache.counters.num_prefetched == 0


def test_protection_of_a_layer_ends_with_its_verification() -> None:
    bench = Bench(2)
    bench.cache.place([ExpertId(0, 0), ExpertId(1, 0)])
    bench.prefetch(plan([], [ExpertId(0, 0)]))
    bench.verify(0, [1])
    assert bench.residency.state(ExpertId(0, 0)) is State.ABSENT


def test_placed_experts_cost_no_copy_and_are_displaced_in_their_order() -> None:
    bench = Bench(6)
    bench.cache.place([ExpertId(0, 2), ExpertId(1, 4), ExpertId(0, 3), ExpertId(0, 1), ExpertId(1, 0), ExpertId(1, 5)])
    assert bench.timeline.totals().num_copies == 0
    bench.verify(0, [7])
    bench.verify(0, [6])
    states = [bench.residency.state(ExpertId(0, expert)) for expert in (2, 3, 1)]
    assert states == [State.ABSENT, State.ABSENT, State.RESIDENT]


def test_experts_that_a_barrier_waits_for_count_as_late_hits() -> None:
    """With a barrier before verification, an expert still loading then is a late hit, although it arrives."""
    bench = Bench(8)
    copies = bench.prefetch(plan([ExpertId(0, 1), ExpertId(0, 2)], []))
    bench.timeline.wait(copies[0])
    bench.cache.note_barrier()
    bench.timeline.wait(copies[1])
    assert bench.verify(0, [1, 2]) == [[1, 2]]
    assert (bench.cache.counters.num_hits, bench.cache.counters.num_late_hits) == (1, 1)


def test_the_next_plan_replaces_the_protections_of_the_last() -> None:
    bench = Bench(2)
    bench.cache.place([ExpertId(0, 0), ExpertId(1, 0)])
    bench.prefetch(plan([], [ExpertId(0, 0)]))
    assert len(bench.prefetch(plan([ExpertId(0, 1)], []))) == 1


def compute(bench: Bench) -> VirtualEvent:
    _, done = bench.timeline.compute(COMPUTE, lambda: None)
    assert isinstance(done, VirtualEvent)
    bench.timeline.wait(done)
    return done


def test_planned_loads_are_fed_a_few_at_a_time_in_order() -> None:
    bench = Bench(16)
    loads = [ExpertId(layer, expert) for layer in (0, 1) for expert in range(4)]
    bench.cache.submit(plan(loads, []), compute(bench))
    seen = []
    while (copy := bench.cache.feed()) is not None:
        seen.append(len(bench.moved))
        bench.timeline.wait_first([copy])
    assert seen == [3, 4, 5, 6, 7] and [expert for expert, _ in bench.moved] == loads


def test_a_new_plan_replaces_the_last_one_and_copies_only_absent_experts() -> None:
    bench = Bench(16)
    bench.cache.submit(plan([ExpertId(1, expert) for expert in range(5)], []), compute(bench))
    bench.cache.feed()
    bench.cache.submit(plan([ExpertId(0, 7), ExpertId(1, 0), ExpertId(1, 4)], []), compute(bench))
    while (copy := bench.cache.feed()) is not None:
        bench.timeline.wait_first([copy])
    assert [expert.expert for expert, _ in bench.moved] == [0, 1, 2, 7, 4]


def test_routing_drops_the_layers_planned_loads_and_fetches_the_needed_ones_first() -> None:
    bench = Bench(16)
    bench.cache.submit(plan([ExpertId(0, 1), ExpertId(0, 2), ExpertId(0, 3), ExpertId(1, 0)], []), compute(bench))
    assert bench.verify(0, [2, 5]) == [[2], [5]]
    while (copy := bench.cache.feed()) is not None:
        bench.timeline.wait_first([copy])
    assert [expert for expert, _ in bench.moved] == [ExpertId(0, 2), ExpertId(0, 5), ExpertId(1, 0)]
    assert bench.cache.counters.num_misses == 2, "planned, but not issued at demand"


def test_need_lasts_from_its_event_to_the_last_arrival_and_counts_once() -> None:
    bench = Bench(16)
    compute(bench)
    known = compute(bench)
    begin = bench.timeline.now_ns()
    bench.cache.submit(plan([ExpertId(0, 1), ExpertId(0, 2), ExpertId(0, 3)], []), known)
    bench.cache.feed()
    assert bench.settle_need() == 0, "nothing has arrived yet"
    bench.verify(0, [1, 2, 3, 4])  # one more, fetched behind the others
    bench.timeline.drain()
    need_ns = bench.settle_need()
    copies_ns = bench.timeline.totals().link_busy_ns
    assert copies_ns <= need_ns <= copies_ns + 2 * (begin - known.end_ns) + MACHINE.launch_ns
    assert bench.settle_need() == 0


def test_need_ends_with_the_last_arrival_when_the_host_is_late() -> None:
    bench = Bench(16)
    for wave in bench.waves(0, [1, 2]):
        bench.compute(wave)
        bench.timeline.drain()  # so that no copy is under way when the layer's needs are closed
    assert bench.settle_need() >= bench.timeline.totals().link_busy_ns > 0


def test_need_ends_when_the_router_does_not_choose_the_expert() -> None:
    bench = Bench(2)
    bench.cache.place([ExpertId(0, 0), ExpertId(1, 0)])
    known = compute(bench)
    bench.cache.submit(plan([ExpertId(0, 1)], [ExpertId(0, 0), ExpertId(1, 0)]), known)
    assert bench.cache.feed() is None, "nothing is evictable"
    bench.verify(0, [0])
    assert 0 < bench.settle_need() <= bench.timeline.now_ns() - known.end_ns
