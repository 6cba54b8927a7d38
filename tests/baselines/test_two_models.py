"""A draft of its own beside the target: its KV holds what it has read itself, and it reads what it lacks first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from baselines.specmoeoff import TwoModels
from specter.models.base import Choose, FinishedStep, Output, Proposal


class Reader:
    """A model that logs its calls; the token after t at position p is 10 p + t."""

    num_layers, num_dense_layers, num_experts, top_k = 3, 1, 6, 2

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def reset(self) -> None:
        self.log.append(f"{self.name}: reset")

    def begin_draft(self, token: int, position: int, choose: Choose) -> None:
        self.token, self.position, self.choose = token, position, choose

    def draft_step(self) -> FinishedStep:
        self.log.append(f"{self.name}: reads {self.token} at {self.position}")
        proposal = self.choose(10 * self.position + self.token, self.position + 1)
        self.token, self.position = proposal.token, self.position + 1
        return FinishedStep(proposal, np.zeros((2, 2), np.int16))

    def target_pass(self, tokens: Sequence[int], position: int, num_outputs: int) -> Any:
        self.log.append(f"{self.name}: passes {list(tokens)} at {position}, {num_outputs} outputs")
        return self.name

    def crop(self, length: int) -> None:
        self.log.append(f"{self.name}: crops to {length}")


def choose(output: Output, position: int) -> Proposal:
    return Proposal(int(output))


def drafted(model: TwoModels, log: list[str], token: int, position: int, num_steps: int) -> list[str]:
    """What drafting from `token` makes the models do."""
    log.clear()
    model.begin_draft(token, position, choose)
    for _ in range(num_steps):
        model.draft_step()
    return list(log)


def test_it_has_the_targets_shape_and_resets_both() -> None:
    log: list[str] = []
    model = TwoModels(Reader("target", log), Reader("draft", log))
    assert (model.num_layers, model.num_dense_layers, model.num_experts, model.top_k) == (3, 1, 6, 2)
    assert log == ["target: reset", "draft: reset"]


def test_the_draft_reads_what_it_lacks_before_it_drafts() -> None:
    log: list[str] = []
    model = TwoModels(Reader("target", log), Reader("draft", log))
    log.clear()
    found: object = model.target_pass([4, 5], 0, 1)
    assert found == "target"
    assert log == ["target: passes [4, 5] at 0, 1 outputs"]

    # The prompt, then two steps from the token at position 2.
    steps = ["draft: reads 4 at 0", "draft: reads 5 at 1", "draft: reads 6 at 2", "draft: reads 26 at 3"]
    assert drafted(model, log, token=6, position=2, num_steps=2) == steps

    # Both drafts are accepted: the bonus token is at position 5, and position 4 was never read.
    model.target_pass([6, 26, 56], 2, 3)
    log.clear()
    model.crop(5)
    assert log == ["target: crops to 5", "draft: crops to 5"]
    assert drafted(model, log, token=7, position=5, num_steps=1) == ["draft: reads 56 at 4", "draft: reads 7 at 5"]

    # The draft is rejected: what it read at position 5 stays, and nothing is lacking.
    model.target_pass([7, 57], 5, 2)
    model.crop(6)
    assert drafted(model, log, token=8, position=6, num_steps=2) == ["draft: reads 8 at 6", "draft: reads 68 at 7"]

    # Rejected at once, with one more step drafted: position 7 is read anew.
    model.target_pass([8, 68, 138], 6, 3)
    model.crop(7)
    assert drafted(model, log, token=9, position=7, num_steps=1) == ["draft: reads 9 at 7"]


def test_after_a_reset_the_next_prompt_is_read_from_its_start() -> None:
    log: list[str] = []
    model = TwoModels(Reader("target", log), Reader("draft", log))
    model.target_pass([4], 0, 1)
    drafted(model, log, token=5, position=1, num_steps=3)
    model.reset()
    model.target_pass([6], 0, 1)
    assert drafted(model, log, token=7, position=1, num_steps=1) == ["draft: reads 6 at 0", "draft: reads 7 at 1"]
