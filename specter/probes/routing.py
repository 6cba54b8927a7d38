"""Quality of an INT4 draft from recordings: routing fidelity, acceptance, expert union."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specter.errors import SpecterError
from specter.recording import Recording


def match(draft: NDArray[np.int16], target: NDArray[np.int16]) -> NDArray[np.float64]:
    """Share of the target's experts that are among the draft's, at any rank: [..., k], [..., k] -> [...]."""
    shares: NDArray[np.float64] = (draft[..., :, None] == target[..., None, :]).any(-2).mean(-1)
    return shares


def generated_matches(recordings: Iterable[Recording]) -> NDArray[np.float64]:
    """`match` per position and layer [N, MoE layers], where draft and target saw the same committed prefix.

    Draft step j and row j of the verification process the same token. Rows after the first rejected draft are left out:
    their text was not committed.
    """
    found = []
    for recording in recordings:
        for one in recording.passes[1:]:
            num_kept = min(len(one.new_tokens), len(one.draft_routing))
            target = one.target_routing.swapaxes(0, 1)[:num_kept]  # [rows, MoE layers, k]
            found.append(match(one.draft_routing[:num_kept], target))
    return np.concatenate(found)


def named_and_used(recordings: Iterable[Recording], num_experts: int, top_m: Sequence[int]) -> dict[int, float]:
    """By M, the share of the experts that a draft names which its verification uses.

    A draft names, per layer, the M experts that most of its tokens chose (ties: the lower number); fewer where they
    chose fewer. Rounds weigh by the experts that they name.
    """
    named, used = dict.fromkeys(top_m, 0), dict.fromkeys(top_m, 0)
    for recording in recordings:
        for one in recording.passes[1:]:
            for chosen, needed in zip(one.draft_routing.swapaxes(0, 1), one.target_routing, strict=True):
                counts = np.bincount(chosen.ravel(), minlength=num_experts)
                ranked = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
                hits = np.isin(ranked, needed)
                for m in top_m:
                    named[m] += len(ranked[:m])
                    used[m] += int(hits[:m].sum())
    return {m: used[m] / named[m] for m in top_m if named[m]}


def acceptance(recordings: Iterable[Recording]) -> tuple[int, int]:
    """Accepted and examined drafts; examined are the accepted and the first rejected of every round."""
    accepted = examined = 0
    for recording in recordings:
        for one in recording.passes[1:]:
            num_accepted = len(one.new_tokens) - 1
            accepted += num_accepted
            examined += num_accepted + (num_accepted < len(one.draft_routing))
    return accepted, examined


def accepted_runs(recordings: Iterable[Recording]) -> list[int]:
    """Lengths of runs of accepted drafts that end in a rejection; a run may span several rounds."""
    lengths = []
    for recording in recordings:
        length = 0
        for one in recording.passes[1:]:
            num_accepted = len(one.new_tokens) - 1
            length += num_accepted
            if num_accepted < len(one.draft_routing):
                lengths.append(length)
                length = 0
    return lengths


def runs_of(agrees: NDArray[np.bool_]) -> list[int]:
    """`accepted_runs` from the agreement of draft and target at every position of a text [T]."""
    ends = np.flatnonzero(~agrees)
    lengths: list[int] = (np.diff(ends, prepend=-1) - 1).tolist()
    return lengths


def expected_run(acceptance: float) -> float:
    """E[A] = alpha / (1 - alpha): mean length of a run of drafts accepted with probability alpha."""
    return acceptance / (1 - acceptance) if acceptance < 1 else math.inf


def largest_useful_depth(acceptance: float) -> int:
    """K_max: the next power of two at or above E[A], as 28.7 means 32 in the paper."""
    expected = expected_run(acceptance)
    if not math.isfinite(expected):
        raise SpecterError("every draft was accepted, so no depth is too large", "measure on more text")
    return 1 << max(0, math.ceil(math.log2(max(expected, 1))))


def decoded_routing(recording: Recording) -> NDArray[np.int16]:
    """The target's routing of a plain recording's decoded tokens [T, MoE layers, k]."""
    return np.concatenate([one.target_routing.swapaxes(0, 1) for one in recording.passes[1:]])


def union_sizes(routing: NDArray[np.int16], num_experts: int, windows: Sequence[int]) -> dict[int, float]:
    """Distinct experts per layer in K consecutive tokens, mean over positions and layers.

    Args:
        routing: [T, MoE layers, k].
        windows: the values of K; those above T are left out.
    """
    num_tokens, num_layers, _ = routing.shape
    chosen = np.zeros((num_tokens, num_layers, num_experts), np.int32)
    np.put_along_axis(chosen, routing.astype(np.int64), 1, axis=-1)
    upto = np.concatenate([np.zeros_like(chosen[:1]), chosen.cumsum(0)])  # number of choices before token t
    return {k: float(((upto[k:] - upto[:-k]) > 0).sum(-1).mean()) for k in windows if k <= num_tokens}
