"""Encoder and reference decoder: bit for bit, whatever the weights; sizes; refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter.codecs.int4 import Int4Matrices
from specter.codecs.residual import encode
from specter.codecs.residual.checksum import checksum, combined
from specter.codecs.residual.decode import decode
from specter.codecs.residual.encode import choose_windows, encode_layer, measure_bits
from specter.codecs.residual.layout import Header, Kind, Layout, Matrix
from specter.codecs.residual.resident import ResidentCodes, layout_of, unpack_codes, unpack_params
from specter.codecs.residual.sizes import BLOCK, HEADER_WORDS
from specter.codecs.residual.windows import CANDIDATES, Windows
from specter.errors import SpecterError
from specter.kernels.int4_moe import PackedExperts
from specter.models.checkpoint import Checkpoint
from specter.quantize.gptq import quantize_gptq
from specter.quantize.rtn import quantize_rtn
from tests.codecs.experts import KINDS, NEAREST, TWO_SIDED, Layer, make_layer, make_weights, quantize, same_bits


def check_round_trip(layer: Layer, windows: Windows | None, blocks_at_once: int = 64) -> None:
    encoded = layer.encode(windows, blocks_at_once)
    layout = layout_of(layer.codes)
    for expert, blob in enumerate(encoded.blobs):
        assert len(blob) <= layout.raw_words and len(blob) % 16 == 0
        matrices = decode(blob, layer.codes_of(expert), "expert")
        for matrix, original in zip(matrices, layer.weights, strict=True):
            assert same_bits(matrix, original[expert])


@given(
    kind=st.sampled_from([*KINDS, "bits"]),
    rows=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    groups=st.tuples(st.sampled_from([8, 16, 32, 64, 128, 256, 512]), st.sampled_from([8, 32, 64, 128, 512])),
    num_groups=st.tuples(st.integers(1, 4), st.integers(1, 11)),
    num_experts=st.integers(1, 3),
    noise=st.sampled_from([0.0, 0.02, 0.3]),
    moved=st.sampled_from([0.0, 0.2]),
    sym=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    windows=st.sampled_from([None, *CANDIDATES]),
    blocks_at_once=st.sampled_from([1, 2, 64]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=120, deadline=None)
def test_round_trip(
    kind: str, rows: tuple[int, int], groups: tuple[int, int], num_groups: tuple[int, int], num_experts: int,
    noise: float, moved: float, sym: bool, dtype: torch.dtype, windows: Windows | None, blocks_at_once: int, seed: int,
) -> None:  # fmt: skip
    parts = []
    for n, group, count in zip(rows, groups, num_groups, strict=True):
        one = make_layer(kind, [(n, group * count)], num_experts, group, noise, seed, sym, moved, dtype)
        parts.append(one)
    layer = Layer([part.weights[0] for part in parts], [part.codes[0] for part in parts])
    check_round_trip(layer, windows, blocks_at_once)


@given(
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    windows=st.sampled_from(CANDIDATES),
)
@settings(max_examples=30, deadline=None)
def test_codes_and_scales_may_be_anything(seed: int, dtype: torch.dtype, windows: Windows) -> None:
    """Codes that have nothing to do with the weights, scales over the whole range of their type."""
    generator = torch.Generator().manual_seed(seed)
    shape, groups = (2, 5, 256), (2, 5, 2)
    bits = torch.randint(1, 0x7C00 if dtype == torch.float16 else 0x7F80, groups, generator=generator)
    matrices = Int4Matrices(
        codes=torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8),
        scales=bits.to(torch.int16).view(dtype),
        zeros=torch.randint(0, 16, groups, generator=generator, dtype=torch.uint8),
        group=128,
    )
    check_round_trip(Layer([make_weights("student", shape, seed)], [ResidentCodes.pack(matrices)]), windows)


@pytest.mark.parametrize("windows", [NEAREST, TWO_SIDED])
def test_all_bit_patterns(windows: Windows) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(1, 128, 512)
    fill = make_weights("gauss", (1, 896, 512))
    codes = [ResidentCodes.pack(quantize(torch.cat([make_weights("gauss", (1, 128, 512), 1), fill], 1), 128))]
    layer = Layer([torch.cat([patterns, fill], 1)], codes)
    assert not layer.encode(windows).is_raw[0]  # among so many others they fit
    check_round_trip(layer, windows)


def test_random_bits_stay_raw() -> None:
    layer = make_layer("bits")
    encoded = layer.encode()
    assert encoded.is_raw == [True, True] and encoded.num_patches == [0, 0]
    assert encoded.bits_per_weight < 16.2
    check_round_trip(layer, None)


def test_scales_out_of_range_stay_raw() -> None:
    layer = make_layer(dtype=torch.bfloat16)
    huge = torch.tensor(2.0**110).bfloat16().view(torch.int16).int()
    layer.codes[0].params[1, 0, 0] = layer.codes[0].params[1, 0, 0] & -65536 | huge
    assert layer.encode(NEAREST).is_raw == [False, True]
    check_round_trip(layer, NEAREST)


@pytest.mark.parametrize("method", ["rtn", "rtn_asym", "gptq"])
@pytest.mark.parametrize("model", ["deepseek_v2_lite", "qwen1_5_moe", "phi3_5_moe"])
def test_stand_ins(model: str, method: str) -> None:
    """Real trained weights and shapes; GPTQ and round-to-nearest codes."""
    experts = [part[:6] for part in Checkpoint.open(f"data/standins/{model}").experts(5)]
    generator = torch.Generator().manual_seed(0)
    codes = []
    for weights in experts:
        if method == "gptq":
            width = weights.shape[-1]
            inputs = torch.randn(6, 512, width, generator=generator) @ torch.randn(width, width, generator=generator)
            matrices = quantize_gptq(weights, inputs.mT @ inputs, 128)
        else:
            matrices = quantize_rtn(weights, 128, sym=method == "rtn")
        codes.append(ResidentCodes.pack(matrices))
    layer = Layer([weights.bfloat16() for weights in experts], codes)
    encoded = layer.encode()
    assert encoded.windows.two_sided == (method == "gptq")
    assert encoded.bits_per_weight < (8.5 if method == "gptq" else 7.2)
    check_round_trip(layer, encoded.windows)


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sym", "expected"), [(True, 7.12), (False, 7.02)])
def test_bits_of_gaussian_weights(sym: bool, expected: float) -> None:
    """Whole blobs, all tables included, at a size where headers do not count."""
    encoded = make_layer("gauss", [(512, 2048), (256, 1408)], 1, sym=sym).encode()
    assert encoded.windows == NEAREST
    assert encoded.bits_per_weight == pytest.approx(expected, abs=0.06)
    assert encoded.num_patches[0] < 20


def test_moved_codes_get_two_sided_windows() -> None:
    layer = make_layer("gauss", [(128, 2048), (64, 1408)], 2, moved=0.15)
    encoded = layer.encode()
    assert encoded.windows.two_sided
    assert encoded.bits_per_weight < layer.encode(Windows(False, 15)).bits_per_weight - 0.2


@pytest.mark.parametrize("num_weights", [1 << 24, 1 << 13])
def test_the_smallest_candidate_is_chosen(monkeypatch: pytest.MonkeyPatch, num_weights: int) -> None:
    """On all weights of small layers; every sixth row of larger ones is as good."""
    monkeypatch.setattr(encode, "SAMPLE_WEIGHTS", num_weights)
    layer = make_layer("student", [(24, 1024), (18, 1408)], num_experts=1, moved=0.1)
    chosen = choose_windows(layer.weights, layer.codes)
    bits = {windows: measure_bits(layer.weights, layer.codes, windows) for windows in CANDIDATES}
    assert bits[chosen] == min(bits.values())


def test_measured_bits_are_those_of_the_blob() -> None:
    layer = make_layer("gauss", [(64, 1024), (64, 1024)], 1, moved=0.1)
    blob = layer.encode(TWO_SIDED).blobs[0]
    num_weights = layout_of(layer.codes).num_weights
    overhead = 32 * len(blob) - measure_bits(layer.weights, layer.codes, TWO_SIDED)
    assert 0 < overhead / num_weights < 0.06


def test_chunks_do_not_matter() -> None:
    layer = make_layer("gauss", [(16, 2048), (12, 1408)], 3, moved=0.1, noise=0.01)
    whole, cut = layer.encode(TWO_SIDED, 1000), layer.encode(TWO_SIDED, 1)
    assert all(torch.equal(a, b) for a, b in zip(whole.blobs, cut.blobs, strict=True))


@pytest.mark.parametrize(("windows", "expected"), [(NEAREST, -7814495091672652610), (TWO_SIDED, -6164475257136442390)])
def test_blobs_are_stable(windows: Windows, expected: int) -> None:
    """The format is fixed: other bits need another version number. Weights come from integers alone."""
    mixed = torch.arange(8 * 1408) * 2654435761 % (1 << 32)
    codes = (mixed >> 13 & 15).byte().view(1, 8, 1408)
    groups = (1, 8, 11)
    matrices = Int4Matrices(
        codes, torch.full(groups, 0.0125).half(), torch.full(groups, 8, dtype=torch.uint8), 128
    )  # fmt: skip
    bits = matrices.dequantize(torch.bfloat16).view(torch.int16) + (mixed >> 21 & 31).view(1, 8, 1408) - 16
    layer = Layer([bits.to(torch.int16).view(torch.bfloat16)], [ResidentCodes.pack(matrices)])
    encoded = layer.encode(windows)
    assert not encoded.is_raw[0] and encoded.num_patches[0] > 0
    assert int(checksum(encoded.blobs[0])) == expected


# -- layout, codes, checksums --------------------------------------------------------------------


def test_offsets_follow_from_shapes() -> None:
    layout = Layout((Matrix(2816, 2048, 128), Matrix(2048, 1408, 128)))
    assert layout.num_blocks == 2816 * 2048 // BLOCK + 2048 * 1408 // BLOCK == 1056
    assert layout.stream_offset == 10592 and layout.stream_offset % 16 == 0
    assert layout.raw_words == HEADER_WORDS + layout.num_weights // 2
    assert 32 * layout.stream_offset / layout.num_weights < 0.0393


@pytest.mark.parametrize("group", [12, 1408, 96])
def test_groups_that_do_not_fit_segments_are_refused(group: int) -> None:
    with pytest.raises(SpecterError, match=f"groups of {group}"):
        Layout((Matrix(4, group, group),))


def test_headers_round_trip() -> None:
    header = Header(Kind.RESIDUAL, TWO_SIDED, 0xFFFFFFFF, 123, 45, 6, -(2**63), 2**63 - 1)
    assert Header.unpack(header.pack(), "x") == header


def test_codes_lie_as_the_draft_reads_them() -> None:
    matrices = quantize_rtn(torch.randn(2, 6, 256), 128, sym=False)
    codes = ResidentCodes.pack(matrices)
    for place, nibble in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
        assert torch.equal(codes.words >> 4 * nibble & 15, matrices.codes[..., place::8].int())
    assert torch.equal(unpack_codes(codes.words), matrices.codes.int())
    scales, zeros = unpack_params(codes.params, torch.float16)
    assert torch.equal(scales, matrices.scales.float()) and torch.equal(zeros, matrices.zeros.int())


def test_codes_of_the_device_encode_the_same() -> None:
    """Encoding from the draft's packed experts: no second copy of the codes."""
    gate, up, down = (quantize_rtn(0.02 * torch.randn(3, *s), 128) for s in ((64, 128), (64, 128), (128, 64)))
    gate_up = torch.cat([gate.codes, up.codes], 1)
    packed = PackedExperts(*(torch.zeros(1, 3, 128, n, dtype=torch.int32) for n in (16, 1, 8, 1)))
    packed.set_layer(0, gate, up, down)
    codes = [
        ResidentCodes(packed.gate_up[0], packed.gate_up_params[0]), ResidentCodes(packed.down[0], packed.down_params[0])
    ]  # fmt: skip
    assert torch.equal(unpack_codes(codes[0].words), gate_up.int())
    weights = [make_weights("gauss", (3, 128, 128)), make_weights("gauss", (3, 128, 64))]
    check_round_trip(Layer(weights, codes), None)


@given(n=st.integers(1, 200_000), at=st.integers(0, 10**9), bit=st.integers(0, 31), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_changed_word_changes_the_checksum(n: int, at: int, bit: int, seed: int) -> None:
    words = torch.randint(-(2**31), 2**31, (2, n), generator=torch.Generator().manual_seed(seed)).int()
    before = checksum(words)
    words[1, at % n] ^= torch.tensor(1 << bit).to(torch.uint32).view(torch.int32)
    after = checksum(words)
    assert before[0] == after[0] and before[1] != after[1]
    assert int(combined([before, after])[1]) != int(combined([after, before])[1])


# -- refusals ------------------------------------------------------------------------------------


def test_only_bf16_weights_are_encoded() -> None:
    layer = make_layer()
    with pytest.raises(SpecterError, match="bf16 weights only"):
        encode_layer([weights.half() for weights in layer.weights], layer.codes)


def test_weights_of_another_shape_are_refused() -> None:
    layer = make_layer()
    with pytest.raises(SpecterError, match="do not fit"):
        encode_layer([weights[:, 1:] for weights in layer.weights], layer.codes)


def test_codes_that_cannot_be_packed_are_refused() -> None:
    matrices = quantize_rtn(torch.randn(4, 64), 32)
    with pytest.raises(SpecterError, match="float32"):
        ResidentCodes.pack(Int4Matrices(matrices.codes, matrices.scales.float(), matrices.zeros, 32))
    with pytest.raises(SpecterError, match="above 15"):
        ResidentCodes.pack(Int4Matrices(matrices.codes, matrices.scales, matrices.zeros + 8, 32))
