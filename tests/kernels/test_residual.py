"""The decoder of waves against the weights that were encoded, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from specter.codecs.residual.resident import ResidentCodes, layout_of
from specter.codecs.residual.windows import CANDIDATES, Windows
from specter.errors import SpecterError
from specter.kernels.int4_moe import PackedExperts
from specter.kernels.residual import WaveDecoder, wave_row
from specter.models.cuda.arena import open_blob_slots
from specter.models.cuda.blobs import BlobStore
from specter.quantize.rtn import quantize_rtn
from specter.timeline.payload import STRADDLE_BYTES
from tests.codecs.experts import NEAREST, TWO_SIDED, Layer, make_layer, make_weights, same_bits
from tests.cuda.fakes import any_budget

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = 0x7FC1
SMALL = [(2, 512), (1, 512)]
BOTH = [NEAREST, TWO_SIDED]


class Decoding:
    """A layer whose blobs are in slots, in another order than its experts, and a staging area of as many places.

    slot_bytes: None: any blob fits a slot.
    """

    def __init__(
        self, layer: Layer, windows: Windows, gap: int = 0, slot_bytes: int | None = None, **options: int
    ) -> None:
        blobs = layer.encode(windows).blobs
        self.layer, num_experts = layer, len(blobs)
        codes = [ResidentCodes(p.words.to(DEVICE), p.params.to(DEVICE), p.scale_dtype) for p in layer.codes]
        self.decoder, self.windows = WaveDecoder(codes, **options), windows
        store = BlobStore(self.decoder.layout, 1, num_experts, "off")
        store.add_layer(blobs, windows)
        self.slots = open_blob_slots(
            num_experts + 1, slot_bytes or max(blob.nbytes for blob in blobs), store, any_budget()
        )
        self.slot_of = [(3 * expert + 1) % (num_experts + 1) for expert in range(num_experts)]
        if len(set(self.slot_of)) < num_experts:
            self.slot_of = list(range(num_experts, 0, -1))
        for expert, slot in enumerate(self.slot_of):
            self.slots.write(slot, store.payloads(0)[expert])
        shape = num_experts, self.decoder.layout.num_weights + gap
        self.staging = torch.full(shape, POISON, dtype=torch.int16, device=DEVICE)

    def run(self, experts: Sequence[int], num_places: int | None = None) -> None:
        """Decodes a wave, in a launch for `num_places` experts."""
        num_places = len(experts) if num_places is None else num_places
        slots = [self.slot_of[expert] for expert in experts]
        wave = torch.tensor(wave_row(self.windows, 0, experts, slots, num_places), dtype=torch.int32, device=DEVICE)
        staging = self.staging.view(torch.bfloat16)
        self.decoder.launch(wave, self.slots.memory, staging, two_sided=self.windows.two_sided, num_experts=num_places)

    def place(self, index: int) -> list[Tensor]:
        """What is in a place of the staging area."""
        layout = self.decoder.layout
        parts = self.staging[index, : layout.num_weights].cpu().split([m.num_weights for m in layout.matrices])
        shapes = zip(parts, layout.matrices, strict=True)
        return [part.view(torch.bfloat16).view(matrix.rows, matrix.columns) for part, matrix in shapes]

    def assert_decoded(self, experts: Sequence[int]) -> None:
        for index, expert in enumerate(experts):
            pairs = zip(self.place(index), self.layer.weights, strict=True)
            assert all(same_bits(part, weights[expert]) for part, weights in pairs)


def assert_exact(layer: Layer, windows: Windows, **options: Any) -> Decoding:
    decoding = Decoding(layer, windows, **options)
    experts = list(range(len(layer.weights[0])))
    decoding.run(experts)
    decoding.assert_decoded(experts)
    return decoding


@pytest.mark.parametrize("windows", CANDIDATES)
def test_all_windows(windows: Windows) -> None:
    assert_exact(make_layer("student", SMALL, moved=0.1 * windows.two_sided, noise=0.01), windows)


@pytest.mark.parametrize("windows", BOTH)
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_of_all_kinds(windows: Windows, sym: bool, dtype: torch.dtype) -> None:
    assert_exact(make_layer("zeros", SMALL, sym=sym, dtype=dtype, moved=0.1 * windows.two_sided), windows)


@pytest.mark.parametrize("windows", BOTH)
def test_rows_that_segments_do_not_divide(windows: Windows) -> None:
    """Rows of 1408 weights; the last segment is short, the last piece idle in part."""
    assert_exact(make_layer("columns", [(1, 1408), (3, 384)], noise=0.02), windows)


@pytest.mark.parametrize("windows", BOTH)
def test_many_blocks_and_pieces(windows: Windows) -> None:
    """18 segments: the second block of a matrix, and pieces that start within a block."""
    assert_exact(make_layer("gauss", [(18, 512), (2, 512)], 1, noise=0.003), windows)


@pytest.mark.parametrize("segments", [1, 2, 8, 16])
def test_segments_of_a_piece(segments: int) -> None:
    assert_exact(make_layer("gauss", [(5, 512), (3, 512)], 1, noise=0.01), NEAREST, segments=segments)


@pytest.mark.parametrize("shapes", [((16, 64), (16, 32)), ((8, 64), (16, 64))])
@pytest.mark.parametrize("windows", BOTH)
def test_narrow_groups(shapes: tuple[tuple[int, int], ...], windows: Windows) -> None:
    """Stand-ins: a row is one group, of other width in gate_up than in down."""
    parts = [make_layer("gauss", [shape], 2, shape[1], seed=i, noise=0.01) for i, shape in enumerate(shapes)]
    assert_exact(Layer([part.weights[0] for part in parts], [part.codes[0] for part in parts]), windows)


def test_many_patches() -> None:
    """More patches than a piece reads at once, of every bit pattern: NaN payloads, infinities, denormals."""
    layer = make_layer("gauss", [(1, 512), (1, 512)], 1, noise=0.15)
    assert layer.encode(NEAREST).num_patches[0] > 128
    assert_exact(layer, NEAREST)


def test_waves_of_every_order_size_and_repetition() -> None:
    """A wave leaves the places behind its own as they were: an earlier wave's experts, or poison."""
    layer = make_layer("gauss", [(1, 128), (1, 128)], 3, noise=0.02)
    decoding, seen = Decoding(layer, NEAREST), list[int]()
    for size in (1, 2, 3):
        for wave in list(itertools.permutations(range(3), size))[:: 1 + (size == 2)]:
            decoding.run(wave, num_places=3)
            seen = [*wave, *seen[size:]]
            decoding.assert_decoded(seen)
            assert all(bool((part.view(torch.int16) == POISON).all()) for part in decoding.place(2)) == (len(seen) < 3)


def test_an_empty_wave_does_nothing() -> None:
    decoding = Decoding(make_layer("gauss", [(1, 128), (1, 128)], 1), NEAREST)
    for num_places in (0, 2):
        decoding.run([], num_places)
    assert bool((decoding.staging == POISON).all())


def mixed_layer() -> Layer:
    """Experts that the codec stores as residual, raw, residual."""
    parts = [
        make_layer(kind, [(2, 128), (1, 256)], 1, seed=seed) for seed, kind in enumerate(("gauss", "bits", "gauss"))
    ]
    weights = [torch.cat(matrices) for matrices in zip(*(part.weights for part in parts), strict=True)]
    codes = [
        ResidentCodes(torch.cat([one.words for one in same]), torch.cat([one.params for one in same]))
        for same in zip(*(part.codes for part in parts), strict=True)
    ]
    return Layer(weights, codes)


@pytest.mark.parametrize("wave", [[0, 1, 2], [1], [1, 0], [2, 1], [1, 2, 0]])
def test_raw_blobs_in_the_same_wave(wave: list[int]) -> None:
    layer = mixed_layer()
    assert layer.encode(NEAREST).is_raw == [False, True, False]
    decoding = Decoding(layer, NEAREST)
    decoding.run(wave)
    decoding.assert_decoded(wave)


def test_a_wave_begins_at_its_first_place() -> None:
    layer = make_layer("gauss", [(1, 128), (1, 128)], 2)
    decoding = Decoding(layer, NEAREST)
    row = torch.tensor(wave_row(NEAREST, 1, [0], [decoding.slot_of[0]], 3), dtype=torch.int32, device=DEVICE)
    staging = decoding.staging.view(torch.bfloat16)
    decoding.decoder.launch(row, decoding.slots.memory, staging, two_sided=False, num_experts=1)
    assert all(same_bits(part, weights[0]) for part, weights in zip(decoding.place(1), layer.weights, strict=True))
    assert bool((decoding.staging[0] == POISON).all())


@pytest.mark.parametrize("kind", ["gauss", "bits"])
def test_slots_shorter_than_blobs(kind: str) -> None:
    """Slots that end in the middle of a stream, where streams end, among the patches and in a raw blob."""
    layer = make_layer(kind, [(17, 512), (1, 512)], 1, noise=0.02)
    blob = layer.encode(NEAREST).blobs[0]
    patch_offset, second_block = int(blob[4]), layout_of(layer.codes).stream_offset + int(blob[26])
    ends = [len(blob) - 16]
    if kind == "gauss":
        ends += [second_block - 40, second_block + 20, patch_offset, patch_offset + 40]
    for end in ends:
        slot_bytes = 4 * end // 64 * 64
        decoding = assert_exact(layer, NEAREST, slot_bytes=slot_bytes)
        assert 0 < decoding.slots.memory.tails.numel() <= 4 * len(blob) - slot_bytes + STRADDLE_BYTES + 128


def test_a_slot_without_a_blob_decodes_to_nan() -> None:
    decoding = Decoding(make_layer("gauss", [(1, 128), (1, 128)], 1), NEAREST)
    for filler in (0xFF, 0):
        decoding.slots.flat.fill_(filler)
        decoding.staging.zero_()
        decoding.run([0])
        assert all(bool(part.isnan().all()) for part in decoding.place(0))


@pytest.mark.parametrize("shapes", [[(1, 384), (1, 640)], [(2, 128), (1, 256)]])
def test_nothing_beside_the_places_is_written(shapes: list[tuple[int, int]]) -> None:
    decoding = assert_exact(make_layer("gauss", shapes, 2, noise=0.02), NEAREST, gap=64)
    assert bool((decoding.staging[:, -64:] == POISON).all())


def test_codes_of_the_draft() -> None:
    """The decoder reads the draft's own codes; nothing is copied or repacked."""
    gate, up, down = (quantize_rtn(0.02 * torch.randn(2, *s), 128) for s in ((4, 128), (4, 128), (8, 128)))
    packed = PackedExperts(*(torch.zeros(2, 2, 8, n, dtype=torch.int32, device=DEVICE) for n in (16, 1, 16, 1)))
    packed.set_layer(1, gate, up, down)
    codes = [ResidentCodes(part.words.cpu(), part.params.cpu()) for part in packed.layer(1)]
    decoding = Decoding(Layer([make_weights("gauss", (2, 8, 128), seed) for seed in (1, 2)], codes), TWO_SIDED)
    for codes, first in ((packed.layer(1), 0), (packed.layers(), 2)):
        decoding.decoder = WaveDecoder(codes)
        decoding.staging.zero_()
        decoding.slot_of = [decoding.slot_of[0]] * first + decoding.slot_of[-2:]
        decoding.run([first + 1, first])
        decoding.assert_decoded([1, 0])


def test_what_the_decoder_does_not_serve_is_refused() -> None:
    layer = make_layer("gauss", [(1, 512)])
    with pytest.raises(SpecterError, match="gate_up and down"):
        WaveDecoder(layer.codes)
    assert layout_of(layer.codes).num_weights == 512
