"""Prefill, and the draft steps that read more than one token, against expectations written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.charges.logged import BY_HAND
from tests.charges.runs import open_run

WRONG = replace(BY_HAND, wrong=frozenset({3}))

# Five tokens are two tiles of four rows. L0 needs E0, E1, E2, E3 and E5; L1 needs E0 to E4; six slots in all.
PREFILL = """
prefill
attend 1: dense layer (2 tiles)
attend 2: attention, router, shared (2 tiles) of L0
wait for attend 2
fetch L0 E0: one expert into slot 0
fetch L0 E1: one expert into slot 1
fetch L0 E2: one expert into slot 2
fetch L0 E3: one expert into slot 3
fetch L0 E5: one expert into slot 4
wave 1: 1 expert (2 tiles) of L0: E0 in slot 0 | after fetch L0 E0
wave 2: 1 expert (2 tiles) of L0: E1 in slot 1 | after fetch L0 E1
wave 3: 1 expert (2 tiles) of L0: E2 in slot 2 | after fetch L0 E2
wave 4: 1 expert (2 tiles) of L0: E3 in slot 3 | after fetch L0 E3
wave 5: 1 expert (2 tiles) of L0: E5 in slot 4 | after fetch L0 E5
combine 1: combine (2 tiles) of L0
attend 3: attention, router, shared (2 tiles) of L1
wait for attend 3
fetch L1 E0: one expert into slot 5
fetch L1 E1: one expert into slot 0 | after wave 1
fetch L1 E2: one expert into slot 1 | after wave 2
wave 6: 1 expert (2 tiles) of L1: E0 in slot 5 | after fetch L1 E0
fetch L1 E3: one expert into slot 5 | after wave 6
wave 7: 1 expert (2 tiles) of L1: E1 in slot 0 | after fetch L1 E1
fetch L1 E4: one expert into slot 0 | after wave 7
wave 8: 1 expert (2 tiles) of L1: E2 in slot 1 | after fetch L1 E2
wave 9: 1 expert (2 tiles) of L1: E3 in slot 5 | after fetch L1 E3
wave 10: 1 expert (2 tiles) of L1: E4 in slot 0 | after fetch L1 E4
combine 2: combine (2 tiles) of L1
head 1: head
wait for head 1
"""


@pytest.mark.parametrize("system", ["lru", "specter", "specmoeoff"])
def test_prefill_charges_every_tile_and_one_row_of_output(system: str, tmp_path: Path) -> None:
    log = open_run(system, tmp_path).generate(prompt_len=5, num_tokens=2)
    assert log[: log.index("round 1")] == PREFILL.split("\n")[1:-1]


def test_prefill_predicts_the_next_layer_for_every_tile(tmp_path: Path) -> None:
    log = open_run("lru_next_gate", tmp_path).generate(prompt_len=5, num_tokens=1)
    assert [line for line in log if "router" in line] == [
        "attend 2: attention, router, shared (2 tiles) of L0",
        "predict 1: next router (2 tiles) of L1",
        "attend 3: attention, router, shared (2 tiles) of L1",
    ]


def test_on_demand_keeps_no_expert_of_the_prompt(tmp_path: Path) -> None:
    """Six staging slots: all five misses of a layer are under way at once, in the next layer too."""
    log = open_run("on_demand", tmp_path).generate(prompt_len=5, num_tokens=1)
    first, second = log.index("wait for attend 2") + 1, log.index("wait for attend 3") + 1
    assert [line.split(":")[0] for line in log[first : first + 5]] == [f"fetch L0 E{e}" for e in (0, 1, 2, 3, 5)]
    assert [line.split(":")[0] for line in log[second : second + 5]] == [f"fetch L1 E{e}" for e in range(5)]


def draft_steps(log: list[str]) -> list[list[str]]:
    """The charges of the draft steps, per round."""
    rounds: list[list[str]] = []
    for line in log:
        if line.startswith("round "):
            rounds.append([])
        if line.startswith("draft "):
            rounds[-1].append(line.partition(": ")[2])
    return rounds


class TestDraftWithItsOwnKV:
    """The first step of a round also reads the tokens that the draft's KV lacks."""

    def test_the_prompt_is_read_in_the_first_round(self, tmp_path: Path) -> None:
        log = open_run("specmoeoff", tmp_path).generate(prompt_len=5, num_tokens=4)
        assert draft_steps(log) == [["draft step of 6 rows", "draft step"]]

    def test_the_second_prompt_is_read_too(self, tmp_path: Path) -> None:
        run = open_run("specmoeoff", tmp_path)
        run.generate(prompt_len=5, num_tokens=4)
        run.timeline.lines.clear()
        assert draft_steps(run.generate(prompt_len=5, num_tokens=4)) == [["draft step of 6 rows", "draft step"]]

    def test_after_a_rejected_token_nothing_is_missing(self, tmp_path: Path) -> None:
        """Positions 1 to 3 are read; the token proposed for 3 is wrong, so the next round starts there."""
        log = open_run("specmoeoff", tmp_path, script=WRONG).generate(prompt_len=1, num_tokens=6)
        assert draft_steps(log) == [
            ["draft step of 2 rows", "draft step", "draft step"],
            ["draft step", "draft step"],
        ]

    def test_after_an_accepted_round_its_last_token_is_missing(self, tmp_path: Path) -> None:
        log = open_run("specmoeoff_tuned", tmp_path).generate(prompt_len=1, num_tokens=8)
        assert draft_steps(log) == [
            ["INT4 draft step of 2 rows", "INT4 draft step", "INT4 draft step"],
            ["INT4 draft step of 2 rows", "INT4 draft step"],
        ]

    def test_rows_are_counted_from_what_was_drafted_last(self, tmp_path: Path) -> None:
        """A prompt of two tokens; positions 2 to 4 are drafted from and accepted, so that 5 is missing at 6."""
        log = open_run("specmoeoff", tmp_path).generate(prompt_len=2, num_tokens=7)
        assert draft_steps(log) == [
            ["draft step of 3 rows", "draft step", "draft step"],
            ["draft step of 2 rows"],
        ]

    def test_a_shared_draft_reads_one_token_per_step(self, tmp_path: Path) -> None:
        log = open_run("specter", tmp_path, script=WRONG).generate(prompt_len=5, num_tokens=4)
        assert draft_steps(log) == [["draft step", "draft step"]]
