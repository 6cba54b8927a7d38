"""Lower bounds of a run's TPOT, from its own routing (docs/decisions/0001, "Floors").

A round needs on the device, in 16 bits, every expert that its verification routes to. What was not in a slot when the
round began crosses the link during the round. Both floors charge those copies to the link, and the device-memory bytes
of drafting and verification to the device, with no launch, kernel or sync cost.

`floor_ideal`  every slot holds a useful expert when a round begins. A bound, round by round.
`floor_trace`  the fewest loads that this trace allows (`min_loads`). `strict_tpot_ms` is a bound; `tpot_ms`, which
               places those loads in rounds, is an estimate close to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from specter.errors import SpecterError
from specter.models.spec import ExpertId
from specter.timeline.costs import CostModel
from specter.timeline.hardware import NS_PER_S, Hardware, ceil_div

_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class RoundAccess:
    """The experts of one round's verification: per MoE layer, the distinct ones. draft_len is 0 without a draft."""

    draft_len: int
    new_len: int
    experts: Sequence[Sequence[int]]

    @property
    def num_experts(self) -> int:
        return sum(map(len, self.experts))


@dataclass(frozen=True, slots=True)
class Floor:
    """A lower bound over the rounds given, which leave out prefill's commit.

    tpot_ms: the sum of the rounds' bounds, per committed token.
    strict_tpot_ms: max(all loads on the link, all work on the device), per committed token; at most tpot_ms.
    """

    tpot_ms: float
    strict_tpot_ms: float
    num_loads: int


def floor_ideal(rounds: Sequence[RoundAccess], num_slots: int, costs: CostModel, hardware: Hardware) -> Floor:
    """Loads of a round = max(experts it needs - slots, 0); a round takes at least max(link, GPU).

    The slots are one pool for all layers, so the difference is taken over the whole round. It is a bound: an expert
    that the round needs was either in one of `num_slots` slots when it began, or is copied during the round.

    Raises:
        SpecterError: as `floor_trace`.
    """
    _check(rounds, num_slots, costs)
    copy_ns = hardware.copy_ns(costs.payload_bytes)
    loads = [max(access.num_experts - num_slots, 0) for access in rounds]
    gpu_ns = [sum(_gpu_ns(access, costs, hardware)) for access in rounds]
    bounds_ns = [max(count * copy_ns, gpu) for count, gpu in zip(loads, gpu_ns, strict=True)]
    return _floor(rounds, bounds_ns, loads, copy_ns, gpu_ns)


def floor_trace(
    rounds: Sequence[RoundAccess],
    num_slots: int,
    costs: CostModel,
    hardware: Hardware,
    residents: Iterable[ExpertId] = (),
) -> Floor:
    """Loads by `min_loads`; drafting covers only those that have a slot to go to.

    With m loads in a round, of which min(m, free) have a slot that the rest of the round does not need
    (free = slots - hits of the round), and t = one copy, a round takes at least
        max(GPU, draft + m*t - min(min(m, free)*t, draft)).

    `strict_tpot_ms` bounds any policy: none loads less from the same `residents`, every load holds the link for t, and
    rounds follow each other. `tpot_ms` bounds policies that keep what `min_loads` keeps; another policy may load more
    and still place more of its loads in rounds that wait for the device anyway.

    Args:
        residents: in a slot, or loading, when the first round begins.
    Raises:
        SpecterError: no rounds, no slots, more residents than slots, or an access with another number of layers.
    """
    _check(rounds, num_slots, costs)
    num_layers, num_experts = costs.spec.num_moe_layers, costs.spec.num_experts
    held = {layer * num_experts + expert for layer, expert in residents}
    if len(held) > num_slots:
        raise SpecterError(f"{len(held)} residents in {num_slots} slots", "give the residents of this pool")
    visits = [
        [layer * num_experts + expert for expert in experts]
        for access in rounds
        for layer, experts in enumerate(access.experts)
    ]
    visit_loads = min_loads(visits, num_slots, held)
    copy_ns = hardware.copy_ns(costs.payload_bytes)
    loads, gpu_ns, bounds_ns = [], [], []
    for index, access in enumerate(rounds):
        count = sum(visit_loads[index * num_layers : (index + 1) * num_layers])
        draft, verification = _gpu_ns(access, costs, hardware)
        free = num_slots - (access.num_experts - count)
        covered = min(min(count, free) * copy_ns, draft)
        loads.append(count)
        gpu_ns.append(draft + verification)
        bounds_ns.append(max(draft + verification, draft + count * copy_ns - covered))
    return _floor(rounds, bounds_ns, loads, copy_ns, gpu_ns)


def min_loads(visits: Sequence[Sequence[int]], num_slots: int, residents: Iterable[int] = ()) -> list[int]:
    """The fewest loads that any policy needs, per visit: Belady (1966) with bypass, on sets of items.

    A visit needs all of its items, in any order; each is held since its last use, or loaded. After a visit any
    `num_slots` of the held and visited items may stay: those used soonest. Optimal: keeping an item from one use to the
    next is an interval that saves one load, at most `num_slots` intervals overlap at any time, and dropping the
    interval that ends last whenever one too many overlap keeps the most intervals (Faigle and Nawijn 1995).

    Args:
        visits: distinct items (whole numbers) per visit, in order.
        residents: items held before the first visit, at most `num_slots`.
    """
    next_use: dict[int, int] = {}
    following: list[list[int]] = []  # per visit and item: index of the next visit that needs the item
    for index in range(len(visits) - 1, -1, -1):
        following.append([next_use.get(item, _NEVER) for item in visits[index]])
        for item in visits[index]:
            next_use[item] = index
    following.reverse()

    held = {item for item in residents if item in next_use}
    base = 1 + max(max(items, default=0) for items in visits) if visits else 1
    # Max-heap of held items by next use, as one number each. Entries of items used since then are stale; their uses are
    # in the past, so they lie below the entry of every held item and never reach the top.
    latest = [-(next_use[item] * base + item) for item in held]
    heapify(latest)
    loads = []
    for items, uses in zip(visits, following, strict=True):
        before = len(held)
        held.difference_update(items)
        loads.append(len(items) - (before - len(held)))
        for item, use in zip(items, uses, strict=True):
            if use != _NEVER:
                held.add(item)
                heappush(latest, -(use * base + item))
        while len(held) > num_slots:
            held.remove(-heappop(latest) % base)
    return loads


def decode_ns(num_experts: int, costs: CostModel, hardware: Hardware) -> int:
    """Least time to decode experts, in launches of any number; 0 for 16-bit experts."""
    if not costs.decodes:
        return 0
    work = costs.decode(num_experts)
    return max(hardware.hbm_ns(work.hbm_bytes), ceil_div(work.int_ops * NS_PER_S, hardware.int_ops))


def _check(rounds: Sequence[RoundAccess], num_slots: int, costs: CostModel) -> None:
    if num_slots < 1:
        raise SpecterError(f"a floor for {num_slots} slots", "give at least one slot")
    if sum(access.new_len for access in rounds) < 1:
        raise SpecterError("a floor for rounds that commit no token", "give the rounds after the first commit")
    num_layers = costs.spec.num_moe_layers
    for index, access in enumerate(rounds):
        if len(access.experts) != num_layers:
            raise SpecterError(
                f"round {index} lists {len(access.experts)} layers, {costs.spec.name} has {num_layers}",
                "give one list per MoE layer",
            )


def _gpu_ns(access: RoundAccess, costs: CostModel, hardware: Hardware) -> tuple[int, int]:
    """Time of the device-memory bytes of the draft steps, and of the verification with its decoding."""
    draft = access.draft_len * hardware.hbm_ns(costs.draft_step().hbm_bytes)
    num_bytes = costs.verification_bytes(access.num_experts, rows=access.draft_len + 1)
    if not costs.decodes:
        return draft, hardware.hbm_ns(num_bytes)
    decode = costs.decode(access.num_experts)  # bound by integer work, which may overlap all else
    integer_ns = ceil_div(decode.int_ops * NS_PER_S, hardware.int_ops)
    return draft, max(hardware.hbm_ns(num_bytes + decode.hbm_bytes), integer_ns)


def _floor(
    rounds: Sequence[RoundAccess], bounds_ns: list[int], loads: list[int], copy_ns: int, gpu_ns: list[int]
) -> Floor:
    num_tokens = sum(access.new_len for access in rounds)
    return Floor(
        tpot_ms=sum(bounds_ns) / num_tokens / 1e6,
        strict_tpot_ms=max(sum(loads) * copy_ns, sum(gpu_ns)) / num_tokens / 1e6,
        num_loads=sum(loads),
    )
