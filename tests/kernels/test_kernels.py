"""Every kernel against plain torch: rows 1, 2, 17, 33, 48, experts without rows, odd sizes; row invariance is exact.

Run by Triton's interpreter where there is no GPU. Moves, indices and routing are compared exactly.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specter.codecs.int4 import Int4Matrices
from specter.config import SamplingConfig
from specter.errors import SpecterError
from specter.kernels import grouped_mlp, int4_moe, mla, select, skinny, tiles
from specter.kernels.device import Launch, Stream
from specter.kernels.octets import Octets
from specter.kernels.routing import RowRouting, Rule
from specter.kernels.select import SamplingParams
from specter.models.cuda.runner import check_sampling
from specter.models.routing import top_k
from specter.quantize.rtn import quantize_rtn
from specter.speculation.noise import gumbel
from specter.speculation.sampling import build_sampler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = (1, 2, 17, 33, 48)
EPS = 1e-6


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def poison(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Bounds ‖a - e‖ / ‖e‖, for another order of sums and bf16 operands."""
    limit = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert not actual.isnan().any()
    assert (actual.double() - expected.double()).norm() <= limit * expected.double().norm()


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], gain.float(), EPS)


def stream_of(x: Tensor, gain: Tensor, dtype: torch.dtype = torch.float32, num_blocks: int = 3) -> Stream:
    """The stream x [T, D] with the inputs of a norm with `gain`."""
    squares = torch.stack([part.square().sum(-1) for part in x.tensor_split(num_blocks, -1)], -1)
    return Stream(x.clone(), (x * gain.float()).to(dtype), squares)


def check_stream(stream: Stream, gain: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    close(stream.x, expected, dtype)
    close(stream.scaled, stream.x * gain.float(), dtype)
    close(stream.squares.sum(-1), stream.x.square().sum(-1))


def empty_stream(x: Tensor, block: int, dtype: torch.dtype = torch.float32) -> Stream:
    """The stream x [T, D] before a kernel writes it in blocks of `block` channels; outputs are poisoned."""
    num_rows, hidden = x.shape
    return Stream(x.clone(), poison(num_rows, hidden, dtype=dtype), poison(num_rows, -(-hidden // block)))


def gated(x: Tensor, wide: Tensor) -> Tensor:
    gate, up = (x @ wide.float().T).chunk(2, dim=-1)
    return F.silu(gate) * up


# -- one row ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_out", "num_in", "block_k"), [(37, 86, 32), (64, 128, 128)])
def test_skinny_products(num_out: int, num_in: int, block_k: int, dtype: torch.dtype) -> None:
    x, gain, w = rand(1, num_in), rand(num_in).to(dtype), rand(num_out, num_in, dtype=dtype)
    out = poison(num_out)
    skinny.norm_linear(stream_of(x, gain, dtype), w, out, EPS, Launch(16, block_k), pdl=False)
    close(out, (normed(x, gain) @ w.float().T)[0], dtype)
    before, next_gain = rand(1, num_out), rand(num_out).to(dtype)
    stream = empty_stream(before, 16, dtype)
    octets = Octets.empty(num_out, DEVICE) if num_out == 64 else None
    skinny.linear_residual(x[0].to(dtype), w, stream, next_gain, octets, Launch(16, block_k), pdl=False)
    check_stream(stream, next_gain, before + x.to(dtype).float() @ w.float().T, dtype)
    if octets is not None:
        value = stream.x[0] * next_gain.float()
        assert torch.equal(octets.values, Octets.of(value).values)
        close(octets.decode(), value, torch.bfloat16)


def row_routing(num_experts: int, top: int, step: int = 0, num_steps: int = 1) -> RowRouting:
    history = torch.full((num_steps, top), -1, dtype=torch.int16, device=DEVICE)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=DEVICE)
    return RowRouting.empty(history, counts, ints(step), Rule(scaling=1.5))


def test_skinny_gated_mlp_without_router() -> None:
    x, gain, w, inner = rand(1, 96), rand(96), rand(2 * 40, 96), poison(40)
    skinny.norm_gated(stream_of(x, gain), w, inner, None, EPS, Launch(8, 64), pdl=False)
    close(inner, gated(normed(x, gain), w)[0])


def test_skinny_gated_mlp_and_router() -> None:
    hidden, inter, num_experts, top = 96, 40, 41, 3  # three programs of the router, the last one not full
    x, gain, w = rand(1, hidden), rand(hidden), rand(num_experts + 2 * inter, hidden)
    inner, routing = poison(inter), row_routing(num_experts, top, step=2, num_steps=4)
    for step in (1, 2):  # the second step reuses the first one's scratch
        routing.step.fill_(step)
        skinny.norm_gated(stream_of(x, gain), w, inner, routing, EPS, Launch(8, 64), pdl=False)
    close(inner, gated(normed(x, gain), w[num_experts:])[0])
    close(routing.logits, (normed(x, gain) @ w[:num_experts].T)[0])
    close(routing.scale * x[0] * gain, normed(x, gain)[0])
    weights, experts = top_k(routing.logits[None], top)
    close(routing.weights, 1.5 * weights[0])
    assert routing.history[1].tolist() == routing.history[2].tolist() == experts[0].tolist()
    assert (routing.history[[0, 3]] == -1).all()
    assert routing.counts.tolist() == [2 * int(e in experts) for e in range(num_experts)]


def test_router_ties_go_to_the_lower_expert() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 2.0, 0.0, 1.0])
    x, routing = torch.ones(1, 32, device=DEVICE), row_routing(6, 4)
    w = torch.zeros(6 + 2 * 8, 32)
    w[:6, 0] = logits
    skinny.norm_gated(stream_of(x, x[0]), w.to(DEVICE), poison(8), routing, EPS, Launch(8, 32), pdl=False)
    assert routing.history[0].tolist() == [1, 3, 0, 2]


def test_router_gives_every_rank_one_expert_even_where_logits_are_nan() -> None:
    x, routing = rand(1, 32), row_routing(6, 4)
    skinny.norm_gated(stream_of(x, x[0]), poison(6 + 2 * 8, 32), poison(8), routing, EPS, Launch(8, 32), pdl=False)
    assert sorted(routing.history[0].tolist()) == [0, 1, 2, 3]


# -- INT4 experts ------------------------------------------------------------------------------------


def random_int4(*shape: int, group: int) -> Int4Matrices:
    """Codes, zeros and scales over their whole range."""
    groups = shape[-1] // group
    scales = (torch.rand(*shape[:-1], groups, device=DEVICE) + 0.5).half()
    codes = torch.randint(0, 16, shape, dtype=torch.uint8, device=DEVICE)
    return Int4Matrices(codes, scales, torch.randint(0, 16, scales.shape, dtype=torch.uint8, device=DEVICE), group)


@pytest.mark.parametrize(("inter", "group", "block"), [(96, 32, 128), (64, 64, 64)])
def test_int4_experts(inter: int, group: int, block: int) -> None:
    hidden, num_experts, top, num_shared = 192, 5, 3, 40
    gate, up = (random_int4(num_experts, inter, hidden, group=group) for _ in range(2))
    down = random_int4(num_experts, hidden, inter, group=min(group, inter))
    (gate_words, gate_scales), (up_words, up_scales) = int4_moe.pack_matrices(gate), int4_moe.pack_matrices(up)
    down_words, down_scales = int4_moe.pack_matrices(down)
    x, shared, shared_w = rand(hidden), rand(num_shared), rand(hidden, num_shared)
    octets, inner = Octets.of(x), Octets.empty(top * inter, DEVICE)
    before, next_gain = rand(1, hidden), rand(hidden)
    stream = empty_stream(before, 32)
    routing = row_routing(num_experts, top, step=1, num_steps=2)
    weights, experts = rand(top), [3, 0, 4]
    routing.history[1] = torch.tensor(experts)
    routing.weights.copy_(weights)
    routing.scale.fill_(0.25)

    int4_moe.gate_up(
        octets, torch.cat((gate_words, up_words), 1), torch.cat((gate_scales, up_scales), 1), routing, inner,
        Launch(16, block), pdl=False,
    )  # fmt: skip
    int4_moe.down(
        shared, shared_w, inner, down_words, down_scales, routing, stream, next_gain, Launch(32, 32), pdl=False
    )

    expected = before + shared_w @ shared
    for weight, expert in zip(weights, experts, strict=True):
        wide = torch.cat((gate.dequantize()[expert], up.dequantize()[expert]))
        expected += weight * (down.dequantize()[expert] @ gated(0.25 * x, wide))
    # Products are exact; activations are rounded to 16 bits of their octet's largest.
    assert (stream.x - expected).norm() <= 1e-4 * expected.norm()
    check_stream(stream, next_gain, stream.x)


def test_octets_keep_sixteen_bits_of_their_largest() -> None:
    x = rand(64)
    x[:8] = 0.0
    x[9] = 1e4
    error = (Octets.of(x).decode() - x).abs().view(-1, 8)
    assert (error <= x.abs().view(-1, 8).amax(1, keepdim=True) * 2.0**-15).all()


def test_int4_refuses_other_groups() -> None:
    with pytest.raises(SpecterError, match="groups of 16"):
        int4_moe.pack_matrices(quantize_rtn(torch.randn(2, 32), 16))


# -- tiles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_products(dtype: torch.dtype) -> None:
    num_in, num_out, top = 86, 37, 2
    x, gain, w = rand(48, num_in), rand(num_in).to(dtype), rand(num_out, num_in, dtype=dtype)
    results, weights, before = rand(48, top, num_out), rand(48, top), rand(48, num_out)
    next_gain, launch = rand(num_out).to(dtype), Launch(32, 64, num_warps=4)

    def run(rows: slice) -> list[Tensor]:
        out = poison(len(range(*rows.indices(48))), num_out)
        tiles.norm_linear(stream_of(x[rows], gain, dtype), w, out, EPS, launch, pdl=False)
        stream = empty_stream(before[rows], 32, dtype)
        experts = results[rows], weights[rows]
        tiles.linear_residual(x[rows].to(dtype), w, stream, next_gain, launch, pdl=False, experts=experts)
        return [out, stream.x, stream.scaled, stream.squares]

    whole = run(slice(0, 48))
    close(whole[0], normed(x, gain) @ w.float().T, dtype)
    routed = (results * weights[..., None]).sum(1)
    expected = before + x.to(dtype).float() @ w.float().T + routed
    check_stream(Stream(whole[1], whole[2], whole[3]), next_gain, expected, dtype)
    # The last: row 30 at the first place of a tile, without neighbours.
    for rows in (*(slice(0, num_rows) for num_rows in ROWS), slice(30, 31)):
        for part, all_rows in zip(run(rows), whole, strict=True):
            assert torch.equal(part, all_rows[rows])


def test_tiles_gated_mlp_and_router() -> None:
    hidden, inter, num_experts = 96, 40, 9
    x, gain, w = rand(48, hidden), rand(hidden), rand(num_experts + 2 * inter, hidden)
    parts = {}
    for num_rows in ROWS:
        out = poison(num_rows, inter), poison(num_rows, num_experts), poison(num_rows)
        tiles.norm_gated(stream_of(x[:num_rows], gain), w, *out, EPS, Launch(32, 64), pdl=False)
        parts[num_rows] = out
    close(parts[48][0], gated(normed(x, gain), w[num_experts:]))
    close(parts[48][1], normed(x, gain) @ w[:num_experts].T)
    close(parts[48][2][:, None] * x * gain, normed(x, gain))
    for num_rows in ROWS:
        for part, whole in zip(parts[num_rows], parts[48], strict=True):
            assert torch.equal(part, whole[:num_rows])


# -- the target's experts ------------------------------------------------------------------------------


@dataclasses.dataclass
class Experts:
    """Seven experts in shuffled slots of a padded arena; the last one is never chosen."""

    hidden: int = 80
    inter: int = 24
    num_experts: int = 7
    top: int = 3

    def __post_init__(self) -> None:
        self.wide = rand(self.num_experts, 2 * self.inter, self.hidden)
        self.narrow = rand(self.num_experts, self.hidden, self.inter)
        self.slots = torch.randperm(self.num_experts + 2, device=DEVICE)[: self.num_experts].int()
        self.arena = poison(self.num_experts + 2, 3 * self.hidden * self.inter + 16)
        flat = torch.cat((self.wide.flatten(1), self.narrow.flatten(1)), 1)
        self.arena[self.slots.long(), : flat.shape[1]] = flat
        self.x, self.logits = rand(48, self.hidden), rand(48, self.num_experts)
        self.scales = torch.rand(48, device=DEVICE) + 0.5
        self.logits[:, -1] = -20.0

    def run(self, num_rows: int, waves: list[Tensor]) -> tuple[Tensor, grouped_mlp.Routing]:
        routing = grouped_mlp.Routing.empty(num_rows, self.top, self.num_experts, DEVICE)
        results = poison(num_rows, self.top, self.hidden)
        grouped_mlp.route(self.logits[:num_rows], routing, Rule(scaling=2.0), pdl=False)
        for slots in waves:
            grouped_mlp.run_experts(
                self.x[:num_rows], self.scales[:num_rows], self.arena, slots, routing,
                poison(num_rows * self.top, self.inter), results,
                Launch(32, 64), Launch(64, 32), pdl=False,
            )  # fmt: skip
        return results, routing


def test_grouped_experts() -> None:
    experts = Experts()
    whole: Tensor | None = None
    for num_rows in reversed(ROWS):
        results, routing = experts.run(num_rows, [experts.slots])
        weights, chosen = top_k(experts.logits[:num_rows], experts.top)
        assert torch.equal(routing.chosen.long(), chosen)
        close(routing.weights, 2.0 * weights)
        if whole is None:
            whole = results
            for row in range(0, num_rows, 7):
                for rank, expert in enumerate(chosen[row].tolist()):
                    inner = gated(experts.scales[row] * experts.x[row], experts.wide[expert])
                    close(results[row, rank], experts.narrow[expert] @ inner)
        assert torch.equal(results, whole[:num_rows])


def test_waves_leave_no_trace() -> None:
    experts = Experts()
    at_once, _ = experts.run(33, [experts.slots])
    absent = torch.full_like(experts.slots, -1)
    member = torch.arange(experts.num_experts, device=DEVICE) % 2 == 0
    waves = [torch.where(member, experts.slots, absent), torch.where(member, absent, experts.slots)]
    in_waves, routing = experts.run(33, waves)
    assert torch.equal(in_waves, at_once)
    half, _ = experts.run(33, waves[:1])
    assert torch.equal(half.isnan().all(-1), ~member[routing.chosen.long()])


def test_route_groups_every_pair_once() -> None:
    experts = Experts()
    experts.logits[:, 0] = 30.0  # 48 rows for expert 0: three full tiles
    _, routing = experts.run(48, [])
    num_tiles = int(routing.num_tiles)
    assert num_tiles <= grouped_mlp.max_tiles(48, experts.top, experts.num_experts)
    seen = []
    for tile in range(num_tiles):
        pairs = routing.pairs[tile, : int(routing.tile_sizes[tile])].tolist()
        assert {int(routing.chosen.flatten()[pair]) for pair in pairs} == {int(routing.tile_experts[tile])}
        seen += pairs
    assert sorted(seen) == list(range(48 * experts.top))
    assert routing.tile_sizes[:3].tolist() == [16, 16, 16]


# -- attention -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "num_rows"), [(torch.float32, 48), (torch.bfloat16, 17)])
def test_mla(dtype: torch.dtype, num_rows: int) -> None:
    heads = mla.Heads(3, 16, 16, 16, 64, scale=0.2, block_c=32, block_v=16, split=32)
    capacity, begin = 80, 13  # rows see one split or two, never the third
    qk = heads.nope + heads.rope
    qkv = rand(48, heads.num_heads * qk + heads.lora + heads.rope, dtype=dtype)
    kv_b, gain = rand(heads.num_heads * (heads.nope + heads.v), heads.lora, dtype=dtype) / 8, rand(heads.lora).to(dtype)
    angles = torch.rand(capacity, heads.rope // 2, device=DEVICE)
    rotary = angles.cos(), angles.sin()
    old = rand(capacity, heads.lora + heads.rope, dtype=dtype)

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        cache, part = old.clone(), qkv[rows].contiguous()
        position, size = ints(begin + rows.start), part.shape[0]
        if rows.start:
            cache[begin : begin + rows.start] = whole_cache[begin : begin + rows.start]
        queries = poison(size, heads.num_heads, heads.lora + heads.rope, dtype=dtype)
        partials = heads.partials(size, capacity, DEVICE)
        out = poison(size, heads.num_heads * heads.v, dtype=dtype)
        mla.absorb(heads, part, kv_b, gain, rotary, position, queries, cache, pdl=False)
        mla.attend(heads, queries, cache, position, partials, pdl=False)
        latents = poison(size, heads.num_heads, heads.lora, dtype=dtype)
        mla.merge_and_project(heads, partials, kv_b, position, latents, out, pdl=False)
        if size == 1:
            single = poison(heads.num_heads * heads.v, dtype=dtype)
            mla.values(heads, partials, kv_b, position, single, pdl=False)
            close(single, out[0], dtype)
        return out, cache

    whole, whole_cache = run(slice(0, num_rows))
    assert torch.equal(whole_cache[:begin], old[:begin])
    assert torch.equal(whole_cache[begin + num_rows :], old[begin + num_rows :])
    expected = _attention(heads, qkv[:num_rows].float(), kv_b.float(), gain.float(), rotary, old.float(), begin)
    close(whole, expected, dtype)
    for rows in (slice(0, 1), slice(16, 17), slice(0, 2), slice(20, 37)):
        if rows.stop <= num_rows:
            assert torch.equal(run(rows)[0], whole[rows])


def _attention(
    heads: mla.Heads, qkv: Tensor, kv_b: Tensor, gain: Tensor, rotary: tuple[Tensor, Tensor], old: Tensor, begin: int
) -> Tensor:
    """Attention with keys and values spelled out."""
    num_rows, lora = qkv.shape[0], heads.lora
    at = slice(begin, begin + num_rows)
    q, latent, key = qkv.split((heads.num_heads * (heads.nope + heads.rope), lora, heads.rope), -1)
    q_nope, q_pe = q.unflatten(-1, (heads.num_heads, -1)).split((heads.nope, heads.rope), -1)

    def turn(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        turns = torch.complex(rotary[0][at], rotary[1][at]).view(num_rows, *[1] * (x.dim() - 2), -1)
        return torch.view_as_real(pairs * turns).flatten(-2)

    cache = old.clone()
    cache[at] = torch.cat((normed(latent, gain), turn(key)), -1)
    up_k, up_v = kv_b.view(heads.num_heads, -1, lora).split((heads.nope, heads.v), 1)
    keys = torch.einsum("pl,hnl->phn", cache[:, :lora], up_k)
    scores = torch.einsum("thn,phn->thp", q_nope, keys) + torch.einsum("thr,pr->thp", turn(q_pe), cache[:, lora:])
    hidden = torch.arange(old.shape[0], device=DEVICE) > begin + torch.arange(num_rows, device=DEVICE)[:, None]
    probs = torch.softmax((scores * heads.scale).masked_fill(hidden[:, None], -torch.inf), -1)
    return torch.einsum("thp,pl,hvl->thv", probs, cache[:, :lora], up_v).flatten(1)


# -- tokens ------------------------------------------------------------------------------------------------


def test_embedding_and_greedy_choice() -> None:
    table, tokens = rand(50, 40, dtype=torch.bfloat16), ints(3, 49, 0)
    gain, stream = rand(40), empty_stream(poison(3, 40), select.BLOCK_D)
    select.embed(tokens, table, stream, gain, pdl=False)
    assert torch.equal(stream.x, table[tokens.long()].float())
    check_stream(stream, gain, stream.x)
    logits = rand(3, 2100)
    logits[1, [7, 1500]] = 100.0  # a tie across blocks goes to the lower token
    out = ints(-1, -1, -1)
    select.Selection.empty(3, 2100, SamplingParams.greedy(DEVICE)).choose(logits, ints(5), out, pdl=False)
    assert out.tolist() == logits.argmax(-1).tolist()
    assert out[1] == 7


@pytest.mark.parametrize("sampling", [SamplingConfig("greedy"), SamplingConfig("seeded", 0.7, seed=2**40 + 12345)])
def test_the_device_chooses_what_the_host_would_and_never_padding(sampling: SamplingConfig) -> None:
    num_tokens, vocab = 1500, 2300
    params = SamplingParams.greedy(DEVICE)
    params.set(sampling.seed, None if sampling.kind == "greedy" else sampling.temperature)
    selection = select.Selection.empty(3, num_tokens, params)
    logits, out = rand(3, vocab) - 9.0, ints(-1, -1, -1)
    logits[:, num_tokens:] = 0.0  # more than any token has
    selection.choose(logits, ints(8), out, pdl=False)
    sampler = build_sampler(sampling)
    for row in range(3):
        assert int(out[row]) == sampler.propose(logits[row, :num_tokens].cpu(), 9 + row).token
    tokens, feed, position, step = ints(-1, -1, -1), ints(-1), ints(10), ints(1)
    selection.advance(logits[2:], tokens, feed, position, step, pdl=False)
    token = int(out[2])
    assert tokens.tolist() == [-1, token, -1]
    assert [int(feed), int(position), int(step)] == [token, 11, 2]


def test_device_noise_is_the_hosts_up_to_its_largest() -> None:
    num_tokens, seed = 2**16, 5
    out = poison(num_tokens)
    _noise[(num_tokens // 1024,)](out, seed, 7, BLOCK=1024)
    expected = torch.from_numpy(gumbel(seed, 7, num_tokens))
    assert expected.max() > 9
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)


@triton.jit  # type: ignore[untyped-decorator]
def _noise(out, seed, position, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, select._gumbel(seed, position, at))


@pytest.mark.parametrize("other", [{"top_k": 5}, {"top_p": 0.9}, {"kind": "rejection"}])
def test_what_the_graph_cannot_sample_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(SpecterError, match="inside a step on the device"):
        check_sampling(dataclasses.replace(SamplingConfig("seeded"), **other))
