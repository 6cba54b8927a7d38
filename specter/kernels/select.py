"""Embedding lookup and token selection on the device: a step's token feeds the next without the host.

    tokens int32 [T], embedding [V, D] -> residual stream [T, D];  logits fp32 [T, V] -> tokens int32 [T]
    bytes = T * D * itemsize for the embedding, 4 * T * V for the logits

token = argmax(logits / temperature + Gumbel(seed, position)), ties to the lower token, over the first `num_tokens`
logits; the rest pad the vocabulary. The noise equals `specter.speculation.noise` bit for bit: Philox 4x32-10 of (seed,
position, token / 4), logarithms in fp64 because fp32 lacks the values near 1 from which the largest noise comes. It
does not depend on the vocabulary's size, so the device selects the token of the host's sampler. No top-k, no top-p.
"""

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
    """stream = embedding [V, D] of tokens int32 [T], in blocks of `BLOCK_D` channels; gain [D] of the next norm."""
    num_rows, hidden = stream.x.shape
    num_blocks = triton.cdiv(hidden, BLOCK_D)
    _embed[(num_rows, num_blocks)](
        tokens, embedding, gain, stream.x, stream.scaled, stream.squares, D=hidden, BLOCKS=num_blocks,
        BLOCK_D=BLOCK_D, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit
def _gumbel(seed, position, tokens):
    """`specter.speculation.noise.gumbel` at `tokens`, fp32."""
    zero = tokens * 0
    a, b, c, d = tl.philox(seed, tokens // 4, position + zero, zero, zero, 10)
    lane = tokens % 4
    bits = tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
    uniform = (bits.to(tl.uint32, bitcast=True).to(tl.float64) + 0.5) / 4294967296.0
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _scan(
    logits, position, peaks, tokens, seed, temperature, V: tl.constexpr, LIMIT: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, row = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK_V + tl.arange(0, BLOCK_V)
    wait_previous(PDL)
    scores = tl.load(logits + row * V + at, mask=at < LIMIT, other=float("-inf"))
    divisor = tl.load(temperature)
    if divisor > 0:
        # Correctly rounded division as on the host; multiplying by 1 / T can differ.
        scores = tl.div_rn(scores, tl.full(scores.shape, 0.0, tl.float32) + divisor)
        scores += _gumbel(tl.load(seed), tl.load(position) + row + 1, at)
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
class SamplingParams:
    """How tokens are selected. On the device, so that captured graphs follow a change.

    Attributes:
        seed: int64 [1]. temperature: fp32 [1]; 0 is greedy.
    """

    seed: Tensor
    temperature: Tensor

    @classmethod
    def greedy(cls, device: torch.device | str) -> SamplingParams:
        return cls(torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, device=device))

    def set(self, seed: int, temperature: float | None) -> None:
        """Asynchronous. A `temperature` of None is greedy."""
        self.seed.fill_(seed)
        self.temperature.fill_(temperature or 0.0)


@dataclass(frozen=True, slots=True)
class Selection:
    """Parameters and scratch of token selection.

    Attributes:
        num_tokens: number of leading logits of a row that are tokens.
        peaks, tokens: fp32, int32 [T, num_tokens / 1024] scratch.
    """

    num_tokens: int
    params: SamplingParams
    peaks: Tensor
    tokens: Tensor

    @classmethod
    def empty(cls, num_rows: int, num_tokens: int, params: SamplingParams) -> Selection:
        shape, device = (num_rows, triton.cdiv(num_tokens, _BLOCK_V)), params.seed.device
        tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        return cls(num_tokens, params, torch.zeros(shape, device=device), tokens)

    def choose(self, logits: Tensor, position: Tensor, out: Tensor, pdl: bool) -> None:
        """out int32 [T]: token of row t, at position + t + 1, from logits fp32 [T, V]; position int32 [1]."""
        self._run(logits, out, out, position, position, False, pdl)

    def advance(self, logits: Tensor, out: Tensor, feed: Tensor, position: Tensor, step: Tensor, pdl: bool) -> None:
        """Stores one row's token in out[step] and feed[0], then increments position and step (int32 [1])."""
        self._run(logits, out, feed, position, step, True, pdl)

    def _run(
        self, logits: Tensor, out: Tensor, feed: Tensor, position: Tensor, step: Tensor, advance: bool, pdl: bool
    ) -> None:
        num_rows, vocab = logits.shape
        num_blocks = self.peaks.shape[1]
        _scan[(num_blocks, num_rows)](
            logits, position, self.peaks, self.tokens, self.params.seed, self.params.temperature, V=vocab,
            LIMIT=self.num_tokens, BLOCKS=num_blocks, BLOCK_V=_BLOCK_V, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
        _decide[(1 if advance else num_rows,)](
            self.peaks, self.tokens, out, feed, position, step, BLOCKS=num_blocks, BLOCK_B=pow2(num_blocks),
            ADVANCE=advance, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
