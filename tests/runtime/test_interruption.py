"""Whatever is raised, all finished rounds are recorded, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.charges.runs import open_run


@pytest.mark.parametrize("system", ["specter", "specter_deadline", "lru", "mixtral_offloading"])
@pytest.mark.parametrize("num_commits", [1, 2, 3])
def test_rounds_that_were_committed_are_recorded(system: str, num_commits: int, tmp_path: Path) -> None:
    """The first commit is prefill's. The last round is not recorded yet when its tokens are reported."""
    run = open_run(system, tmp_path)
    whole = open_run(system, tmp_path).engine.generate([0], 8)
    commits: list[list[int]] = []

    def interrupt(tokens: list[int]) -> None:
        commits.append(tokens)
        if len(commits) == num_commits:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.engine.generate([0], 8, interrupt)
    generation = run.engine.generation
    assert generation is not None
    counts = [(record.index, record.num_hits, record.num_misses, record.new_len) for record in generation.rounds]
    expected = [(record.index, record.num_hits, record.num_misses, record.new_len) for record in whole.rounds]
    assert counts == expected[: num_commits - 1]


def test_the_next_generation_records_its_own_rounds_alone(tmp_path: Path) -> None:
    run = open_run("specter", tmp_path)

    def interrupt(tokens: list[int]) -> None:
        if len(tokens) > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.engine.generate([0], 8, interrupt)
    run.timeline.lines.clear()
    generation = run.engine.generate([0], 8)
    assert [record.index for record in generation.rounds] == [0, 1]
    fetched = [line.partition(":")[0] for line in run.timeline.lines if line.startswith("fetch")]
    assert fetched[:4] == ["fetch L0 E0", "fetch L0 E1", "fetch L1 E0", "fetch L1 E1"], "the cache is empty"


@pytest.mark.parametrize("system", ["lru", "mixtral_offloading", "specmoeoff", "specter_deadline_lru"])
def test_after_an_interruption_a_generation_is_that_of_a_new_engine(system: str, tmp_path: Path) -> None:
    """Swaps move no expert out, since no slot has held one; and no load is planned any more."""
    run, fresh = open_run(system, tmp_path), open_run(system, tmp_path)

    def interrupt(tokens: list[int]) -> None:
        if tokens[-1] > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.engine.generate([0], 8, interrupt)
    run.timeline.lines.clear()
    log = run.generate(prompt_len=1, num_tokens=5)
    assert log.pop(1) == "drain", "copies of the broken round may be under way"
    expected = fresh.generate(prompt_len=1, num_tokens=5)
    # One stream goes on behind the last copy of the broken round, which has ended.
    assert [line.partition(" |")[0] for line in log] == [line.partition(" |")[0] for line in expected]
