"""Kernel variants of Qwen2-MoE and PhiMoE against plain torch; row invariance is exact."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specter.kernels import gqa, grouped_mlp, int4_moe, skinny, tiles
from specter.kernels.device import Launch, Stream
from specter.kernels.layer_norm import layer_norm
from specter.kernels.octets import Octets
from specter.kernels.partials import merge
from specter.kernels.routing import Rule
from specter.models.rope import rotate_halves
from specter.models.routing import route
from tests.helpers import TINY_PHI, TINY_QWEN
from tests.kernels.test_kernels import (
    DEVICE,
    EPS,
    ROWS,
    _seed,
    check_stream,
    close,
    empty_stream,
    gated,
    ints,
    poison,
    rand,
    random_int4,
    row_routing,
)

__all__ = ["_seed"]  # the fixture


# -- attention -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "dtype", "num_rows"),
    [
        (gqa.Heads(2, 2, 16, scale=0.2, split=32), torch.float32, 33),
        (gqa.Heads(3, 1, 32, scale=0.2, split=16), torch.float32, 18),
        (gqa.Heads(4, 2, 16, scale=0.2, split=32), torch.bfloat16, 17),
    ],
)
def test_gqa(heads: gqa.Heads, dtype: torch.dtype, num_rows: int) -> None:
    capacity, begin, width = 64, 13, heads.width  # rows see some splits, never the last one
    qkv = rand(num_rows, (heads.num_heads + 2 * heads.num_keys) * width, dtype=dtype)
    angles = torch.rand(capacity, width // 2, device=DEVICE)
    rotary = angles.cos(), angles.sin()
    old = poison(capacity, 2 * heads.num_keys * width, dtype=dtype)  # unwritten positions are not read
    old[:begin] = rand(begin, old.shape[1], dtype=dtype)

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        cache, part = old.clone(), qkv[rows].clone()
        position = ints(begin + rows.start)
        if rows.start:
            cache[begin : begin + rows.start] = whole_cache[begin : begin + rows.start]
        partials = heads.partials(len(part), capacity, DEVICE)
        out = poison(len(part), heads.num_heads * width, dtype=dtype)
        gqa.turn(heads, part, rotary, position, cache, pdl=False)
        gqa.attend(heads, part, cache, position, partials, pdl=False)
        merge(partials, position, out, heads.split, pdl=False)
        return out, cache

    whole, whole_cache = run(slice(0, num_rows))
    end = begin + num_rows
    assert torch.equal(whole_cache[:begin], old[:begin]) and whole_cache[end:].isnan().all()
    q, k, v = (
        part.unflatten(-1, (-1, width))
        for part in qkv.float().split([n * width for n in (heads.num_heads, heads.num_keys, heads.num_keys)], -1)
    )
    cos, sin = (table[begin:end, None] for table in rotary)
    new = torch.cat((rotate_halves(k, cos, sin), v), 1).flatten(1)
    close(whole_cache[begin:end], new, dtype)
    keys, values = torch.cat((old[:begin].float(), new)).unflatten(-1, (2, -1, width)).transpose(0, 1)
    group = heads.num_heads // heads.num_keys
    keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("thw,phw->thp", rotate_halves(q, cos, sin), keys) * heads.scale
    hidden = torch.arange(end, device=DEVICE) > begin + torch.arange(num_rows, device=DEVICE)[:, None]
    probs = torch.softmax(scores.masked_fill(hidden[:, None], -torch.inf), -1)
    close(whole, torch.einsum("thp,phw->thw", probs, values).flatten(1), dtype)
    for rows in (slice(0, 1), slice(16, 17), slice(0, 2), slice(20, 33)):
        if rows.stop <= num_rows:
            part, cache = run(rows)
            assert torch.equal(part, whole[rows])
            assert torch.equal(cache[begin : begin + rows.stop], whole_cache[begin : begin + rows.stop])


# -- norms, biases, gates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hidden", "dtype"), [(86, torch.float32), (64, torch.bfloat16)])
def test_layer_norm(hidden: int, dtype: torch.dtype) -> None:
    x, gain, bias = 3 + rand(48, hidden), rand(hidden).to(dtype), rand(hidden).to(dtype)

    def run(rows: slice, octets: Octets | None = None) -> Tensor:
        stream = empty_stream(x[rows], 32, dtype)
        layer_norm(stream, gain, bias, octets, EPS, pdl=False)
        assert torch.equal(stream.x, x[rows])
        return stream.scaled

    whole = run(slice(0, 48))
    close(whole, F.layer_norm(x, (hidden,), gain.float(), bias.float(), EPS), dtype)
    for rows in (*(slice(0, num_rows) for num_rows in ROWS), slice(30, 31)):
        assert torch.equal(run(rows), whole[rows])
    if hidden % 8 == 0:
        octets = Octets.empty(hidden, DEVICE)
        run(slice(5, 6), octets)
        close(octets.decode(), whole[5], torch.bfloat16)


def normed_stream(x: Tensor) -> Stream:
    """x [T, D] after LayerNorm; `squares` is poisoned, since it is not read."""
    return Stream(poison(*x.shape), x, poison(len(x), 3), is_normed=True)


def test_tiles_of_normalised_rows_with_biases_and_a_gate() -> None:
    num_in, num_out, inter, num_router, top = 86, 37, 40, 10, 2
    x, w, bias, before = rand(48, num_in), rand(num_out, num_in), rand(num_out), rand(48, num_out)
    gain, launch = rand(num_out), Launch(32, 64)
    results, weights, gates = rand(48, top, num_out), rand(48, top), rand(48, num_router)
    wide = rand(num_router + 2 * inter, num_in)

    def run(rows: slice) -> list[Tensor]:
        part, num_rows = x[rows], len(x[rows])
        out, inner, logits, scales = (poison(num_rows, n) for n in (num_out, inter, num_router, 1))
        tiles.norm_linear(normed_stream(part), w, out, EPS, launch, False, bias)
        tiles.norm_gated(normed_stream(part), wide, inner, logits, scales[:, 0], EPS, launch, False)
        streams = [empty_stream(before[rows], 32) for _ in range(3)]
        tiles.linear_residual(part, w, streams[0], gain, launch, False, bias)
        experts = results[rows], weights[rows]
        tiles.linear_residual(part, w, streams[1], gain, launch, False, experts=experts, gates=gates[rows, -1])
        tiles.linear_residual(part[:, :0], w[:, :0], streams[2], gain, launch, False, experts=experts)
        return [out, inner, logits, scales, *(stream.x for stream in streams), streams[1].scaled]

    whole = run(slice(0, 48))
    product, routed = x @ w.T, (results * weights[..., None]).sum(1)
    close(whole[0], product + bias)
    close(whole[1], gated(x, wide[num_router:]))
    close(whole[2], x @ wide[:num_router].T)
    assert (whole[3] == 1).all()
    close(whole[4], before + product + bias)
    close(whole[5], before + torch.sigmoid(gates[:, -1:]) * product + routed)
    close(whole[6], before + routed)
    for rows in (slice(0, 1), slice(0, 17), slice(30, 31)):
        for part, all_rows in zip(run(rows), whole, strict=True):
            assert torch.equal(part, all_rows[rows])


def test_skinny_products_of_a_normalised_row_with_biases() -> None:
    x, w, bias, before, gain = rand(1, 86), rand(37, 86), rand(37), rand(1, 37), rand(37)
    out, stream = poison(37), empty_stream(before, 16)
    skinny.norm_linear(normed_stream(x), w, out, EPS, Launch(16, 32), False, bias)
    close(out, (x @ w.T)[0] + bias)
    skinny.linear_residual(x[0], w, stream, gain, None, Launch(16, 32), False, bias)
    check_stream(stream, gain, before + x @ w.T + bias)


def test_the_gate_of_the_shared_expert_weighs_it_in_the_draft() -> None:
    hidden, inter, num_experts, num_shared = 64, 32, 5, 40
    routing = dataclasses.replace(row_routing(num_experts, 2), is_gated=True, logits=rand(num_experts + 1))
    routing.history[0] = torch.tensor([3, 1])
    words, scales = int4_moe.pack_matrices(random_int4(num_experts, hidden, inter, group=32))
    inner = Octets.of(torch.zeros(2 * inter, device=DEVICE))
    shared, shared_w, before, gain = rand(num_shared), rand(hidden, num_shared), rand(1, hidden), rand(hidden)
    stream = empty_stream(before, 32)
    int4_moe.down(shared, shared_w, inner, words, scales, routing, stream, gain, Launch(32, 32), pdl=False)
    check_stream(stream, gain, before + torch.sigmoid(routing.logits[-1]) * (shared_w @ shared))


# -- routers -----------------------------------------------------------------------------------------------

ROUTERS = {
    "normalised": dataclasses.replace(TINY_QWEN, num_experts=9, top_k=3, norm_top_k=True, routed_scaling=1.5),
    "sparsemixer": dataclasses.replace(TINY_PHI, num_experts=9),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name: str) -> None:
    """Routers of T rows and of the draft's one row, with the shared expert's gate as one more logit."""
    spec = ROUTERS[name]
    num_experts, top = spec.num_experts, spec.top_k
    logits = 0.2 * rand(48, num_experts + 1) - 0.3  # of both signs, close enough for several to count
    logits[0, :num_experts] = 0.5  # ties go to the lower index
    logits[1, :num_experts] = -torch.linspace(1.0, 1.01, num_experts, device=DEVICE)
    weights, experts = route(spec, logits[:, :num_experts])
    for num_rows in ROWS:
        routing = grouped_mlp.Routing.empty(num_rows, top, num_experts, DEVICE)
        grouped_mlp.route(logits[:num_rows, :num_experts], routing, Rule.of(spec), pdl=False)
        assert torch.equal(routing.chosen.long(), experts[:num_rows])
        close(routing.weights, weights[:num_rows])
        assert int(routing.tile_sizes[: int(routing.num_tiles)].sum()) == num_rows * top
    x = torch.zeros(1, 32, device=DEVICE)
    x[:, 0] = 1.0
    for row in range(8):
        lone = dataclasses.replace(
            row_routing(num_experts, top), rule=Rule.of(spec), is_gated=True, logits=poison(num_experts + 1)
        )
        wide = rand(num_experts + 1 + 2 * 8, 32)
        wide[: num_experts + 1, 0] = logits[row]
        skinny.norm_gated(normed_stream(x), wide, poison(8), lone, EPS, Launch(8, 32), pdl=False)
        assert torch.equal(lone.logits, logits[row])
        assert lone.scale == 1 and lone.history[0].tolist() == experts[row].tolist()
        close(lone.weights, weights[row])
        assert lone.counts.nonzero()[:, 0].tolist() == sorted(experts[row].tolist())


def test_the_mixer_gives_every_rank_one_expert_even_where_logits_are_nan() -> None:
    for value in (torch.nan, -torch.nan, -torch.inf, torch.inf):
        logits = torch.full((2, 6), value, device=DEVICE)
        routing = grouped_mlp.Routing.empty(2, 2, 6, DEVICE)
        grouped_mlp.route(logits, routing, Rule(jitter=0.01, is_mixer=True), pdl=False)
        assert routing.chosen.tolist() == [[0, 1], [0, 1]]
