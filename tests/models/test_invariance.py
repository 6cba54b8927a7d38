"""A row's bits do not depend on what runs beside it. Bits are compared, never tolerances."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specter.kernels.reference import product
from specter.models.cpu.invariance import invariance_check
from specter.models.spec import ModelSpec
from tests.helpers import FAMILIES, TINY, Live, open_live, random_live, run_pass, write_random

PROMPT = [(7 * i) % TINY.vocab for i in range(120)]
VERIFIED = [(5 * i + 3) % TINY.vocab for i in range(17)]  # crosses a block of 128 keys


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=list(FAMILIES.values()), ids=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> ModelSpec:
    spec: ModelSpec = request.param
    return spec


@pytest.fixture
def live(tmp_path: Path, family: ModelSpec) -> Live:
    return random_live(tmp_path, family)


def leaky_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """A product whose rows feel their neighbours, as a BLAS's may."""
    product(a, b, out)
    out += 1e-6 * a.mean()


def snapshot(live: Live) -> Tensor:
    return live.decoder.cache.entries[:, : live.decoder.cache.length].clone()


def verify_and_plain(live: Live) -> tuple[list[Tensor], list[Tensor]]:
    """Logits and KV of 17 rows in one pass, and in 17 passes."""
    decoder, store = live.decoder, live.store
    results = []
    for group in (len(VERIFIED), 1):
        decoder.reset()
        run_pass(decoder, store, PROMPT, 0)
        logits: list[Tensor] = []
        for begin in range(0, len(VERIFIED), group):
            rows = VERIFIED[begin : begin + group]
            logits += run_pass(decoder, store, rows, len(PROMPT) + begin).outputs
        results.append([torch.stack(logits), snapshot(live)])
    return results[0], results[1]


@pytest.mark.parametrize("tile", [16, 48])
def test_verification_equals_plain_decoding(tmp_path: Path, family: ModelSpec, tile: int, threads: int) -> None:
    together, alone = verify_and_plain(random_live(tmp_path, family, tile=tile))
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1], alone[1])


def test_waves_and_slots_leave_no_trace(live: Live, threads: int) -> None:
    decoder, store = live.decoder, live.store
    whole = run_pass(decoder, store, VERIFIED, 0)
    kv = snapshot(live)
    decoder.reset()
    single = run_pass(decoder, store, VERIFIED, 0, wave=1, reverse=True)
    assert torch.equal(torch.stack(whole.outputs), torch.stack(single.outputs))
    assert torch.equal(kv, snapshot(live))


def test_chunks_of_a_prompt_leave_no_trace(live: Live) -> None:
    whole = run_pass(live.decoder, live.store, PROMPT, 0)
    live.decoder.reset()
    first = run_pass(live.decoder, live.store, PROMPT[:37], 0)
    rest = run_pass(live.decoder, live.store, PROMPT[37:], 37)
    assert torch.equal(torch.stack(whole.outputs), torch.stack(first.outputs + rest.outputs))


def test_draft_kv_does_not_survive(live: Live) -> None:
    decoder, store = live.decoder, live.store
    run_pass(decoder, store, PROMPT, 0)
    without = run_pass(decoder, store, VERIFIED, len(PROMPT)).outputs
    kv = snapshot(live)
    decoder.crop(len(PROMPT))
    for i in range(len(VERIFIED)):
        decoder.draft_row(VERIFIED[-1 - i], len(PROMPT) + i)
    assert not torch.equal(snapshot(live), kv)
    after_draft = run_pass(decoder, store, VERIFIED, len(PROMPT)).outputs
    assert torch.equal(torch.stack(without), torch.stack(after_draft))
    assert torch.equal(snapshot(live), kv)


def test_check_passes_and_leaves_nothing_behind(live: Live, threads: int) -> None:
    assert invariance_check(live.decoder) == [] and not live.decoder.rowwise
    assert live.decoder.cache.length == 0 and not live.decoder.cache.entries.any()
    assert live.decoder.arena.gate_up.isnan().all() and live.decoder.arena.down.isnan().all()


def test_check_works_with_two_slots(tmp_path: Path) -> None:
    assert not invariance_check(random_live(tmp_path, num_slots=2).decoder)


def test_leaky_product_is_found_and_row_by_row_is_exact(tmp_path: Path, family: ModelSpec) -> None:
    write_random(tmp_path, family)
    live = open_live(tmp_path, mm=leaky_product)
    together, alone = verify_and_plain(live)
    assert not torch.equal(together[0], alone[0])  # or the check below would test nothing

    assert "a row alone" in invariance_check(live.decoder) and live.decoder.rowwise
    together, alone = verify_and_plain(live)
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1], alone[1])
