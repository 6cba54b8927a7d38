"""A timeline that logs its calls, and a model that follows a script.

One line per call, in the order of issue: an operation with the name of its charge in `tariff.TARIFF` (raw numbers if it
has none), the events that it waits for, and where experts go. Time is logical: work has happened once the host has
waited for it, or for something behind it. `link` decides what a host that waits for either sees first; `lead` is how
many later operations of the compute lane have also ended when the host returns from a wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from specter.models.base import Choose, FinishedStep, Output, Proposal, Routing
from specter.models.spec import ExpertId
from specter.timeline.base import Clock, Event, LaneTotals, Mark, T, Work
from specter.timeline.trace import TraceOp
from tests.charges.tariff import NAMES, PAYLOAD, SPEC

SHORT = {"draft_step": "draft", "attend_and_route": "attend", "predict_next": "predict", "experts": "wave"}
MS = 1_000_000


@dataclass(eq=False)
class Issued:
    """One piece of work; `number` counts all of them."""

    name: str
    number: int
    phase: str  # prefill, or which round
    is_copy: bool
    after: tuple[Issued, ...]
    detail: str  # which experts and slots
    seen: int  # a bit for each operation that had ended when the host issued this one
    is_done: bool = False


@dataclass
class LoggedTimeline:
    """See above. `slow`: copies end only when something waits for them; `fast`: as soon as they are issued."""

    link: Literal["fast", "slow"] = "slow"
    lead: int = 0
    clock: Clock = "virtual"
    ops: list[TraceOp] | None = None
    lines: list[str] = field(default_factory=list)
    detail: str = ""  # of the work that runs now, left by the model or the mover
    issued: list[Issued] = field(default_factory=list)
    phase: str = "prefill"
    counts: Counter[str] = field(default_factory=Counter)  # of this phase, by name
    num_copies: int = 0
    copied_bytes: int = 0
    read_behind: list[str] = field(default_factory=list)  # what was issued last when totals were read
    _seen: int = 0

    def compute(self, work: Work, run: Callable[[], T], after: Iterable[Event] = ()) -> tuple[T, Issued]:
        numbers = (work.name, work.hbm_bytes, work.flops, work.kernels, work.launches)
        result, detail = self._run(run)
        event = self._issue(SHORT.get(work.name, work.name), False, after, detail)
        self._log(event, NAMES.get(numbers, str(numbers)) + detail)
        return result, event

    decode = compute

    def copy(self, num_bytes: int, run: Callable[[], None], after: Iterable[Event] = (), label: str = "") -> Issued:
        _, detail = self._run(run)
        event = self._issue(label, True, after, detail)
        self.num_copies += 1
        self.copied_bytes += num_bytes
        self._log(event, ("one expert " if num_bytes == PAYLOAD else f"{num_bytes} bytes ") + detail)
        return event

    def wait(self, event: Event) -> None:
        self.lines.append(f"wait for {self._name(event)}")
        last = self._of(event).number + self.lead
        self._finish(self.issued[min(last, len(self.issued) - 1)])

    def wait_first(self, events: Sequence[Event]) -> None:
        found = [self._of(event) for event in events]
        first = next((event for event in found if event.is_copy is (self.link == "fast")), found[0])
        self.lines.append(f"wait for the first of {', '.join(map(self._name, found))}: it is {self._name(first)}")
        self._finish(first)

    def is_done(self, event: Event) -> bool:
        return self._of(event).is_done

    def elapsed_ns(self, start: Event, end: Event) -> int:
        """A millisecond for each piece of work issued."""
        return (self._of(end).number - self._of(start).number) * MS

    def now_ns(self) -> int:
        return len(self.issued) * MS

    def drain(self) -> None:
        self.lines.append("drain")
        for event in self.issued:
            self._end(event)

    def totals(self) -> LaneTotals:
        return LaneTotals(copied_bytes=self.copied_bytes, num_copies=self.num_copies)

    def mark(self) -> LaneTotals:
        return self.totals()

    def totals_at(self, mark: Mark) -> LaneTotals:
        assert isinstance(mark, LaneTotals)
        self.read_behind.append(self._name(self.issued[-1]))
        return mark

    def begin(self, phase: str) -> None:
        """Another round: what it issues is counted anew."""
        self.phase = phase
        self.counts.clear()
        self.lines.append(phase)

    # -- inside --------------------------------------------------------------------------------

    def _log(self, event: Issued, what: str) -> None:
        after = f" | after {', '.join(map(self._name, event.after))}" if event.after else ""
        self.lines.append(f"{event.name}: {what}{after}")

    def _name(self, event: Event) -> str:
        issued = self._of(event)
        return issued.name if issued.phase == self.phase else f"{issued.name} of {issued.phase}"

    def _run(self, run: Callable[[], T]) -> tuple[T, str]:
        self.detail = ""
        return run(), self.detail

    def _issue(self, name: str, is_copy: bool, after: Iterable[Event], detail: str) -> Issued:
        if not is_copy:
            self.counts[name] += 1
            name += f" {self.counts[name]}"
        number, waits = len(self.issued), tuple(map(self._of, after))
        event = Issued(name, number, self.phase, is_copy, waits, detail, seen=self._seen)
        self.issued.append(event)
        if is_copy and self.link == "fast":
            self._end(event)
        return event

    def _end(self, event: Issued) -> None:
        event.is_done = True
        self._seen |= 1 << event.number

    def _finish(self, event: Issued) -> None:
        """Marks what must have ended before: the lane's earlier work, and what all of it has waited for."""
        for one in self.issued[: event.number + 1]:
            if not one.is_done and one.is_copy is event.is_copy:
                self._end(one)
                for before in one.after:
                    self._finish(before)

    def _of(self, event: Any) -> Issued:
        assert isinstance(event, Issued)
        return event


# Experts by the position of the token that is read, in MoE layers 0 and 1.
Chosen = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Script:
    """target, draft: experts of both MoE layers. predicted: of layer 1, from layer 0. wrong: positions for which the
    draft proposes another token than the target."""

    target: Sequence[Chosen]
    draft: Mapping[int, Chosen]
    predicted: Sequence[list[int]]
    wrong: frozenset[int] = frozenset()


BY_HAND = Script(
    target=[
        ([0, 1], [0, 1]),
        ([0, 2], [2, 3]),
        ([2, 3], [2, 0]),
        ([5, 0], [1, 2]),
        ([0, 3], [2, 4]),
        ([1, 4], [0, 5]),
        ([4, 2], [1, 5]),
        ([1, 2], [3, 0]),
        ([3, 5], [4, 2]),
    ],
    draft={
        1: ([0, 2], [2, 3]),
        2: ([2, 3], [2, 0]),
        3: ([4, 0], [5, 2]),
        4: ([0, 3], [4, 1]),
        5: ([1, 4], [0, 5]),
        6: ([4, 3], [1, 2]),
        7: ([1, 2], [0, 3]),
    },
    predicted=[[0, 1], [3, 2], [2, 4], [1, 2], [2, 5], [0, 5], [5, 3], [3, 1], [4, 0]],
)


@dataclass
class ScriptedModel:
    """The token at position p is p, for target and draft alike unless the script says that the draft is wrong."""

    timeline: LoggedTimeline
    script: Script = BY_HAND
    num_layers: int = SPEC.num_layers
    num_dense_layers: int = SPEC.num_dense_layers
    num_experts: int = SPEC.num_experts
    top_k: int = SPEC.top_k
    position: int = 0

    def move(self, expert: ExpertId, slot: int) -> None:
        self.timeline.detail = f"into slot {slot}"

    def send_back(self, slot: int) -> None:
        self.timeline.detail = f"out of slot {slot}"

    def reset(self) -> None:
        pass

    def crop(self, length: int) -> None:
        self.timeline.lines.append(f"crop to {length}")

    def begin_draft(self, token: int, position: int, choose: Choose) -> None:
        assert token == position
        self.position = position

    def draft_step(self) -> FinishedStep:
        read, self.position = self.position, self.position + 1
        token = self.position + (self.position in self.script.wrong)
        return FinishedStep(Proposal(token), np.array(self.script.draft[read], np.int16))

    def target_pass(self, tokens: Sequence[int], position: int, num_outputs: int) -> ScriptedPass:
        positions = list(range(position, position + len(tokens)))
        return ScriptedPass(self, positions, num_outputs)


@dataclass
class ScriptedPass:
    model: ScriptedModel
    positions: list[int]
    num_outputs: int

    def attend_and_route(self, layer: int) -> Routing | None:
        self.model.timeline.detail = f" of L{layer - 1}" if layer else ""
        if layer < SPEC.num_dense_layers:
            return None
        return np.array([self.model.script.target[p][layer - SPEC.num_dense_layers] for p in self.positions], np.int16)

    def predict_next(self, layer: int) -> Routing:
        assert layer == 1
        self.model.timeline.detail = f" of L{layer}"
        return np.array([self.model.script.predicted[p] for p in self.positions], np.int16)

    def decode(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        pairs = ", ".join(f"E{expert} in slot {slot}" for expert, slot in zip(experts, slots, strict=True))
        self.model.timeline.detail = f" of L{layer - 1}: {pairs}"

    def run_experts(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        pairs = ", ".join(f"E{expert} in slot {slot}" for expert, slot in zip(experts, slots, strict=True))
        self.model.timeline.detail = f" of L{layer - 1}: {pairs}"

    def combine(self, layer: int) -> None:
        self.model.timeline.detail = f" of L{layer - 1}"

    def outputs(self) -> list[Output]:
        return [p + 1 for p in self.positions[-self.num_outputs :]]
