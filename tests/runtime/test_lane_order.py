"""What the order between the lanes guarantees, for every system, on random routing.

An operation happens before another if it is earlier on the same lane, or among the events that the other waits for, or
before one that is. In `Order.is_before` it may also have ended when the host issued the other.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.plan import compose
from specter.experts.transfer import Backend, SendBack
from specter.resolve import resolve
from specter.session import build_engine
from specter.speculation.accept import TokenSampler
from tests.charges.logged import Chosen, Issued, LoggedTimeline, Script, ScriptedModel
from tests.charges.runs import Run, make_config, open_run
from tests.charges.tariff import SPEC
from tests.helpers import CONF

# Without those over residual experts, whose waves read staging places: tests/lossless/test_residual.py.
SYSTEMS = sorted(path.stem for path in (CONF / "system").glob("*.yaml") if not compose([f"system={path.stem}"]).decodes)
BARRIERS = [
    "specmoeoff", "specmoeoff_tuned", "specter", "specter_barrier", "specter_copied_kv", "specter_early",
    "specter_late", "specter_retain",
]  # fmt: skip
SWAPS = ["mixtral_offloading", "mixtral_speculative_loading"]
NUM_TOKENS = 20
LENGTH = NUM_TOKENS + 3  # positions, with a prompt of three tokens


def random_script(seed: int) -> Script:
    rng = random.Random(seed)

    def experts() -> list[int]:
        return rng.sample(range(SPEC.num_experts), SPEC.top_k)

    def chosen() -> Chosen:
        return experts(), experts()

    return Script(
        target=[chosen() for _ in range(LENGTH)],
        draft={position: chosen() for position in range(LENGTH)},
        predicted=[experts() for _ in range(LENGTH)],
        wrong=frozenset(rng.sample(range(LENGTH), 5)),
    )


class Order:
    """The operations of a run, and which of them happen before which."""

    def __init__(self, run: Run) -> None:
        self.ops = run.timeline.issued
        self._before: list[int] = []  # a bit for each operation
        last = {False: 0, True: 0}
        for op in self.ops:
            mask = last[op.is_copy] | op.seen
            for one in op.after:
                mask |= self._before[one.number] | 1 << one.number
            self._before.append(mask)
            last[op.is_copy] = mask | 1 << op.number

    def is_before(self, first: Issued, second: Issued) -> bool:
        return bool(self._before[second.number] >> first.number & 1)

    def named(self, *starts: str) -> Iterator[Issued]:
        return (op for op in self.ops if op.name.startswith(starts))


def slots(op: Issued) -> list[int]:
    return [int(number) for number in re.findall(r"slot (\d+)", op.detail)]


def run_randomly(system: str, seed: int, directory: Path) -> tuple[Run, Order]:
    """Two to four slots per layer, a fast or a slow link, a host that is late or not."""
    run = open_run(
        system,
        directory,
        "fast" if seed % 2 else "slow",
        seed % 3 == 0,
        random_script(seed),
        slots_per_layer=2 + seed % 3,
    )
    run.generate(prompt_len=3, num_tokens=NUM_TOKENS)
    return run, Order(run)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("seed", range(5))
def test_a_slot_is_read_behind_its_copy_and_written_behind_its_readers(system: str, seed: int, directory: Path) -> None:
    _, order = run_randomly(system, seed, directory)
    written: dict[int, Issued] = {}
    read: dict[int, Issued] = {}
    for op in order.named("wave", "fetch", "prefetch", "write back"):
        for slot in slots(op):
            if not op.is_copy:
                assert system == "resident" or order.is_before(written[slot], op), f"{op} reads slot {slot} too early"
                read[slot] = op
            elif slot in read:
                assert order.is_before(read[slot], op), f"{op} overwrites slot {slot} too early"
            if op.is_copy:
                written[slot] = op


@pytest.mark.parametrize("seed", range(4))
def test_verification_waits_for_all_prefetches_where_a_planner_sets_a_barrier(seed: int, directory: Path) -> None:
    for system in BARRIERS:
        _, order = run_randomly(system, seed, directory)
        first = {op.phase: op for op in order.named("attend 1") if op.name == "attend 1"}
        prefetches = list(order.named("prefetch"))
        assert prefetches and all(order.is_before(op, first[op.phase]) for op in prefetches)


def test_without_a_barrier_no_layer_but_its_waves_waits_for_copies(directory: Path) -> None:
    for system in set(SYSTEMS) - set(BARRIERS) - set(SWAPS):
        _, order = run_randomly(system, 0, directory)
        assert not [op for op in order.ops if op.after and not op.is_copy and not op.name.startswith("wave")]


def test_a_wave_waits_for_one_copy_at_most_and_hits_for_none(directory: Path) -> None:
    """Copies of one layer arrive in the order of issue, so the last one of a wave decides."""
    for system in set(SYSTEMS) - set(SWAPS):
        _, order = run_randomly(system, 2, directory)
        assert {len(op.after) for op in order.named("wave")} <= {0, 1}


@pytest.mark.parametrize("system", SWAPS)
@pytest.mark.parametrize("seed", range(4))
def test_a_swap_moves_the_old_expert_out_before_the_new_one_comes_in(system: str, seed: int, directory: Path) -> None:
    _, order = run_randomly(system, seed, directory)
    used: set[int] = set()
    num_swaps = 0
    for op in order.named("fetch", "prefetch"):
        (slot,) = slots(op)
        if slot in used:
            out = order.ops[op.number - 1]
            assert out.name == "write back" and slots(out) == [slot] and out in op.after
            num_swaps += 1
        used.add(slot)
    assert num_swaps == len(list(order.named("write back"))) > 20


@pytest.mark.parametrize("system", SWAPS)
def test_on_one_stream_nothing_overlaps_but_predicted_loads(system: str, directory: Path) -> None:
    """Each compute follows every copy of the stream issued before it, and each copy of the stream every compute."""
    _, order = run_randomly(system, 1, directory)
    beside = set()
    for op in order.named("prefetch"):
        beside |= {op.number, op.number - 1}  # with its write-back
    for op in order.ops:
        if op.number in beside:
            assert not [one for one in op.after if one.name.startswith(("attend", "predict", "combine", "head"))]
            continue
        earlier = [one for one in order.ops[: op.number] if one.number not in beside]
        assert all(order.is_before(one, op) for one in earlier), op


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_host_reads_a_result_before_it_acts_on_it(system: str, directory: Path) -> None:
    """Fetches and waves of a layer are issued after its routing is read; a round begins after the last one's output."""
    run, _ = run_randomly(system, 3, directory)
    unread = ""
    for line in run.timeline.lines:
        name = line.removeprefix("wait for ")
        if name != line and name == unread:
            unread = ""
        if line.startswith(("attend", "predict", "head")) and not line.startswith("attend 1:"):  # the dense layer
            assert not unread or line.startswith("predict"), f"{line} before {unread} is read"
            unread = line.partition(":")[0]
        if line.startswith(("fetch", "wave", "crop")):
            assert not unread, f"{line} before {unread} is read"


@pytest.mark.parametrize(
    ("system", "behind"), [("specter", "prefetch L1 E5"), ("specter_deadline", "prefetch L0 E4"), ("lru", "attend 1")]
)
def test_a_record_is_written_while_the_next_round_runs(system: str, behind: str, directory: Path) -> None:
    """Behind its draft's last plan, or its first layer: on a device, reading times takes a while. The last one at the
    end."""
    run = open_run(system, directory)
    run.generate(prompt_len=1, num_tokens=8 if run.engine.depth.max_len else 3)
    assert run.timeline.read_behind == [behind, behind, "head 1 of round 2", "head 1 of round 2"]


@pytest.mark.parametrize(("system", "num_buffers"), [("mixtral_offloading", [4]), ("lru", [])])
def test_a_swap_opens_its_way_back_with_its_buffers(system: str, num_buffers: list[int], directory: Path) -> None:
    opened: list[int] = []

    def open_write_back(number: int) -> SendBack:
        opened.append(number)
        return lambda slot: None

    timeline = LoggedTimeline()
    backend = Backend(timeline, ScriptedModel(timeline).move, open_write_back)
    build_engine(resolve(make_config(system, directory)), ScriptedModel(timeline), TokenSampler(), backend)
    assert opened == num_buffers
