"""Probes on recordings written by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter.errors import SpecterError
from specter.probes.routing import (
    acceptance,
    accepted_runs,
    decoded_routing,
    expected_run,
    generated_matches,
    largest_useful_depth,
    match,
    named_and_used,
    runs_of,
    union_sizes,
)
from specter.recording import RecordedPass, Recording


def experts(*rows: list[list[int]]) -> np.ndarray:
    return np.array(rows, np.int16)


def drafted() -> Recording:
    """One round of K = 2 on one MoE layer, top-2: the first draft is accepted, the second is not."""
    prefill = RecordedPass(0, [5], experts().reshape(0, 1, 2), experts([[0, 1]]), [7])
    draft = experts([[0, 1]], [[2, 3]])  # [draft_len, layers, k]
    target = np.array([[[1, 0], [3, 4], [5, 6]]], np.int16)  # [layers, rows, k]
    return Recording([prefill, RecordedPass(1, [7, 8, 9], draft, target, [8, 4])], {})


def test_match_ignores_rank() -> None:
    assert match(np.array([1, 2, 3]), np.array([3, 1, 9])) == pytest.approx(2 / 3)


def test_only_kept_rows_are_compared() -> None:
    np.testing.assert_allclose(generated_matches([drafted()]), [[1.0], [0.5]])


def test_acceptance_counts_the_first_rejected_draft() -> None:
    assert acceptance([drafted()]) == (1, 2)


def test_rows_behind_a_rejection_are_left_out() -> None:
    recording = drafted()
    recording.passes[1].new_tokens = [4]  # the first draft was rejected already
    np.testing.assert_allclose(generated_matches([recording]), [[1.0]])
    assert acceptance([recording]) == (0, 1)


def test_runs_go_on_over_rounds_that_accept_everything() -> None:
    recording = drafted()  # one accepted, then a rejection
    full = RecordedPass(3, [4, 5, 6], recording.passes[1].draft_routing, recording.passes[1].target_routing, [5, 6, 7])
    rejected = RecordedPass(6, [7, 8, 9], full.draft_routing, full.target_routing, [1])
    recording.passes += [full, full, rejected, full]
    assert accepted_runs([recording]) == [1, 4]  # the last two drafts' run was not ended
    assert runs_of(np.array([True, True, False, False, True])) == [2, 0]


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_the_mean_run_is_the_expected_one(agrees: list[bool]) -> None:
    """alpha / (1 - alpha) is accepted over rejected, which is the mean run where the text ends with a rejection."""
    flags = np.array([*agrees, False])
    assert np.mean(runs_of(flags)) == pytest.approx(expected_run(float(flags.mean())))


def test_largest_useful_depth_of_the_paper() -> None:
    assert expected_run(0.9663) == pytest.approx(28.7, abs=0.05)
    assert largest_useful_depth(0.9663) == 32 and largest_useful_depth(0.3) == 1
    with pytest.raises(SpecterError, match="every draft"):
        largest_useful_depth(1.0)


def test_what_a_draft_names_is_what_its_tokens_chose_most() -> None:
    """Two layers; in the first, expert 2 leads, and 0 and 1 tie; the verification needs 1 and 2 there, and 4 of 3 and 4
    in the second."""
    draft = np.array([[[2, 0], [3, 4]], [[2, 1], [3, 4]]], np.int16)  # [draft_len, layers, k]
    target = np.array([[[2, 1], [1, 2], [2, 1]], [[4, 5], [4, 6], [4, 7]]], np.int16)  # [layers, rows, k]
    recording = drafted()
    recording.passes[1:] = [RecordedPass(1, [7, 8, 9], draft, target, [8, 4])]
    assert named_and_used([recording], 8, (1, 2, 9)) == {1: 1 / 2, 2: 2 / 4, 9: 3 / 5}


def test_union_of_windows() -> None:
    routing = np.array([[[0, 1]], [[1, 2]], [[0, 1]]], np.int16)  # [T, layers, k]
    assert union_sizes(routing, 4, (1, 2, 3, 4)) == {1: 2.0, 2: 3.0, 3: 3.0}


def test_union_agrees_with_counting() -> None:
    routing = np.argsort(np.random.default_rng(0).random((20, 3, 8)), -1)[..., :3].astype(np.int16)
    for k, value in union_sizes(routing, 8, (1, 4, 20)).items():
        counted = [len(set(routing[t : t + k, layer].ravel())) for t in range(21 - k) for layer in range(3)]
        assert value == pytest.approx(np.mean(counted))


def test_decoded_routing_leaves_prefill_out() -> None:
    plain = drafted()
    plain.passes[1].target_routing = np.array([[[1, 0]]], np.int16)
    assert decoded_routing(plain).tolist() == [[[1, 0]]]
