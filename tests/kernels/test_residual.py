"""The Triton decoder against the weights that were encoded, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specter.codecs.residual.decode import check_blob
from specter.codecs.residual.resident import ResidentCodes, layout_of
from specter.codecs.residual.windows import CANDIDATES, Windows
from specter.errors import SpecterError
from specter.kernels.int4_moe import PackedExperts
from specter.kernels.residual import Decoder
from specter.quantize.rtn import quantize_rtn
from tests.codecs.experts import NEAREST, TWO_SIDED, Layer, make_layer, make_weights, same_bits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = 0x7FC1
SMALL = [(2, 512), (1, 512)]


def on_device(codes: ResidentCodes) -> ResidentCodes:
    """At an address of its own: a row of a batch may lie anywhere."""
    return ResidentCodes(codes.words.clone().to(DEVICE), codes.params.clone().to(DEVICE), codes.scale_dtype)


def run(
    layer: Layer, windows: Windows, segments_per_program: int = 4, gap: int = 0, blobs: list[Tensor] | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Decodes all experts in one launch into slots that lie `gap` weights apart: the arena and its decoded views."""
    layout = layout_of(layer.codes)
    blobs = layer.encode(windows).blobs if blobs is None else blobs
    decoder = Decoder(layout, windows, layer.codes[0].scale_dtype, segments_per_program)
    sizes = [matrix.num_weights for matrix in layout.matrices]
    arena = torch.full((len(blobs), layout.num_weights + gap), POISON, dtype=torch.int16, device=DEVICE)
    out, jobs, kept = [], [], []
    for expert, blob in enumerate(blobs):
        codes, blob = [on_device(part) for part in layer.codes_of(expert)], blob.to(DEVICE)
        matrices = [
            part.view(torch.bfloat16).view(matrix.rows, matrix.columns)
            for part, matrix in zip(arena[expert, : layout.num_weights].split(sizes), layout.matrices, strict=True)
        ]
        jobs.append(decoder.job(blob, check_blob(blob, codes, "x"), matrices, codes))
        kept.append((codes, blob))
        out.append(matrices)
    decoder.launch(torch.tensor(jobs, device=DEVICE))
    return arena, [torch.stack(parts).cpu() for parts in zip(*out, strict=True)]


def assert_exact(layer: Layer, windows: Windows, **options: Any) -> None:
    _, out = run(layer, windows, **options)
    assert all(same_bits(left, right) for left, right in zip(out, layer.weights, strict=True))


@pytest.mark.parametrize("windows", CANDIDATES)
def test_all_windows(windows: Windows) -> None:
    assert_exact(make_layer("student", SMALL, moved=0.1 * windows.two_sided, noise=0.01), windows)


@pytest.mark.parametrize("windows", [NEAREST, TWO_SIDED])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_of_all_kinds(windows: Windows, sym: bool, dtype: torch.dtype) -> None:
    layer = make_layer("zeros", SMALL, sym=sym, dtype=dtype, moved=0.1 * windows.two_sided)
    assert_exact(layer, windows)


@pytest.mark.parametrize("windows", [NEAREST, TWO_SIDED])
def test_rows_that_segments_do_not_divide(windows: Windows) -> None:
    """Rows of 1408 weights; the last segment is short, the last program idle in part."""
    assert_exact(make_layer("columns", [(1, 1408), (3, 384)], noise=0.02), windows)


@pytest.mark.parametrize("windows", [NEAREST, TWO_SIDED])
def test_many_blocks_and_programs(windows: Windows) -> None:
    """18 segments: the second block of a matrix, and programs that start within a block."""
    layer = make_layer("gauss", [(18, 512), (2, 512)], 1, noise=0.003)
    assert_exact(layer, windows)


@pytest.mark.parametrize("segments_per_program", [1, 2, 8, 16])
def test_segments_per_program(segments_per_program: int) -> None:
    assert_exact(
        make_layer("gauss", [(5, 512), (3, 512)], 1, noise=0.01), NEAREST, segments_per_program=segments_per_program
    )


@pytest.mark.parametrize("shapes", [((64, 64), (64, 32)), ((32, 64), (64, 64))])
@pytest.mark.parametrize("windows", [NEAREST, TWO_SIDED])
def test_narrow_groups(shapes: tuple[tuple[int, int], ...], windows: Windows) -> None:
    """Stand-ins: a row is one group, of other width in gate_up than in down."""
    shapes = ((shapes[0][0] // 4, shapes[0][1]), (shapes[1][0] // 4, shapes[1][1]))
    parts = [make_layer("gauss", [shape], 2, shape[1], seed=i, noise=0.01) for i, shape in enumerate(shapes)]
    assert_exact(Layer([part.weights[0] for part in parts], [part.codes[0] for part in parts]), windows)


def test_many_patches() -> None:
    """More patches than a program reads at once, of every bit pattern: NaN payloads, infinities, denormals."""
    layer = make_layer("gauss", [(1, 512), (1, 512)], 1, noise=0.15)
    assert check_blob(layer.encode(NEAREST).blobs[0], layer.codes_of(0), "x").num_patches > 128
    assert_exact(layer, NEAREST)


def test_raw_blobs_in_the_same_launch() -> None:
    good, bad = make_layer("gauss", SMALL, 1), make_layer("bits", SMALL, 1)
    layer = Layer(
        [torch.cat(parts) for parts in zip(good.weights, bad.weights, strict=True)],
        [
            ResidentCodes(torch.cat([a.words, b.words]), torch.cat([a.params, b.params]))
            for a, b in zip(good.codes, bad.codes, strict=True)
        ],
    )
    assert layer.encode(NEAREST).is_raw == [False, True]
    assert_exact(layer, NEAREST)


def test_nothing_beside_the_slots_is_written() -> None:
    layer = make_layer("gauss", [(1, 384), (1, 640)], 2, noise=0.02)
    arena, out = run(layer, NEAREST, gap=64)
    assert all(same_bits(left, right) for left, right in zip(out, layer.weights, strict=True))
    assert bool((arena[:, -64:] == POISON).all())


def test_codes_of_the_draft() -> None:
    """The decoder reads the draft's own codes; nothing is copied or repacked."""
    gate, up, down = (quantize_rtn(0.02 * torch.randn(2, *s), 128) for s in ((4, 128), (4, 128), (8, 128)))
    packed = PackedExperts(*(torch.zeros(1, 2, 8, n, dtype=torch.int32, device=DEVICE) for n in (16, 1, 16, 1)))
    packed.set_layer(0, gate, up, down)
    codes = [
        ResidentCodes(packed.gate_up[0].cpu(), packed.gate_up_params[0].cpu()),
        ResidentCodes(packed.down[0].cpu(), packed.down_params[0].cpu()),
    ]
    assert_exact(Layer([make_weights("gauss", (2, 8, 128), seed) for seed in (1, 2)], codes), TWO_SIDED)


# -- what is refused -----------------------------------------------------------------------------


def one_job() -> tuple[Decoder, dict[str, Any]]:
    layer = make_layer("gauss", SMALL, 1)
    blob, codes = layer.encode(NEAREST).blobs[0], layer.codes_of(0)
    out = [torch.zeros_like(weights[0]) for weights in layer.weights]
    arguments = {"blob": blob, "header": check_blob(blob, codes, "x"), "out": out, "codes": codes}
    return Decoder(layout_of(layer.codes), NEAREST), arguments


def test_an_empty_launch_does_nothing() -> None:
    one_job()[0].launch(torch.zeros(0, 8, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("blob", lambda blob: torch.cat([blob, blob])[1 : len(blob) + 1], "16 bytes"),
        ("blob", lambda blob: blob.repeat_interleave(2)[::2], "contiguous"),
        ("out", lambda out: [out[0].half(), out[1]], "float16"),
        ("out", lambda out: [out[0][:1], out[1]], "output is"),
        ("out", lambda out: [torch.zeros(512, 2, dtype=torch.bfloat16).mT, out[1]], "contiguous"),
        ("codes", lambda codes: codes[::-1], "INT4 codes are of"),
        (
            "codes",
            lambda codes: [ResidentCodes(part.words, part.params, torch.bfloat16) for part in codes],
            "INT4 codes are of",
        ),
    ],
)
def test_jobs_that_do_not_fit(name: str, value: Any, match: str) -> None:
    decoder, arguments = one_job()
    decoder.job(**arguments)
    arguments[name] = value(arguments[name])
    with pytest.raises(SpecterError, match=match):
        decoder.job(**arguments)


def test_blobs_with_other_windows() -> None:
    _, arguments = one_job()
    decoder = Decoder(layout_of(arguments["codes"]), TWO_SIDED)
    with pytest.raises(SpecterError, match="one layer"):
        decoder.job(**arguments)


@pytest.mark.parametrize(
    "jobs", [torch.zeros(1, 8), torch.zeros(8, dtype=torch.int64), torch.zeros(1, 7, dtype=torch.int64)]
)
def test_tables_that_do_not_fit(jobs: Tensor) -> None:
    with pytest.raises(SpecterError, match="job table"):
        one_job()[0].launch(jobs)


def test_layouts_that_do_not_fit() -> None:
    with pytest.raises(SpecterError, match="gate_up and down"):
        Decoder(layout_of(make_layer("gauss", [(1, 512)]).codes), NEAREST)
