from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from specter.model.routing import top_k


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
