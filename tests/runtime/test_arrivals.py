"""How arrivals are computed together where the host is late, and what a need lasts, on a clock with copies of 1 ms."""

from __future__ import annotations

import pytest

from specter.experts.residency import State
from specter.models.spec import ExpertId
from tests.runtime.fakes import MACHINE
from tests.runtime.test_cache import COMPUTE, Bench, compute, plan

COPY_NS = MACHINE.copy_ns(MACHINE.link_bytes_per_s // 1000)


@pytest.mark.parametrize(
    ("num_arrived", "expected"),
    [
        (1, [[1], [2], [3], [4]]),  # the wave that comes next has arrived, the one behind it has not
        (2, [[1, 2], [3], [4]]),
        (3, [[1, 2, 3], [4]]),
        (4, [[1, 2, 3, 4]]),
    ],
)
def test_what_has_arrived_when_the_host_asks_is_one_wave(num_arrived: int, expected: list[list[int]]) -> None:
    """Hits first; then, the host having been away, so many copies have ended."""
    bench = Bench(16)
    bench.cache.place([ExpertId(0, 0)])
    waves = bench.waves(0, [0, 1, 2, 3, 4])
    hits = next(waves)
    assert hits.experts == [0] and hits.after == []
    bench.compute(hits)
    last = bench.residency.find(ExpertId(0, num_arrived))
    assert last is not None and last.ready is not None
    bench.timeline.wait_first([last.ready])
    seen = []
    for wave in waves:
        first = wave.slots[0]
        assert wave.after == [first.ready]
        seen.append(wave.experts)
        bench.compute(wave)
    assert seen == expected


def test_a_wave_of_hits_needs_no_event_though_they_were_copied() -> None:
    bench = Bench(16)
    copies = bench.prefetch(plan([ExpertId(0, 1), ExpertId(0, 2)], []))
    bench.timeline.wait(copies[-1])
    (wave,) = bench.waves(0, [1, 2])
    assert (wave.experts, wave.after) == ([1, 2], [])


def test_a_slot_is_pinned_until_its_wave_is_released() -> None:
    bench = Bench(4)
    bench.cache.place([ExpertId(0, 0)])
    pins = []
    for wave in bench.waves(0, [0, 1]):
        pins.append([slot.pins for slot in bench.residency.slots[:2]])
        bench.compute(wave)
    assert pins == [[1, 1], [0, 1]]
    assert [slot.pins for slot in bench.residency.slots] == [0, 0, 0, 0]


class TestNeed:
    """From the event that makes a need known to the end of the copy that meets it."""

    def test_a_fetch_is_needed_from_its_routing_to_its_arrival(self) -> None:
        bench = Bench(16)
        bench.verify(0, [1, 2])
        bench.timeline.drain()
        routed = 5000 + MACHINE.compute_ns(COMPUTE)  # launched, then computed
        issued = routed + MACHINE.sync_ns + MACHINE.launch_ns
        assert bench.settle_need() == issued + 2 * COPY_NS - routed

    def test_two_layers_needs_are_added(self) -> None:
        bench = Bench(16)
        for layer in (0, 1):
            bench.verify(layer, [1])
            bench.timeline.drain()
        alone = Bench(16)
        alone.verify(0, [1])
        alone.timeline.drain()
        assert bench.settle_need() == 2 * alone.settle_need()

    def test_what_two_plans_need_at_once_counts_once(self) -> None:
        """The second plan is known while the first one's copies are under way, and its copy follows them."""
        bench = Bench(16)
        start = bench.timeline.now_ns()
        bench.prefetch(plan([ExpertId(0, 1), ExpertId(0, 2)], []))
        bench.prefetch(plan([ExpertId(1, 1)], []))
        bench.timeline.drain()
        need = bench.settle_need()
        known = start + MACHINE.launch_ns + MACHINE.compute_ns(COMPUTE)
        issued = known + MACHINE.sync_ns + MACHINE.launch_ns
        assert need == issued + 3 * COPY_NS - known

    def test_a_plan_that_comes_to_nothing_needs_nothing(self) -> None:
        bench = Bench(16)
        bench.cache.submit(plan([], []), compute(bench))
        bench.timeline.drain()
        assert bench.settle_need() == 0

    def test_a_plan_of_what_is_present_needs_nothing_more(self) -> None:
        """It is known after its expert has arrived."""
        bench = Bench(16)
        copies = bench.prefetch(plan([ExpertId(0, 1)], []))
        bench.timeline.wait(copies[0])
        before = bench.settle_need()
        bench.cache.submit(plan([ExpertId(0, 1)], []), compute(bench))
        assert bench.cache.feed() is None
        bench.timeline.drain()
        assert before > 0 and bench.settle_need() == 0


def test_a_load_without_a_slot_stays_planned_and_is_issued_when_one_is_free() -> None:
    bench = Bench(2)
    bench.cache.place([ExpertId(0, 0), ExpertId(1, 0)])
    bench.cache.submit(plan([ExpertId(0, 1)], [ExpertId(0, 0)]), compute(bench))
    assert bench.cache.feed() is None, "L0 has one slot, and its expert is protected"
    assert list(bench.cache.queue.planned) == [ExpertId(0, 1)]
    bench.verify(0, [0, 1])
    assert not bench.cache.queue.planned and bench.residency.state(ExpertId(0, 1)) is State.RESIDENT
    assert bench.cache.counters.num_misses == 1


def test_a_starting_state_is_moved_into_its_slots_outside_the_timeline() -> None:
    bench = Bench(4)
    bench.cache.place([ExpertId(0, 3), ExpertId(1, 5)])
    assert bench.moved == [(ExpertId(0, 3), 0), (ExpertId(1, 5), 1)]
    assert bench.timeline.now_ns() == 0 and bench.timeline.totals().num_copies == 0
    assert bench.verify(0, [3]) == [[3]] and bench.cache.counters.num_hits == 1


def test_protections_end_when_the_cache_is_filled_anew() -> None:
    """L0 holds three of four slots, one more than its share, so that L1 takes its oldest."""
    bench = Bench(4)
    start = [ExpertId(0, 0), ExpertId(0, 1), ExpertId(0, 2), ExpertId(1, 0)]
    for is_protected, lost in ((True, ExpertId(0, 1)), (False, ExpertId(0, 0))):
        if is_protected:
            bench.cache.place(start)
            bench.cache.submit(plan([], [ExpertId(0, 0)]), compute(bench))
        else:
            bench.cache.submit(plan([], [ExpertId(0, 0)]), compute(bench))
            bench.cache.place(start)
        bench.verify(1, [3])
        assert [expert for expert in start if bench.residency.state(expert) is State.ABSENT] == [lost]


def test_where_every_slot_is_promised_the_copy_under_way_is_waited_for() -> None:
    """One promised expert has arrived, the other has not. The host waits for the second, not for what has happened."""
    bench = Bench(2)
    copies = bench.prefetch(plan([ExpertId(1, 6), ExpertId(1, 7)], []))
    bench.timeline.wait(copies[0])
    bench.cache.note_barrier()  # sees that the first has arrived
    bench.verify(0, [0])
    assert bench.timeline.is_done(copies[1])
    assert bench.residency.state(ExpertId(1, 6)) is State.ABSENT


def test_why_an_expert_cannot_be_evicted_is_told() -> None:
    bench = Bench(4)
    bench.cache.place([ExpertId(0, 3)])
    with pytest.raises(ValueError, match="absent and cannot be evicted"):
        bench.residency.evict(ExpertId(0, 4))
    slot = bench.residency.find(ExpertId(0, 3))
    assert slot is not None
    bench.residency.pin(slot)
    with pytest.raises(ValueError, match="pinned and cannot be evicted"):
        bench.residency.evict(ExpertId(0, 3))


def test_a_planned_load_does_not_displace_another_of_its_plan() -> None:
    bench = Bench(2)
    bench.cache.place([ExpertId(0, 0), ExpertId(1, 0)])
    bench.cache.submit(plan([ExpertId(0, 1), ExpertId(0, 2)], []), compute(bench))
    bench.cache.feed()
    bench.timeline.drain()
    assert bench.cache.feed() is None, "the one slot of L0 holds E1, which is planned too"
    assert bench.moved[2:] == [(ExpertId(0, 1), 0)] and list(bench.cache.queue.planned) == [ExpertId(0, 2)]
