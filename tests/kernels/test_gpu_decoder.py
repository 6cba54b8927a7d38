"""The GPU's draft and target against the CPU decoder in fp32, and plain decoding against verification bit for bit."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from specter.codecs.int4 import Int4Matrices
from specter.errors import SpecterError
from specter.experts.store import RawCodec
from specter.kernels.device import Launch
from specter.kernels.int4_moe import PackedExperts
from specter.kernels.select import SamplingParams
from specter.models.checkpoint import Checkpoint
from specter.models.cuda.draft import Draft, DraftTuning
from specter.models.cuda.graph import Graph
from specter.models.cuda.loaded_model import LoadedModel, load_store
from specter.models.cuda.store import PinnedStore
from specter.models.cuda.target import Target, TargetTuning
from specter.models.cuda.weights import GpuKVCache, GpuWeights
from specter.models.spec import ExpertId, ModelSpec
from tests.cuda.fakes import FakeLocker
from tests.helpers import TINY, Live, quantize, random_live, run_pass

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAPACITY = 64
SPEC = dataclasses.replace(
    TINY, num_layers=3, hidden=96, expert_inter=32, shared_inter=64, dense_inter=80, num_heads=2, nope_dim=16,
    rope_dim=16, v_dim=16, kv_lora=32,
)  # fmt: skip
# Few large blocks: the interpreter pays per program.
LARGE, TILED = Launch(64, 128), Launch(64, 128, 4, 2)
DRAFT = DraftTuning(
    qkv=LARGE, out=LARGE, wide=LARGE, dense_down=LARGE, gate_up=Launch(32, 128), down=Launch(32, 64),
    head=Launch(128, 128),
)  # fmt: skip
TARGET = TargetTuning(TILED, TILED, TILED, TILED, TILED, TILED, TILED)


@dataclass
class Models:
    cpu: Live
    loaded: LoadedModel
    cache: GpuKVCache
    target: Target
    draft: Draft

    @property
    def weights(self) -> GpuWeights:
        return self.loaded.weights


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    models = build_models(tmp_path_factory.mktemp("tiny"), SPEC)
    yield models
    models.loaded.store.close()


def build_models(directory: Path, spec: ModelSpec) -> Models:
    """A random model on both sides; every expert has a slot."""
    cpu = random_live(directory, spec, tile=16, capacity=CAPACITY)
    loaded = load_tiny(directory, cpu, torch.float32)
    weights = loaded.weights
    cache = GpuKVCache(spec, CAPACITY, torch.float32, DEVICE)
    num_slots = spec.num_moe_layers * spec.num_experts
    table = torch.randperm(num_slots, generator=torch.Generator().manual_seed(1)).int()
    table = table.view(spec.num_moe_layers, spec.num_experts)
    arena = torch.full((num_slots, spec.expert_params + 32), torch.nan)
    for layer in range(spec.num_moe_layers):
        for expert in range(spec.num_experts):
            payload = cpu.store.payload(ExpertId(layer, expert)).view(torch.float32)
            arena[int(table[layer, expert]), : spec.expert_params] = payload
    target = Target(weights, arena.to(DEVICE), cache, 48, slot_table=table.to(DEVICE), pdl=False, tuning=TARGET)
    return Models(cpu, loaded, cache, target, Draft(weights, loaded.int4, cache, 8, pdl=False, tuning=DRAFT))


def load_tiny(directory: Path, cpu: Live, dtype: torch.dtype) -> LoadedModel:
    """The checkpoint in `directory` as a runner reads it, with a round-to-nearest draft."""
    checkpoint = Checkpoint.open(directory)
    spec = checkpoint.spec
    codec, store = RawCodec(dtype, spec.expert_inter, spec.hidden), None
    if DEVICE == "cpu":
        store = PinnedStore(codec, spec.num_moe_layers, spec.num_experts, "require", FakeLocker(), lambda: 2**40)
    store, report = load_store(checkpoint, codec, Console(file=io.StringIO()), store=store)
    weights = GpuWeights.load(spec, checkpoint.tensor, DEVICE, dtype)
    codes, packed = quantize(spec, cpu.store), PackedExperts.empty(spec, 128, DEVICE)
    for layer in range(spec.num_moe_layers):
        packed.set_layer(layer, *(_layer(part, layer) for part in (codes.gate, codes.up, codes.down)))
    return LoadedModel(spec, checkpoint, codes, "same", checkpoint, codec, store, report, weights, packed)


def _layer(matrices: Int4Matrices, layer: int) -> Int4Matrices:
    return Int4Matrices(matrices.codes[layer], matrices.scales[layer], matrices.zeros[layer], matrices.group)


def tokens_of(num_rows: int, spec: ModelSpec = SPEC, seed: int = 7) -> Tensor:
    return torch.randint(0, spec.vocab, (num_rows,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual.cpu() - expected).norm() / expected.norm())


def test_target_and_draft_are_the_cpu_decoder_and_verification_is_plain_decoding(models: Models) -> None:
    check_models(models)


def check_models(models: Models, num_rows: int = 17) -> None:
    """Target and draft against the CPU decoder; plain decoding against verification, bit for bit."""
    spec, decoder, tokens = models.weights.spec, models.cpu.decoder, tokens_of(num_rows)
    decoder.reset()
    expected = run_pass(decoder, models.cpu.store, tokens.tolist(), 0)
    models.target.begin(tokens.to(DEVICE), 0, num_rows)
    models.target.run(num_rows)
    logits = torch.stack(expected.outputs)
    assert distance(models.target.logits[:num_rows], logits) < 1e-5
    assert models.target.tokens[:num_rows].tolist() == logits.argmax(-1).tolist()
    assert np.array_equal(models.target.routing.chosen[:num_rows].cpu().numpy(), expected.routing[-1])

    verified, kv = models.target.logits[:num_rows].clone(), models.cache.entries.clone()
    for row in (0, num_rows - 1):  # plain decoding has the same bits
        models.cache.entries[:, row:] = torch.nan
        models.target.begin(tokens[row : row + 1].to(DEVICE), row, 1)
        models.target.run(1)
        assert torch.equal(models.target.logits[0], verified[row])
        assert torch.equal(models.cache.entries[:, row], kv[:, row])
        models.cache.entries.copy_(kv)

    models.draft.begin(5, num_rows)
    token, routing = 5, []
    for step in range(2):  # the second step embeds the first one's token without the host
        models.draft.step()
        reference = decoder.draft_row(token, num_rows + step)
        routing.append(reference.routing)
        token = int(reference.output.argmax())
        assert distance(models.draft.logits[0], reference.output) < 1e-3
        assert models.draft.tokens[step] == token
    chosen = models.draft.routing[:2].cpu().numpy()
    assert np.array_equal(chosen, np.stack(routing))
    counts = [np.bincount(chosen[:, layer].ravel(), minlength=spec.num_experts) for layer in range(spec.num_moe_layers)]
    assert np.array_equal(models.draft.counts.cpu().numpy(), np.stack(counts))
    assert int(models.draft.position) == num_rows + 2


def test_a_pass_must_fit(models: Models) -> None:
    with pytest.raises(SpecterError, match="49 rows"):
        models.target.begin(tokens_of(49), 0, 1)
    with pytest.raises(SpecterError, match="66 positions"):
        models.target.begin(tokens_of(6), 60, 1)


def test_a_pass_chooses_no_padding(models: Models) -> None:
    weights = dataclasses.replace(models.weights, num_tokens=60)
    target = Target(weights, models.target.arena, models.cache, 2, pdl=False, tuning=TARGET)
    target.begin(tokens_of(2).clamp(max=59).to(DEVICE), 0, 2)
    target.scaled.zero_()
    target.scaled[:, 0] = 1.0
    head = weights.head.clone()
    weights.head[:, 0] = -1.0  # of tokens; padding has logits of exactly 0
    weights.head[60:] = 0.0
    weights.head[41, 0] = -0.5
    target.choose(2, 2)
    weights.head.copy_(head)
    assert (target.logits[:2, 60:] > target.logits[:2, :60].amax()).all()
    assert target.tokens[:2].tolist() == [41, 41]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
@pytest.mark.parametrize("temperature", [None, 0.8])
def test_graphs_of_early_launches_equal_single_launches(models: Models, temperature: float | None) -> None:
    check_graphs(models, temperature)


def check_graphs(models: Models, temperature: float | None) -> None:
    """Graphs whose kernels are launched early against kernels launched one by one, bit for bit."""
    said = []
    for pdl in (False, True):
        sampling = SamplingParams.greedy(DEVICE)
        draft = Draft(models.weights, models.draft.experts, models.cache, 8, sampling=sampling, pdl=pdl, tuning=DRAFT)
        target = Target(
            models.weights, models.target.arena, models.cache, 8, slot_table=models.target.slot_table,
            sampling=sampling, pdl=pdl, tuning=TARGET,
        )  # fmt: skip
        step, run = draft.step, partial(target.run, 8)
        if pdl:
            draft.begin(0, 0)
            target.place(8, 0, 8)
            step, run = Graph(draft.step).replay, Graph(run).replay  # type: ignore[assignment]
        sampling.set(3, temperature)  # captured graphs follow
        models.cache.entries.zero_()
        draft.begin(5, 0)
        for _ in range(8):
            step()
        drafted = [part.clone() for part in (draft.tokens, draft.routing, draft.counts, draft.logits)]
        target.begin(tokens_of(8).to(DEVICE), 8, 8)
        run()
        said.append([*drafted, target.tokens[:8].clone(), target.logits[:8].clone(), models.cache.entries.clone()])
    for alone, together in zip(*said, strict=True):
        assert torch.equal(alone, together)
