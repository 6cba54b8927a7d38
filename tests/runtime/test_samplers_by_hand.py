"""Samplers with given noise: each token worked out by hand. Over 4 tokens, so that every number shows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specter.config import SamplingConfig
from specter.speculation import sampling
from specter.speculation.accept import Proposal, TokenSampler
from specter.speculation.noise import gumbel, uniforms
from specter.speculation.sampling import GreedySampler, RejectionSampler, SeededSampler, build_sampler

Noise = Callable[[int, int, int, int], NDArray[np.float64]]


def logits(*probs: float) -> torch.Tensor:
    return torch.log(torch.tensor(probs, dtype=torch.float64))


TARGET = logits(0.4, 0.3, 0.2, 0.1)
DRAFT = np.array([0.1, 0.6, 0.2, 0.1])


def noise_of(values: dict[tuple[int, int], float]) -> Noise:
    """Uniform noise by position and stream (1: draft, 2: acceptance, 3: target), of seed 9."""

    def draw(seed: int, position: int, stream: int, size: int) -> NDArray[np.float64]:
        assert (seed, size) == (9, 1)
        return np.array([values[position, stream]])

    return draw


@pytest.fixture
def rejection() -> RejectionSampler:
    return RejectionSampler(SamplingConfig("rejection", seed=9))


def test_each_kind_of_sampling_has_its_sampler() -> None:
    kinds = {"greedy": GreedySampler, "seeded": SeededSampler, "rejection": RejectionSampler}
    assert {kind: type(build_sampler(SamplingConfig(kind))) for kind in kinds} == kinds


def test_noise_is_one_half_of_a_step_inside_the_unit_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Philox counters: block, position and stream; both halves of the seed are the key; four numbers a block."""
    seen = []

    def philox(counters: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
        seen.append((counters.tolist(), key))
        return np.array([[0, 1], [2**31, 2], [2**32 - 1, 3], [7, 4]], np.uint64)

    monkeypatch.setattr("specter.speculation.noise.philox", philox)
    found = uniforms((5 << 32) + 6, position=11, stream=3, size=6)
    assert seen == [([[0, 1], [11, 11], [3, 3], [0, 0]], (6, 5))]
    assert (found * 2**32).tolist() == [0.5, 2**31 + 0.5, 2**32 - 0.5, 7.5, 1.5, 2.5]


def test_a_seed_of_64_bits_counts_with_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    monkeypatch.setattr(
        "specter.speculation.noise.philox", lambda counters, key: keys.append(key) or np.zeros((4, 1), np.uint64)
    )
    for seed in (2**64 - 1, 2**32, 1):
        uniforms(seed, 0, 0, 4)
    assert keys == [(2**32 - 1, 2**32 - 1), (0, 1), (1, 0)]


def test_gumbel_noise_is_minus_log_minus_log_of_stream_0(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def draw(seed: int, position: int, stream: int, size: int) -> NDArray[np.float64]:
        calls.append((seed, position, stream, size))
        return np.exp(-np.exp(-np.array([2.0, -1.0, 0.0])))

    monkeypatch.setattr("specter.speculation.noise.uniforms", draw)
    assert gumbel(4, 7, 3).tolist() == pytest.approx([2.0, -1.0, 0.0], abs=1e-6)
    assert calls == [(4, 7, 0, 3)] and gumbel(4, 7, 3).dtype == np.float32


@pytest.mark.parametrize(
    ("temperature", "token"),
    [(1.0, 0), (1.9, 0), (2.1, 2)],  # 3 / T against 2 / T and 0.5 more noise: equal at T = 2
)
def test_a_seeded_token_is_the_argmax_of_tempered_logits_and_noise(
    temperature: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def draw(seed: int, position: int, size: int) -> NDArray[np.float32]:
        calls.append((seed, position, size))
        return np.array([0.0, 0.0, 0.5], np.float32)

    monkeypatch.setattr(sampling, "gumbel", draw)
    sampler = SeededSampler(SamplingConfig("seeded", temperature=temperature, seed=5))
    output = torch.tensor([3.0, 1.0, 2.0])
    assert [sampler.select(output, 8), sampler.select(output, 8)] == [token, token]
    assert calls == [(5, 8, 3)], "drawn once for a position"
    assert sampler.propose(output, 8) == Proposal(token)


class TestRejection:
    def test_a_proposal_is_drawn_from_the_cumulative_draft(
        self, rejection: RejectionSampler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn = []
        for uniform in (0.05, 0.15, 0.75, 0.95):
            monkeypatch.setattr(sampling, "uniforms", noise_of({(4, 1): uniform}))
            proposal = rejection.propose(torch.from_numpy(np.log(DRAFT)), 4)
            assert proposal.probs == pytest.approx(DRAFT)
            drawn.append(proposal.token)
        assert drawn == [0, 1, 2, 3]

    @pytest.mark.parametrize(("temperature", "expected"), [(1.0, [0.9, 0.1]), (2.0, [0.75, 0.25])])
    def test_temperature_divides_the_logits(self, temperature: float, expected: list[float]) -> None:
        """A ratio of 9 becomes 3 at T = 2."""
        sampler = RejectionSampler(SamplingConfig("rejection", temperature=temperature))
        assert sampler.propose(logits(0.9, 0.1), 0).probs == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("uniform", "committed"),
        [
            (0.49, [1, 3]),  # u * q = 0.294 < p = 0.3: accepted, then the bonus
            (0.51, [0]),  # 0.306: rejected, and (p - q)+ is all on token 0
        ],
    )
    def test_a_draft_is_accepted_with_probability_p_over_q(
        self, uniform: float, committed: list[int], rejection: RejectionSampler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The draft proposes token 1 with q = 0.6, the target gives it p = 0.3."""
        monkeypatch.setattr(sampling, "uniforms", noise_of({(7, 2): uniform, (7, 3): 0.5, (8, 3): 0.95}))
        assert rejection.verify([Proposal(1, DRAFT)], [TARGET, TARGET], position=7) == committed

    def test_a_draft_that_the_target_excludes_is_rejected_whatever_the_noise(
        self, rejection: RejectionSampler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sampling, "uniforms", noise_of({(7, 2): 0.0, (7, 3): 0.1}))
        sure = np.array([0.0, 0.0, 0.0, 1.0])
        assert rejection.verify([Proposal(3, sure)], [logits(0.5, 0.5, 0.0, 0.0)] * 2, 7) == [0]

    def test_the_replacement_is_drawn_from_what_the_target_has_more(
        self, rejection: RejectionSampler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """p - q = 0.2, -0.4, 0.2, 0 with q = 0.2, 0.7, 0, 0.1: token 0 below one half, token 2 above."""
        draft = np.array([0.2, 0.7, 0.0, 0.1])
        for uniform, token in ((0.45, 0), (0.55, 2)):
            monkeypatch.setattr(sampling, "uniforms", noise_of({(7, 2): 0.99, (7, 3): uniform}))
            assert rejection.verify([Proposal(1, draft)], [TARGET, TARGET], 7) == [token]

    def test_each_position_has_its_own_noise(
        self, rejection: RejectionSampler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Three drafts from position 5: two accepted, the third replaced; its noise is that of position 7."""
        noise = {(5, 2): 0.1, (6, 2): 0.1, (7, 2): 0.9, (7, 3): 0.1}
        monkeypatch.setattr(sampling, "uniforms", noise_of(noise))
        proposals = [Proposal(1, DRAFT)] * 3
        assert rejection.verify(proposals, [TARGET] * 4, 5) == [1, 1, 0]
        noise[6, 2], noise[6, 3] = 0.9, 0.1
        assert rejection.verify(proposals, [TARGET] * 4, 5) == [1, 0]


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, None),
        (2, 1.0, [0, 1]),
        (3, 0.95, [0, 1, 2]),
        (0, 0.39, [0]),  # what lies before a token counts, so that one stays
        (0, 0.41, [0, 1]),
        (0, 0.69, [0, 1]),
        (0, 0.75, [0, 1, 2]),
        (2, 0.5, [0]),  # of the two that top-k leaves, the first has 0.57
        (1, 0.01, [0]),
    ],
)
def test_top_k_comes_before_top_p(top_k: int, top_p: float, kept: list[int] | None) -> None:
    order = [2, 0, 3, 1]  # where the tokens with 0.4, 0.3, 0.2, 0.1 are
    shuffled = torch.empty(4, dtype=torch.float64)
    shuffled[order] = TARGET
    mask = sampling._kept(shuffled, SamplingConfig("seeded", top_k=top_k, top_p=top_p))
    if kept is None:
        assert mask is None
    else:
        assert mask is not None and mask[order].tolist() == [index in kept for index in range(4)]


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3)])
def test_top_p_leaves_no_token_behind_that_share(top_p: float, num_kept: int) -> None:
    """Four tokens of one quarter each: sums are exact."""
    mask = sampling._kept(torch.zeros(4, dtype=torch.float64), SamplingConfig("seeded", top_p=top_p))
    assert mask is not None and mask.tolist() == [index < num_kept for index in range(4)]


def test_each_output_is_read_at_its_own_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two drafts from position 10, and the bonus token behind them."""
    sampler, positions = TokenSampler(), []
    monkeypatch.setattr(sampler, "select", lambda output, position: positions.append(position) or output)
    assert sampler.verify([Proposal(4), Proposal(5)], [4, 5, 6], position=10) == [4, 5, 6]
    assert positions == [10, 11, 12]
    assert sampler.verify([Proposal(4), Proposal(5)], [4, 7, 6], position=20) == [4, 7]
    assert positions[3:] == [20, 21]
