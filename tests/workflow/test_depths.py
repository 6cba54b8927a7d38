"""Depths chosen offline, by round, and by an oracle: the job, the profile that runs read, and the study."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from harness.jobs.depths import Oracle, accepted_from, best_depths
from harness.plan import compose
from harness.studies.depths import choices
from specter.errors import SpecterError
from specter.recording import RecordedPass, Recording
from specter.speculation.profile import ProfileKey, write_profile

KEY = ProfileKey("specter", "a100_40gb_pcie4", 16.0, "greedy", 1.0, "gsm8k")


def dense() -> Recording:
    """The text 7 8 9 5 after one token; drafts from every position."""
    routing = np.zeros((0, 1, 2), np.int16)
    drafts = [[5], [7, 8, 9, 6], [8, 3, 5], [9, 5]]  # the committed token, then the draft
    new = [[7], [8], [9], [5]]
    passes = [
        RecordedPass(i, tokens, routing, routing, n) for i, (tokens, n) in enumerate(zip(drafts, new, strict=True))
    ]
    return Recording(passes, {"dense": "yes"})


def test_the_oracle_drafts_what_is_accepted() -> None:
    assert accepted_from(dense()) == [0, 2, 0, 1]
    oracle = Oracle([dense(), dense()])
    for _ in range(2):
        oracle.begin()
        # 1, 2 and 3 of 4 tokens are committed: `limit` is what may be drafted before the bonus token.
        assert [oracle.choose(limit, lambda: np.zeros(0, bool)) for limit in (2, 1, 0)] == [2, 0, 0]


def rows() -> pd.DataFrame:
    """Two data sets of three inputs; K = 4 is best in the mean of the first, 8 in that of the second."""
    times = {"4": [10.0, 10, 40], "8": [30.0, 20, 20], "auto": [9.0, 9, 9], "oracle": [5.0, 5, 5]}
    found = []
    for dataset, better in (("gsm8k", "4"), ("prose", "8")):
        for depth, values in times.items():
            named = {"4": "8", "8": "4"}.get(depth, depth) if better == "8" else depth
            found += [{"dataset": dataset, "input": i, "depth": named, "tpot_ms": v} for i, v in enumerate(values)]
    return pd.DataFrame(found).assign(
        charged_as="qwen1_5_moe", system="specter", budget="high", sampling="greedy", temperature=1.0,
        hardware="a100_40gb_pcie4",
    )  # fmt: skip


def test_the_profile_has_the_best_depth_of_every_data_set() -> None:
    depths = best_depths(rows(), {"high": 16})
    assert {key.dataset: k for key, k in depths.items()} == {"gsm8k": 4, "prose": 8}
    assert {key.experts_per_layer for key in depths} == {16.0} and KEY in depths


def test_a_profile_is_judged_on_inputs_that_it_has_not_seen() -> None:
    found = choices(rows())
    # By the other two inputs: 8, 4 (25 ms each: the least K) and 4; with the names of K exchanged 4, 4 and 8.
    assert found["profile"] == pytest.approx(np.mean([30, 10, 40, 30, 20, 40]))
    both = pytest.approx((20 + 70 / 3) / 2)
    assert (found["best K"], found["best"], found["paper's K"], found["texts"]) == ("4", both, both, 6)
    assert (found["auto"], found["oracle"]) == (9, 5)


def test_one_input_of_a_data_set_makes_no_profile() -> None:
    found = choices(rows().query("input == 0"))
    assert np.isnan(found["profile"]) and found["best"] == (10 + 30) / 2 and found["texts"] == 2


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "depths.json"
    write_profile(path, {KEY: 12}, {"clock": "virtual"})
    return path


def test_a_run_reads_its_depth_from_the_profile_and_records_it(profile: Path) -> None:
    config = compose(["k=profiled", f"model.profile={profile}"])
    assert (config.k, config.draft_len, config.k_from) == (12, 12, str(profile))
    assert compose(["system=lru", "k=profiled", "model.profile="]).draft_len == 0  # it does not draft
    assert compose(["k=12"]).k_from == ""


@pytest.mark.parametrize(
    ("overrides", "message", "remedy"),
    [
        (["model.profile="], "names no file", "harness.jobs.depths"),
        (["model.profile=no/file.json"], "no/file.json does not exist", "harness.jobs.depths"),
        (["dataset=prose"], "no depth for dataset=prose .it has gsm8k.", "give a number"),
        (["budget=low"], "experts_per_layer=4.*it has 16.0", "give a number"),
        (["budget.num_bytes=9000000000"], "experts_per_layer=0", "give a number"),
        (["system=specter_deadline"], "system=specter_deadline .it has specter.", "give a number"),
        (["sampling=seeded"], "sampling=seeded", "give a number"),
    ],
)
def test_a_depth_that_no_profile_has_is_refused(profile: Path, overrides: list[str], message: str, remedy: str) -> None:
    with pytest.raises(SpecterError, match=message) as error:
        compose(["k=profiled", f"model.profile={profile}", *overrides])
    assert remedy in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"depths": [{"k": 3}]}', '{"depths": [3]}'])
def test_a_damaged_profile_is_named(profile: Path, content: str) -> None:
    profile.write_text(content)
    with pytest.raises(SpecterError, match=profile.name):
        compose(["k=profiled", f"model.profile={profile}"])


def test_the_shipped_profiles_are_read() -> None:
    for model in ("deepseek_v2_lite", "qwen1_5_moe", "phi3_5_moe"):
        for dataset in ("gsm8k", "webtext"):
            assert compose([f"model={model}", f"dataset={dataset}", "budget=low", "k=profiled"]).draft_len >= 2
