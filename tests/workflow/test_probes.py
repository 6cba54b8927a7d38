"""Probes on recordings written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from specter.probes.routing import acceptance, decoded_routing, generated_matches, match, union_sizes
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
