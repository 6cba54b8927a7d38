from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specter.models.routing import grouped_top_k, route, sparsemixer, top_k
from tests.helpers import FAMILIES


@given(st.lists(st.lists(st.integers(-3, 3), min_size=8, max_size=8), min_size=1, max_size=5), st.integers(1, 8))
def test_rank_order_and_ties(rows: list[list[int]], k: int) -> None:
    logits = torch.tensor(rows, dtype=torch.float32)
    weights, experts = top_k(logits, k)
    probs = logits.softmax(-1)
    for row in range(len(rows)):
        expected = sorted(range(8), key=lambda e: (-float(probs[row, e]), e))[:k]
        assert experts[row].tolist() == expected
        assert torch.equal(weights[row], probs[row, expected])


def test_underflowed_weights_are_ordered_too() -> None:
    _, experts = top_k(torch.tensor([[-500.0, 0.0, -400.0, -500.0]]), 4)
    assert experts.tolist() == [[1, 0, 2, 3]]  # all but one are exactly 0


def test_groups_are_chosen_by_their_best_expert() -> None:
    logits = torch.tensor([[0.0, 5.0, 3.0, 3.0, 4.0, 0.0]])  # groups (0, 1), (2, 3), (4, 5)
    weights, experts = grouped_top_k(logits, 3, num_groups=3, top_groups=2)
    assert experts.tolist() == [[1, 4, 0]]
    assert torch.equal(weights, logits.softmax(-1)[:, [1, 4, 0]])


def test_sparsemixer_weighs_only_what_is_near() -> None:
    weights, experts = sparsemixer(torch.tensor([[1.0, 0.99, 0.5, 0.0], [-1.0, -2.0, -2.01, -9.0]]), 0.01)
    assert experts.tolist() == [[0, 1], [0, 1]]
    near, negative = torch.tensor([0.0, -0.01]).softmax(0)[0], torch.tensor([-2.0, -2.01]).softmax(0)[0]
    torch.testing.assert_close(weights, torch.tensor([[near, 1.0], [1.0, negative]]))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_routed_alike_alone_and_among_others(family: str) -> None:
    spec = FAMILIES[family]
    logits = torch.randn(48, spec.num_experts, generator=torch.Generator().manual_seed(0))
    weights, experts = route(spec, logits)
    for row in range(48):
        alone = route(spec, logits[row : row + 1])
        assert torch.equal(alone[0][0], weights[row]) and torch.equal(alone[1][0], experts[row])
