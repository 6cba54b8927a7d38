"""GGML's block formats of the fidelity study, which runs dequantized values; no draft runs on these blocks.

The layout is that of `ggml-common.h` (ggml-org/llama.cpp) and of the `gguf` package, little endian:

    Q8_0    32 values,  34 bytes   d fp16, q int8[32]                                        w = d q
    Q5_0    32 values,  22 bytes   d fp16, fifth bits uint32, nibbles[16]                    w = d (q - 16)
    IQ4_NL  32 values,  18 bytes   d fp16, nibbles[16]                                       w = d LEVELS[q]
    Q4_K   256 values, 144 bytes   d, dmin fp16, 8 x (s, m) of 6 bits in 12 bytes, nibbles[128]   w = d s q - dmin m
    Q2_K   256 values,  84 bytes   16 x (s, m) as nibbles, pairs of bits[64], d, dmin fp16        w = d s q - dmin m

Decoding multiplies in fp32 in the order of the `gguf` package, so values are equal bit for bit. Where the format leaves
a choice, encoding searches scales and offsets for the least squared error, without an importance matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specter.errors import SpecterError

SUPER_BLOCK = 256  # values of a k-quant's block
_BLOCKS_AT_ONCE = 1 << 16  # bounds the memory of the search for scales
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """
    Attributes:
        encode: fp32 [n, v] -> uint8 [n, num_bytes]. v is `num_values`, or for a k-quant also a divisor of it that holds
            whole sub-blocks: such a row is repeated to fill the block.
        decode: uint8 [n, num_bytes] -> fp32 [n, num_values].
    """

    name: str
    num_values: int
    num_bytes: int
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]


# -- bits ---


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The fp16 at byte `start` of each block, as fp32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _half_bytes(values: Tensor) -> Tensor:
    """fp32 [n] as the bytes of fp16, [n, 2]."""
    return values.half()[:, None].view(torch.uint8)


def _nibbles(codes: Tensor, half: int) -> Tensor:
    """Codes 0..15 [n, v]: of each run of 2 `half`, the first half goes to low nibbles, the second to high ones."""
    low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2, half)).unbind(-2)
    packed: Tensor = (low | high << 4).flatten(-2)
    return packed


def _from_nibbles(packed: Tensor, half: int) -> Tensor:
    """Inverse of `_nibbles`."""
    runs = packed.unflatten(-1, (-1, half))
    return torch.stack((runs & 15, runs >> 4), -2).flatten(-3)


def _away_from_zero(values: Tensor) -> Tensor:
    """Rounds halves away from zero, as C does."""
    return values.sign() * (values.abs() + 0.5).floor()


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0, 1 / scale)


# -- blocks of 32 ---


def _encode_q8_0(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    codes = _away_from_zero(x * _inverse(scale)).to(torch.int8)
    return torch.cat((_half_bytes(scale[:, 0]), codes.view(torch.uint8)), -1)


def _decode_q8_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _encode_q5_0(x: Tensor) -> Tensor:
    outermost = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    scale = outermost / -16
    codes = (x * _inverse(scale) + 16.5).trunc().clamp(0, 31).to(torch.uint8)
    fifth = (codes >> 4).unflatten(-1, (4, 8)).int() << torch.arange(8, device=x.device)
    return torch.cat((_half_bytes(scale[:, 0]), fifth.sum(-1).to(torch.uint8), _nibbles(codes & 15, 16)), -1)


def _decode_q5_0(blocks: Tensor) -> Tensor:
    fifth = (blocks[:, 2:6, None] >> torch.arange(8, device=blocks.device, dtype=torch.uint8) & 1).flatten(1)
    codes = (_from_nibbles(blocks[:, 6:], 16) | fifth << 4).float() - 16
    return _halves(blocks, 0) * codes


def _encode_iq4_nl(x: Tensor) -> Tensor:
    """Tries scales that put the outermost value at either end of the levels, and up to 7 % around them."""
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=x.device)
    bounds = (levels[1:] + levels[:-1]) / 2
    outermost = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    best_error = torch.full_like(outermost, torch.inf)
    best_scale = torch.zeros_like(outermost)
    for end in (LEVELS[0], LEVELS[-1]):
        for step in range(-7, 8):
            guess = outermost / (end * (1 + step / 100))
            chosen = levels[torch.bucketize(x * _inverse(guess), bounds)]
            # least squares for the scale, given the levels
            scale = ((x * chosen).sum(-1, keepdim=True) / chosen.square().sum(-1, keepdim=True)).half().float()
            error = (scale * chosen - x).square().sum(-1, keepdim=True)
            better = error < best_error
            best_error, best_scale = torch.where(better, error, best_error), torch.where(better, scale, best_scale)
    codes = torch.bucketize(x * _inverse(best_scale), bounds)
    return torch.cat((_half_bytes(best_scale[:, 0]), _nibbles(codes, 16)), -1)


def _decode_iq4_nl(blocks: Tensor) -> Tensor:
    levels = torch.tensor(LEVELS, dtype=torch.float32, device=blocks.device)
    return _halves(blocks, 0) * levels[_from_nibbles(blocks[:, 2:], 16).long()]


# -- blocks of 256: scales and offsets of sub-blocks, themselves quantised ---


def fit_offsets(x: Tensor, max_code: int) -> tuple[Tensor, Tensor]:
    """Non-negative scale and offset of each sub-block x [..., s] with the closest scale * code - offset.

    Codes are 0..max_code. Tries 16 scales around the range over `max_code`; given the codes, scale and offset are those
    of least squares.
    """
    low = x.amin(-1, keepdim=True).clamp(max=0)
    span = x.amax(-1, keepdim=True).clamp(min=0) - low
    best_scale, best_offset = span / max_code, -low
    codes = ((x - low) * _inverse(best_scale)).round().clamp(0, max_code)
    best_error = (best_scale * codes + low - x).square().sum(-1, keepdim=True)
    count, sum_x = x.shape[-1], x.sum(-1, keepdim=True)
    for step in range(16):
        codes = ((x - low) * _inverse(span) * (max_code - 0.8 + 0.1 * step)).round().clamp(0, max_code)
        sum_q, sum_qq = codes.sum(-1, keepdim=True), codes.square().sum(-1, keepdim=True)
        sum_qx = (codes * x).sum(-1, keepdim=True)
        determinant = count * sum_qq - sum_q.square()
        scale = (count * sum_qx - sum_q * sum_x) * _inverse(determinant)
        offset = (sum_q * sum_qx - sum_qq * sum_x) * _inverse(determinant)
        scale = torch.where(offset < 0, sum_qx * _inverse(sum_qq), scale)
        offset = offset.clamp(min=0)
        error = (scale * codes - offset - x).square().sum(-1, keepdim=True)
        better = (error < best_error) & (scale > 0)
        best_scale, best_offset = torch.where(better, scale, best_scale), torch.where(better, offset, best_offset)
        best_error = torch.where(better, error, best_error)
    return best_scale[..., 0], best_offset[..., 0]


def _quantize_offsets(x: Tensor, max_code: int, max_scale: int, sub_block: int) -> tuple[Tensor, ...]:
    """d, dmin fp32 [n] (values of fp16), scales and offsets 0..max_scale uint8 [n, subs], codes uint8 [n, v].

    A row shorter than the block is repeated to fill it; with the same scales in every copy.
    """
    subs = x.unflatten(-1, (-1, sub_block))
    scales, offsets = fit_offsets(subs, max_code)
    d, dmin = (part.amax(-1).div(max_scale).half().float() for part in (scales, offsets))
    s, m = (
        (part * _inverse(unit)[:, None]).round().clamp(0, max_scale) for part, unit in ((scales, d), (offsets, dmin))
    )
    shifted = subs + (dmin[:, None] * m)[..., None]
    codes = (shifted * _inverse(d[:, None] * s)[..., None]).round().clamp(0, max_code)
    copies = SUPER_BLOCK // x.shape[-1]
    return d, dmin, *(part.to(torch.uint8).repeat(1, copies) for part in (s, m, codes.flatten(-2)))


def _decode_offsets(d: Tensor, dmin: Tensor, s: Tensor, m: Tensor, codes: Tensor) -> Tensor:
    """d s q - dmin m; d and dmin [n, 1], s and m [n, subs], codes [n, v]."""
    groups = codes.float().unflatten(-1, (s.shape[-1], -1))
    values: Tensor = (d * s.float())[..., None] * groups - (dmin * m.float())[..., None]
    return values.flatten(-2)


def _encode_q4_k(x: Tensor) -> Tensor:
    d, dmin, s, m, codes = _quantize_offsets(x, 15, 63, 32)
    first, last = slice(0, 4), slice(4, 8)  # the upper two bits of the last four are in the bytes of the first four
    packed = torch.cat(
        (
            s[:, first] | (s[:, last] >> 4) << 6,
            m[:, first] | (m[:, last] >> 4) << 6,
            s[:, last] & 15 | (m[:, last] & 15) << 4,
        ),
        -1,
    )
    return torch.cat((_half_bytes(d), _half_bytes(dmin), packed, _nibbles(codes, 32)), -1)


def _decode_q4_k(blocks: Tensor) -> Tensor:
    a, b, c = blocks[:, 4:16].split(4, -1)
    s = torch.cat((a & 63, c & 15 | (a >> 6) << 4), -1)
    m = torch.cat((b & 63, c >> 4 | (b >> 6) << 4), -1)
    return _decode_offsets(_halves(blocks, 0), _halves(blocks, 2), s, m, _from_nibbles(blocks[:, 16:], 32))


def _encode_q2_k(x: Tensor) -> Tensor:
    d, dmin, s, m, codes = _quantize_offsets(x, 3, 15, 16)
    quarters = codes.unflatten(-1, (2, 4, 32))  # of each half block, run j of 32 values is in bits 2j and 2j + 1
    pairs = quarters[:, :, 0] | quarters[:, :, 1] << 2 | quarters[:, :, 2] << 4 | quarters[:, :, 3] << 6
    return torch.cat((s | m << 4, pairs.flatten(1), _half_bytes(d), _half_bytes(dmin)), -1)


def _decode_q2_k(blocks: Tensor) -> Tensor:
    scales, pairs = blocks[:, :16], blocks[:, 16:80].unflatten(-1, (2, 32))
    codes = torch.stack([pairs >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(1)
    return _decode_offsets(_halves(blocks, 80), _halves(blocks, 82), scales & 15, scales >> 4, codes)


Q8_0 = BlockFormat("Q8_0", 32, 34, _encode_q8_0, _decode_q8_0)
Q5_0 = BlockFormat("Q5_0", 32, 22, _encode_q5_0, _decode_q5_0)
IQ4_NL = BlockFormat("IQ4_NL", 32, 18, _encode_iq4_nl, _decode_iq4_nl)
Q4_K = BlockFormat("Q4_K", SUPER_BLOCK, 144, _encode_q4_k, _decode_q4_k)
Q2_K = BlockFormat("Q2_K", SUPER_BLOCK, 84, _encode_q2_k, _decode_q2_k)
# As in llama.cpp, rows whose width is no multiple of 256 take the second format: the 1408 wide down projections of
# DeepSeek and Qwen.
FORMATS = {"q2_k": (Q2_K, IQ4_NL), "q4_k": (Q4_K, Q5_0), "q8_0": (Q8_0, Q8_0)}


# -- matrices ---


def format_of(name: str, width: int) -> BlockFormat:
    """The format of rows of `width` weights under the type `name`.

    A narrow stand-in's row whose width divides 256 is repeated to fill a block: the full-size row is the narrow row
    repeated (docs/decisions/0006), so the codes are those of the full-size model.

    Raises SpecterError: blocks of 32 do not divide the row.
    """
    wanted, otherwise = FORMATS[name]
    if width % Q8_0.num_values:
        raise SpecterError(
            f"blocks of {Q8_0.num_values} do not divide rows of {width} weights",
            "use gptq, rtn or awq, whose groups may be smaller",
        )
    return wanted if width % wanted.num_values == 0 or SUPER_BLOCK % width == 0 else otherwise


def round_to_blocks(weights: Tensor, name: str) -> Tensor:
    """`weights` [..., out, in] of any floating type, quantized to the type `name` and dequantized to fp32.

    Raises SpecterError: a width that blocks do not divide, or a weight that is not finite.
    """
    width = weights.shape[-1]
    chosen = format_of(name, width)
    if not bool(torch.isfinite(weights).all()):
        raise SpecterError("weights to quantise hold NaN or infinity", "check the checkpoint; download it again")
    values = min(chosen.num_values, width)
    pieces = weights.float().reshape(-1, values).split(_BLOCKS_AT_ONCE)
    decoded = chosen.decode(torch.cat([chosen.encode(piece) for piece in pieces]))
    return decoded[:, :values].reshape(weights.shape)
