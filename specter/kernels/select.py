"""Embedding in, token out: the two ends of a step, so that a step's token feeds the next without the host.

token = argmax(logits / T + Gumbel(seed, position)), ties to the lower token. The noise is Philox 4x32-10 of
(seed, position, token / 4), the counters of `specter.speculation.noise`; its logarithms are this device's, in
fp32, the same for draft and target. bytes: one embedding row; logits fp32 [T, V].
"""

# mypy: disable-error-code=no-untyped-def
# (the arguments of a kernel are typed by its launch)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specter.kernels.device import Stream, pow2, wait_previous

BLOCK_D = 512
_BLOCK_V = 1024


@triton.jit
def _embed(
    tokens, embedding, gain, x, scaled, squares, D: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    channels = block * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = channels < D
    wait_previous(PDL)
    source = embedding + tl.load(tokens + row).to(tl.int64) * D + channels
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + row * D + channels, value, mask=inside)
    tl.store(squares + row * BLOCKS + block, tl.sum(value * value, axis=0))
    value *= tl.load(gain + channels, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled + row * D + channels, value.to(scaled.dtype.element_ty), mask=inside)


def embed(tokens: Tensor, embedding: Tensor, stream: Stream, gain: Tensor, pdl: bool) -> None:
    """stream = embedding [V, D] of tokens int32 [T], in blocks of `BLOCK_D` channels; gain [D] of the first norm."""
    num_rows, hidden = stream.x.shape
    num_blocks = triton.cdiv(hidden, BLOCK_D)
    _embed[(num_rows, num_blocks)](
        tokens, embedding, gain, stream.x, stream.scaled, stream.squares, D=hidden, BLOCKS=num_blocks,
        BLOCK_D=BLOCK_D, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _uniform(seed, position, tokens):
    """Numbers in (0, 1), 24 bits each."""
    zero = tokens * 0
    a, b, c, d = tl.philox(seed, tokens // 4, position + zero, zero, zero, 10)
    lane = tokens % 4
    bits = tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
    return ((bits >> 8).to(tl.int32).to(tl.float32) + 0.5) / 16777216.0


@triton.jit(do_not_specialize=["seed"])
def _scan(
    logits, position, peaks, tokens, seed, inverse_temperature, V: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_V: tl.constexpr, SAMPLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK_V + tl.arange(0, BLOCK_V)
    wait_previous(PDL)
    scores = tl.load(logits + row * V + at, mask=at < V, other=float("-inf"))
    if SAMPLED:
        noise = -tl.log(-tl.log(_uniform(seed, tl.load(position) + row + 1, at)))
        scores = scores * inverse_temperature + noise
    tl.store(peaks + row * BLOCKS + block, tl.max(scores, axis=0))
    tl.store(tokens + row * BLOCKS + block, block * BLOCK_V + tl.argmax(scores, axis=0))


@triton.jit
def _decide(
    peaks, tokens, out, feed, position, step, BLOCKS: tl.constexpr, BLOCK_B: tl.constexpr, ADVANCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCK_B)
    wait_previous(PDL)
    scores = tl.load(peaks + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=float("-inf"))
    token = tl.load(tokens + row * BLOCKS + tl.argmax(scores, axis=0))
    if ADVANCE:
        now = tl.load(step)
        tl.store(out + now, token)
        tl.store(feed, token)
        tl.store(step, now + 1)
        tl.store(position, tl.load(position) + 1)
    else:
        tl.store(out + row, token)


@dataclass(frozen=True, slots=True)
class Selection:
    """How a token is chosen; greedy if `temperature` is None.

    Attributes:
        peaks, tokens: fp32, int32 [T, V / 1024] scratch.
    """

    peaks: Tensor
    tokens: Tensor
    seed: int = 0
    temperature: float | None = None

    @classmethod
    def empty(
        cls, num_rows: int, vocab: int, device: torch.device | str, seed: int = 0, temperature: float | None = None
    ) -> Selection:
        shape = (num_rows, triton.cdiv(vocab, _BLOCK_V))
        tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        return cls(torch.zeros(shape, device=device), tokens, seed, temperature)

    def _scan(self, logits: Tensor, position: Tensor, pdl: bool) -> None:
        num_rows, vocab = logits.shape
        num_blocks = self.peaks.shape[1]
        _scan[(num_blocks, num_rows)](
            logits, position, self.peaks, self.tokens, self.seed, 1.0 / (self.temperature or 1.0), V=vocab,
            BLOCKS=num_blocks, BLOCK_V=_BLOCK_V, SAMPLED=self.temperature is not None, PDL=pdl, num_warps=4,
            launch_pdl=pdl,
        )  # fmt: skip

    def _decide(
        self, num_rows: int, out: Tensor, feed: Tensor, position: Tensor, step: Tensor, advance: bool, pdl: bool
    ) -> None:
        num_blocks = self.peaks.shape[1]
        _decide[(num_rows,)](
            self.peaks, self.tokens, out, feed, position, step, BLOCKS=num_blocks, BLOCK_B=pow2(num_blocks),
            ADVANCE=advance, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip

    def choose(self, logits: Tensor, position: Tensor, out: Tensor, pdl: bool) -> None:
        """out int32 [T]: row t's token for position + t + 1, of logits fp32 [T, V]; position int32 [1]."""
        self._scan(logits, position, pdl)
        self._decide(logits.shape[0], out, out, position, position, False, pdl)

    def advance(self, logits: Tensor, out: Tensor, feed: Tensor, position: Tensor, step: Tensor, pdl: bool) -> None:
        """One row's token goes to out[step] and feed[0]; then position and step (int32 [1] each) move on by one."""
        self._scan(logits, position, pdl)
        self._decide(1, out, feed, position, step, True, pdl)
