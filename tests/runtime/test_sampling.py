"""Noise and acceptance: determinism, exactness, and the distribution of rejection sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specter.config import SamplingConfig
from specter.speculation.accept import Proposal, TokenSampler
from specter.speculation.noise import gumbel, philox, uniforms
from specter.speculation.sampling import GreedySampler, RejectionSampler, SeededSampler, build_sampler


def test_philox_matches_the_published_known_answers() -> None:
    """Random123's kat_vectors for philox4x32-10."""
    zeros = np.zeros((4, 1), np.uint64)
    assert [f"{x:08x}" for x in philox(zeros, (0, 0))[:, 0]] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    ones = np.full((4, 1), 0xFFFFFFFF, np.uint64)
    key = (0xFFFFFFFF, 0xFFFFFFFF)
    assert [f"{x:08x}" for x in philox(ones, key)[:, 0]] == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


def test_noise_depends_on_seed_position_and_stream_alone() -> None:
    base = uniforms(7, 3, 0, 50)
    assert (base == uniforms(7, 3, 0, 50)).all() and (base[:9] == uniforms(7, 3, 0, 9)).all()
    for other in (uniforms(8, 3, 0, 50), uniforms(7, 4, 0, 50), uniforms(7, 3, 1, 50)):
        assert not (base == other).any()
    many = uniforms(1, 2, 0, 100_000)
    assert many.min() > 0 and many.max() < 1 and abs(many.mean() - 0.5) < 0.005


def test_seeded_selection_draws_from_the_softmax() -> None:
    sampler = SeededSampler(SamplingConfig("seeded", temperature=0.5, seed=3))
    logits = torch.tensor([0.0, 0.5, 1.0, -0.5])
    draws = np.bincount([sampler.select(logits, position) for position in range(5000)], minlength=4) / 5000
    assert np.abs(draws - torch.softmax(logits / 0.5, 0).numpy()).max() < 0.025


@given(st.lists(st.integers(0, 4), max_size=6), st.lists(st.integers(0, 4), min_size=7, max_size=7))
def test_selection_accepts_the_longest_matching_prefix_and_one_bonus(drafts: list[int], targets: list[int]) -> None:
    committed = TokenSampler().verify([Proposal(token) for token in drafts], targets, position=10)
    matching = next((i for i, token in enumerate(drafts) if token != targets[i]), len(drafts))
    assert committed == targets[: matching + 1]


def test_greedy_takes_the_argmax() -> None:
    assert GreedySampler().select(torch.tensor([0.1, 0.9, 0.3]), 0) == 1


@pytest.mark.parametrize(
    ("options", "allowed"),
    [({"top_k": 1}, {2}), ({"top_k": 2}, {1, 2}), ({"top_p": 0.5}, {2}), ({"top_p": 0.85}, {1, 2}), ({}, {0, 1, 2, 3})],
)
@pytest.mark.parametrize("kind", ["seeded", "rejection"])
def test_top_k_and_top_p_leave_only_the_likeliest(kind: str, options: dict[str, Any], allowed: set[int]) -> None:
    logits = torch.log(torch.tensor([0.06, 0.3, 0.6, 0.04]))
    sampler = build_sampler(SamplingConfig(kind, **options))
    seen = {sampler.propose(logits, position).token for position in range(400)}
    assert seen == allowed


@pytest.mark.parametrize(("seed", "draft_len"), [(0, 1), (2**40, 3)])
def test_rejection_sampling_has_the_targets_distribution(seed: int, draft_len: int) -> None:
    """Tokens of a two-token text over a vocabulary of 4, with a target that depends on the token before."""
    generator = torch.Generator().manual_seed(seed % 2**31)
    target, draft = torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator)
    counts = np.zeros((4, 4))
    num_texts = 2500
    for text in range(num_texts):
        sampler = RejectionSampler(SamplingConfig("rejection", seed=seed + text))
        tokens: list[int] = []
        while len(tokens) < 2:
            proposals: list[Proposal] = []
            for _ in range(min(draft_len, 2 - len(tokens) - 1)):
                before = [*tokens, *(p.token for p in proposals)]
                proposals.append(sampler.propose(draft[before[-1] if before else 4], len(before)))
            before = [*tokens, *(p.token for p in proposals)]
            rows = [target[before[i - 1] if i else 4] for i in range(len(tokens), len(before) + 1)]
            tokens += sampler.verify(proposals, rows, len(tokens))
        counts[tokens[0], tokens[1]] += 1
    expected = (torch.softmax(target[4], 0)[:, None] * torch.softmax(target[:4], 1)).numpy()
    chi2 = ((counts - num_texts * expected) ** 2 / (num_texts * expected)).sum()
    assert chi2 < 45  # 15 degrees of freedom: p < 1e-4


def test_rejection_accepts_everything_from_an_equal_draft() -> None:
    sampler = RejectionSampler(SamplingConfig("rejection"))
    logits = torch.randn(20, generator=torch.Generator().manual_seed(0))
    for position in range(200):
        proposal = sampler.propose(logits, position)
        assert len(sampler.verify([proposal], [logits, logits], position)) == 2


def test_gumbel_has_its_mean() -> None:
    assert abs(gumbel(5, 9, 100_000).mean() - np.euler_gamma) < 0.02
