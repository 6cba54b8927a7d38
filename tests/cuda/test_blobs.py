"""The store of residual blobs without a device: exact bytes, checks at loading, copies of a blob's own size."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import Tensor

from specter.codecs.residual.resident import ResidentCodes, layout_of
from specter.errors import SpecterError
from specter.kernels.int4_moe import PackedExperts
from specter.kernels.residual import WaveDecoder
from specter.models.checkpoint import Checkpoint, write_checkpoint
from specter.models.cuda.arena import DriverMover, WriteBack, make_mover, open_blob_slots
from specter.models.cuda.blobs import BlobReport, BlobSource, BlobStore, Encoding, Stored, load_blobs
from specter.models.spec import ExpertId
from specter.quantize.residual.convert import encode_model, read_bf16
from specter.timeline.payload import Blobs
from tests.cuda.fakes import FakeLocker, host_budget
from tests.cuda.test_copies import FakeDriver
from tests.helpers import TINY, open_live, quantize, random_tensors, write_directory

SPEC = dataclasses.replace(TINY, num_layers=3, hidden=32, expert_inter=32, num_experts=2, top_k=1)  # 24 segments
QUIET = Console(file=io.StringIO())


@dataclass
class Made:
    """A random model on the disk, its residual directory, and its codes as they lie on a device."""

    checkpoint: Checkpoint
    quantized: Path
    residual: Path
    experts: PackedExperts

    def load(self, source: BlobSource, locker: FakeLocker | None = None) -> tuple[BlobStore, BlobReport]:
        locker = FakeLocker() if locker is None else locker
        store = BlobStore(
            layout_of(self.experts.layer(0)), SPEC.num_moe_layers, SPEC.num_experts, "require", locker, lambda: 2**40
        )
        load, report = load_blobs(source, self.experts, store, QUIET)
        assert load.num_bytes == sum(report.sizes.sizes) and len(load.layer_s) == SPEC.num_moe_layers
        return store, report

    def stored(self) -> Stored:
        return Stored.open(self.residual, SPEC, self.quantized)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("blobs")
    write_checkpoint(root / "bf16", SPEC, {n: t.bfloat16() for n, t in random_tensors(SPEC, seed=3).items()})
    checkpoint, codes = Checkpoint.open(root / "bf16"), quantize(SPEC, open_live(root / "bf16").store)
    (root / "int4").mkdir()
    write_directory(root / "int4", codes, SPEC, 32)
    encode_model(checkpoint, root / "int4", root / "residual", "cpu", QUIET)
    experts = PackedExperts.empty(SPEC, 32, "cpu")
    for layer in range(SPEC.num_moe_layers):
        experts.set_layer(layer, *(part.layer(layer) for part in (codes.gate, codes.up, codes.down)))
    return Made(checkpoint, root / "int4", root / "residual", experts)


@pytest.fixture(scope="module")
def stored(made: Made) -> BlobStore:
    return made.load(made.stored())[0]


def test_blobs_of_a_directory_take_their_own_bytes_and_no_more(made: Made) -> None:
    locker = FakeLocker()
    store, report = made.load(made.stored(), locker)
    sizes = [payload.numel() for layer in range(store.num_layers) for payload in store.payloads(layer)]
    assert sorted(locker.locked.values()) == sorted(
        sum(payload.numel() for payload in store.payloads(layer)) for layer in range(store.num_layers)
    )
    assert store.num_bytes == sum(sizes) == sum(locker.locked.values())
    assert store.num_bytes_of(ExpertId(1, 1)) == sizes[-1] and len(set(sizes)) > 1
    assert report.sizes.sizes == tuple(sizes) and report.num_compared == 0
    store.close()
    assert not locker.locked


def test_blobs_encoded_here_are_those_of_the_directory_and_are_compared(made: Made, stored: BlobStore) -> None:
    store, report = made.load(Encoding(made.checkpoint, torch.device("cpu")))
    assert report.num_compared == SPEC.num_moe_layers * SPEC.num_experts
    assert store.windows == stored.windows
    for layer in range(store.num_layers):
        assert all(map(torch.equal, store.payloads(layer), stored.payloads(layer)))


class Damaged:
    """A source whose blobs are changed on the way."""

    def __init__(self, inner: BlobSource, word: int, expert: int = 1) -> None:
        self.inner, self.word, self.expert = inner, word, expert

    def layer(self, layer: int, codes: Sequence[ResidentCodes]) -> tuple[list[Tensor], list[Tensor] | None]:
        blobs, originals = self.inner.layer(layer, codes)
        if layer == 1:
            blobs[self.expert] = blobs[self.expert].clone()
            blobs[self.expert][self.word] ^= 1 << 9
        return blobs, originals


@pytest.mark.parametrize("word", [0, 1, 7, 16, 40, -20])
def test_a_damaged_blob_is_refused_by_name(made: Made, word: int) -> None:
    locker = FakeLocker()
    with pytest.raises(SpecterError, match="MoE layer 1, expert 1"):
        made.load(Damaged(made.stored(), word), locker)
    assert not locker.locked


def test_blobs_of_other_codes_are_refused_by_name(made: Made) -> None:
    other = PackedExperts(*(part.clone() for part in dataclasses.astuple(made.experts)))
    other.down_params[1, 0, 3, 0] += 1
    with pytest.raises(SpecterError, match="MoE layer 1, expert 0: .*other INT4 codes"):
        dataclasses.replace(made, experts=other).load(made.stored())


def test_a_decoder_that_is_wrong_on_this_machine_is_found(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(decoder: WaveDecoder, wave: Tensor, slots: Tensor, staging: Tensor, **_: int) -> None:
        right = read_bf16(made.checkpoint, 0, "cpu")
        for place in range(int(wave[0])):
            staging[place] = torch.cat([part[place].flatten() for part in right])
        staging[1, 77] = -staging[1, 77]

    monkeypatch.setattr(WaveDecoder, "launch", launch)
    with pytest.raises(SpecterError, match="MoE layer 0, expert 1: the decoded residual differs"):
        made.load(Encoding(made.checkpoint, torch.device("cpu")))


def test_only_16_bit_checkpoints_are_encoded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPEC, random_tensors(SPEC, seed=3))
    with pytest.raises(SpecterError, match="lossless for BF16 only"):
        Encoding(Checkpoint.open(tmp_path), torch.device("cpu"))


def test_a_copy_moves_a_blobs_own_bytes_or_a_slots(stored: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    experts = [ExpertId(layer, expert) for layer in range(stored.num_layers) for expert in range(SPEC.num_experts)]
    smaller, larger = min(experts, key=stored.num_bytes_of), max(experts, key=stored.num_bytes_of)
    small = slot_bytes = stored.num_bytes_of(smaller)
    assert slot_bytes < stored.num_bytes_of(larger)
    for is_driver in (True, False):
        slots = open_blob_slots(3, slot_bytes, stored, host_budget())
        move = DriverMover(slots, stored, FakeDriver()) if is_driver else make_mover(slots, stored)
        expected = torch.full_like(slots.flat, 0xFF)
        move(smaller, 1)
        expected[1, :small] = stored.payload(smaller)
        assert torch.equal(slots.flat, expected)
        move(larger, 2)
        expected[2] = stored.payload(larger)[:slot_bytes]
        assert torch.equal(slots.flat, expected)


def test_slots_and_tails_count_against_the_budget(stored: BlobStore) -> None:
    sizes = [len(payload) for layer in range(stored.num_layers) for payload in stored.payloads(layer)]
    slot_bytes = min(sizes)
    tails = stored.tails(slot_bytes)
    assert [beyond != 0 for beyond in tails.beyond] == [size > slot_bytes for size in sizes]
    charged = Blobs(sizes).for_experts(len(sizes))
    assert 0 < stored.tails(charged.num_bytes).num_bytes <= charged.tail_bytes or not charged.tail_bytes
    num_bytes = 4 * slot_bytes + tails.num_bytes
    with pytest.raises(SpecterError, match="an arena of 4 experts and what their blobs have beyond it"):
        open_blob_slots(4, slot_bytes, stored, host_budget(num_bytes - 1))
    slots = open_blob_slots(4, slot_bytes, stored, host_budget(num_bytes))
    send_back = WriteBack(slots, 1)
    slots.write(2, stored.payload(ExpertId(0, 0)))
    send_back(2)
    assert torch.equal(send_back.buffers[0], slots.flat[2])
