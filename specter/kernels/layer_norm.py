"""LayerNorm of the residual stream (PhiMoE), one program per row.

    x fp32 [T, D] -> scaled [T, D] model dtype; bytes = T * D * (4 + itemsize)

RMSNorm is one factor per row and is applied by the next product instead (see `Stream`).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specter.kernels.device import Stream, pow2, wait_previous
from specter.kernels.octets import OCTET, Octets, store_octets

_NUM_WARPS = 8


@triton.jit
def _layer_norm(
    x, gain, bias, scaled, octets, scales, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, OCTETS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, channels = tl.program_id(0), tl.arange(0, BLOCK_D)
    inside = channels < D
    gains = tl.load(gain + channels, mask=inside, other=0.0).to(tl.float32)
    biases = tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
    wait_previous(PDL)
    value = tl.load(x + row * D + channels, mask=inside, other=0.0)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / D, 0.0)
    value = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / D + eps) * gains + biases
    tl.store(scaled + row * D + channels, value.to(scaled.dtype.element_ty), mask=inside)
    if OCTETS:
        store_octets(value, 0, octets, scales, D // 8, D // 8, BLOCK_D)


def layer_norm(stream: Stream, gain: Tensor, bias: Tensor, octets: Octets | None, eps: float, pdl: bool) -> None:
    """stream.scaled = layernorm(stream.x) * gain + bias: gain, bias [D].

    Args:
        octets: also receives the result, if there is one row; D is then a multiple of 8.
    """
    num_rows, hidden = stream.x.shape
    assert octets is None or (num_rows == 1 and hidden % OCTET == 0)
    _layer_norm[(num_rows,)](
        stream.x, gain, bias, stream.scaled, stream.x if octets is None else octets.values,
        stream.x if octets is None else octets.scales, eps, D=hidden, BLOCK_D=max(OCTET, pow2(hidden)),
        OCTETS=octets is not None, PDL=pdl, num_warps=_NUM_WARPS, launch_pdl=pdl,
    )  # fmt: skip
