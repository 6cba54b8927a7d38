"""Every rival's policy a second time: what it loads, from a log of the routing of model and draft.

No slots, events or clock: an expert is present or not, and every copy ends at once. Written from the rivals'
descriptions alone, apart from the runtime; it shares no code with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

Pair = tuple[int, int]  # (MoE layer, expert)


@dataclass
class Pass:
    """One target pass: experts by rank, [layer][row][rank]; those predicted for every layer but the first; and the
    routing of the draft tokens before it, [draft token][layer][rank]."""

    routing: list[list[list[int]]]
    predicted: list[list[list[int]]]
    drafts: list[list[list[int]]]


@dataclass
class Pool:
    """Slots shared by all layers, each entitled to `quota` of them; displaced by least recent use."""

    capacity: int
    quota: int
    held: list[Pair] = field(default_factory=list)  # least recently used first
    protected: set[Pair] = field(default_factory=set)
    num_loads: int = 0

    def victim(self, layer: int, busy: Iterable[Pair]) -> Pair | None:
        taken = self.protected | set(busy)
        free = [pair for pair in self.held if pair not in taken]
        share = Counter(owner for owner, _ in self.held)
        if share[layer] >= self.quota:
            return next((pair for pair in free if pair[0] == layer), None)
        greedy = [pair for pair in free if share[pair[0]] > self.quota]
        return next(iter(greedy or free), None)

    def load(self, pair: Pair, busy: Iterable[Pair] = ()) -> bool:
        if len(self.held) == self.capacity:
            victim = self.victim(pair[0], busy)
            if victim is None:
                return False
            self.held.remove(victim)
        self.held.append(pair)
        self.num_loads += 1
        return True

    def use(self, pair: Pair) -> None:
        self.held.remove(pair)
        self.held.append(pair)


@dataclass
class Outcome:
    num_present: int = 0
    num_missing: int = 0
    num_prefetched: int = 0
    num_write_backs: int = 0


def demand(pool: Pool, layer: int, rows: Sequence[Sequence[int]], outcome: Outcome) -> None:
    """A layer's need: residents are computed first, then the others in order; computed experts are evictable."""
    needed = [(layer, expert) for expert in sorted({expert for row in rows for expert in row})]
    pool.protected = {pair for pair in pool.protected if pair[0] != layer}
    here = [pair for pair in needed if pair in pool.held]
    missing = [pair for pair in needed if pair not in pool.held]
    outcome.num_present += len(here)
    outcome.num_missing += len(missing)
    arrived: list[Pair] = []
    while missing and pool.load(missing[0], busy=needed):
        arrived.append(missing.pop(0))
    for pair in here:
        pool.use(pair)
    while missing or arrived:
        while missing and pool.load(missing[0], busy=arrived):
            arrived.append(missing.pop(0))
        if arrived:
            pool.use(arrived.pop(0))
        else:
            pool.protected.clear()


def load_predicted(pool: Pool, layer: int, rows: Sequence[Sequence[int]], num_guesses: int, outcome: Outcome) -> None:
    """The next layer's loads: most named first, then by best rank; the first that finds no place ends it."""
    ranked = [row[rank] for rank in range(num_guesses) for row in rows]
    votes = Counter(ranked)
    order = sorted(votes, key=lambda expert: (-votes[expert], ranked.index(expert)))
    pool.protected = {(layer, expert) for expert in order if (layer, expert) in pool.held}
    for expert in order:
        pair = (layer, expert)
        if pair in pool.held:
            continue
        if not pool.load(pair):
            break
        pool.protected.add(pair)
        outcome.num_prefetched += 1


def two_plans(pool: Pool, drafts: Sequence[Sequence[Sequence[int]]], outcome: Outcome) -> None:
    """Top-M by count after the first and the second draft token; a load without a place is left out."""
    for num_read in (1, 2):
        if num_read > len(drafts):
            return
        wanted = []
        for layer in range(len(drafts[0])):
            votes = Counter(expert for draft in drafts[:num_read] for expert in draft[layer])
            best = sorted((-count, expert) for expert, count in votes.items())[: pool.quota]
            wanted += [(layer, expert) for _, expert in best]
        loads = [pair for pair in wanted if pair not in pool.held]
        pool.protected = set(wanted) - set(loads)
        for pair in loads:
            if pool.load(pair):
                pool.protected.add(pair)
                outcome.num_prefetched += 1


def run(
    passes: Sequence[Pass],
    num_layers: int,
    quota: int,
    num_guesses: int = 0,
    plans: bool = False,
    keeps: bool = True,
    swaps: bool = False,
) -> Outcome:
    """What a rival's policy loads on a trace; `num_guesses` of the next router are believed."""
    pool, outcome = Pool(num_layers * quota, quota), Outcome()
    for one in passes:
        if plans:
            two_plans(pool, one.drafts, outcome)
        for layer, rows in enumerate(one.routing):
            demand(pool, layer, rows, outcome)
            if not keeps:
                pool.held.clear()
            if num_guesses and layer + 1 < num_layers:
                load_predicted(pool, layer + 1, one.predicted[layer], num_guesses, outcome)
    if swaps:  # what goes into a slot that was filled before sends its expert back
        outcome.num_write_backs = max(pool.num_loads - pool.capacity, 0)
    return outcome


POLICIES: dict[str, Callable[[Sequence[Pass], int, int], Outcome]] = {
    "lru": run,
    "on_demand": lambda passes, layers, quota: run(passes, layers, quota, keeps=False),
    "lru_next_gate": lambda passes, layers, quota: run(passes, layers, quota, num_guesses=3),
    "mixtral_offloading": lambda passes, layers, quota: run(passes, layers, quota, swaps=True),
    "mixtral_speculative_loading": lambda passes, layers, quota: run(passes, layers, quota, num_guesses=2, swaps=True),
    "specmoeoff": lambda passes, layers, quota: run(passes, layers, quota, plans=True),
    "specmoeoff_tuned": lambda passes, layers, quota: run(passes, layers, quota, plans=True),
}
