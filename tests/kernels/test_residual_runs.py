"""The device runtime with codec=residual, in the interpreter or on a device: the same bits as with codec=bf16."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specter.config import BudgetConfig, DatasetConfig, ModelConfig, RunConfig, SamplingConfig
from specter.errors import SpecterError
from specter.execution import ExecutionConfig
from specter.models.checkpoint import Checkpoint, write_checkpoint
from specter.models.cuda import model as cuda_model
from specter.models.cuda.loaded_model import load_model
from specter.models.cuda.model import CudaModel
from specter.models.cuda.runner import ModelRunner, RunnerOptions
from specter.models.spec import ExpertId
from specter.quantize.residual.convert import encode_model
from specter.resolve import resolve
from specter.session import RunResult
from specter.timeline.base import Event, T, Work
from specter.timeline.virtual import VirtualEvent, VirtualTimeline
from tests.cuda.fakes import any_budget, host_budget
from tests.helpers import load_system, open_live, quantize, random_tensors, write_directory
from tests.kernels.test_gpu_decoder import CAPACITY, SPEC
from tests.kernels.test_rivals import HARDWARE, IS_CUDA

NARROW = replace(SPEC, hidden=32, expert_inter=32, num_experts=6, top_k=2)  # the interpreter pays per weight
PROMPT = [11]
CODECS = ("bf16", "residual")


class LateCopies(VirtualTimeline):
    """Moves payloads as late as events allow: when the engine may take them to have arrived."""

    def __init__(self) -> None:
        super().__init__(HARDWARE)
        self._late: list[tuple[VirtualEvent, Callable[[], None]]] = []

    def copy(
        self, num_bytes: int, run: Callable[[], None], after: Iterable[Event] = (), label: str = ""
    ) -> VirtualEvent:
        event = super().copy(num_bytes, lambda: None, after, label)
        self._late.append((event, run))
        return event

    def compute(self, work: Work, run: Callable[[], T], after: Iterable[Event] = ()) -> tuple[T, VirtualEvent]:
        after = list(after)
        ends = [event.end_ns for event in after if isinstance(event, VirtualEvent)]
        self._move(max([self.now_ns(), *ends]))
        return super().compute(work, run, after)

    def drain(self) -> None:
        super().drain()
        self._move(self.now_ns())

    def _move(self, now_ns: int) -> None:
        while self._late and self._late[0][0].end_ns <= now_ns:
            self._late.pop(0)[1]()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    directory = tmp_path_factory.mktemp("residual")
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(NARROW, seed=3).items()}
    write_checkpoint(directory / "checkpoint", NARROW, tensors)
    codes = quantize(NARROW, open_live(directory / "checkpoint").store)
    (directory / "int4").mkdir()
    write_directory(directory / "int4", codes, NARROW, 32)
    checkpoint = Checkpoint.open(directory / "checkpoint")
    encode_model(checkpoint, directory / "int4", directory / "residual", "cpu", Console(file=io.StringIO()))
    return RunConfig(
        model=ModelConfig(
            "tiny", str(directory / "checkpoint"), "standin", str(directory / "int4"), "itself", "",
            {"low": 1.5, "high": 3}, residual=str(directory / "residual"),
        ),
        system=load_system("lru"),
        budget=BudgetConfig("low", policy="same_experts"),
        dataset=DatasetConfig("none", "shipped", "", ""),
        sampling=SamplingConfig("greedy"),
        hardware=HARDWARE,
        clock="device",
        k=2,
        max_new_tokens=4,
        warmup_tokens=0,
        kv_capacity=CAPACITY,
    )  # fmt: skip


def load(config: RunConfig, codec: str) -> CudaModel:
    model, budget = config.model, any_budget()
    loaded = load_model(
        Path(model.checkpoint), Path(model.quantized), NARROW, budget, Console(file=io.StringIO()),
        pin="require" if IS_CUDA else "off", residual=Path("encoded-while-loading") if codec == "residual" else None,
    )  # fmt: skip
    return CudaModel(loaded, budget, {})


@pytest.fixture(scope="module")
def served(config: RunConfig) -> dict[str, CudaModel]:
    return {codec: load(config, codec) for codec in CODECS}


@pytest.fixture
def run(served: dict[str, CudaModel], config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunResult]:
    """Runs a system with a codec; copies arrive late, or on a device are delayed and reordered."""
    if not IS_CUDA:
        monkeypatch.setattr(cuda_model, "make_timeline", lambda config, device: LateCopies())
        monkeypatch.setattr(ModelRunner, "link_bytes_per_s", lambda runner: 10**9)
    execution = ExecutionConfig(stress_seed=1 if IS_CUDA else None)

    def run(codec: str, system: str, **changes: Any) -> RunResult:
        changed = replace(config, codec=codec, system=load_system(system), execution=execution, **changes)
        return served[codec].run(resolve(changed), PROMPT, ())

    return run


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    """Tokens of plain decoding with 16-bit experts, by sampling; not run in here, see `test_rivals.results`."""
    return {}


def test_the_store_holds_blobs_alone(served: dict[str, CudaModel]) -> None:
    raw, blobs = (served[codec].model for codec in CODECS)
    assert blobs.blobs is not None and raw.blobs is None
    assert blobs.store.num_bytes == sum(blobs.blobs.sizes.sizes) < raw.store.num_bytes
    assert blobs.blobs.num_compared == NARROW.num_moe_layers * NARROW.num_experts
    assert blobs.has_draft, "the codes are on the device"
    with pytest.raises(SpecterError, match="16-bit experts in host memory"):
        blobs.plain_store  # noqa: B018


SAMPLINGS = {"greedy": SamplingConfig("greedy"), "seeded": SamplingConfig("seeded", temperature=0.9, seed=3)}


@pytest.mark.skipif(IS_CUDA, reason="on a device the timeline checks it")
@pytest.mark.parametrize("serves", [False, True])
def test_the_clock_is_made_on_the_stream_that_computes(
    served: dict[str, CudaModel], config: RunConfig, monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    """Events of another stream do not cover the work: the first layer's routing would be read too early."""
    inside: list[bool] = []

    @contextmanager
    def stream(*_: object) -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def make_timeline(*_: object) -> LateCopies:
        assert inside
        return LateCopies()

    monkeypatch.setattr(cuda_model, "_compute_first", stream)
    monkeypatch.setattr(cuda_model, "make_timeline", make_timeline)
    monkeypatch.setattr(ModelRunner, "link_bytes_per_s", lambda runner: 10**9)
    resolved = resolve(replace(config, codec="residual"))
    if not serves:
        result = served["residual"].run(resolved, PROMPT, ())
        assert served["residual"].agrees_with_plain(resolved, result)
        return
    with served["residual"].serving(resolved, len(PROMPT)) as engine:
        first = engine.generate(PROMPT, 3).tokens
        assert engine.generate(PROMPT, 3).tokens == first  # from a warm cache
        served["residual"].set_sampling(engine, SAMPLINGS["seeded"])
        assert len(engine.generate(PROMPT, 3).tokens) == 3


@pytest.mark.parametrize(
    ("system", "tier", "sampling"),
    [
        ("lru", "low", "greedy"),
        ("lru", "high", "seeded"),
        ("on_demand", "low", "seeded"),
        ("specter_deadline_lru", "low", "greedy"),
        ("specter_deadline_lru", "high", "seeded"),
        ("resident", "high", "greedy"),
        ("mixtral_offloading", "high", "greedy"),
    ],
)
def test_tokens_are_those_of_16_bit_experts(
    run: Callable[..., RunResult], plain: dict[str, list[int]], system: str, tier: str, sampling: str
) -> None:
    """On the CPU as late as events allow: a wave that is decoded before its blob is there reads NaN."""
    if sampling not in plain:
        plain[sampling] = run("bf16", "lru", sampling=SAMPLINGS[sampling]).generation.tokens
    budget = BudgetConfig(tier, policy="same_experts")
    result = run("residual", system, budget=budget, sampling=SAMPLINGS[sampling])
    assert result.generation.tokens == plain[sampling]
    moved = sum(one.prefetch_bytes + one.fetch_bytes for one in result.generation.rounds)
    assert (moved == 0) == (system == "resident"), "where everything fits, nothing moves"


def test_bytes_on_the_link_are_those_of_the_blobs(
    run: Callable[..., RunResult], served: dict[str, CudaModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    store, whole = served["residual"].model.store, ModelRunner.__init__

    def counting(runner: ModelRunner, *arguments: Any) -> None:
        whole(runner, *arguments)
        move = runner.move

        def counted(expert: ExpertId, slot: int) -> None:
            moved.append(store.num_bytes_of(expert))
            move(expert, slot)

        runner.move = counted

    monkeypatch.setattr(ModelRunner, "__init__", counting)
    monkeypatch.setattr(ModelRunner, "link_bytes_per_s", lambda runner: 10**9)  # moves experts, too
    served["residual"].runner = None
    result = run("residual", "lru", max_new_tokens=2)
    served["residual"].runner = None
    [only] = result.generation.rounds
    assert result.generation.prefill_bytes + only.fetch_bytes == sum(moved) and only.fetch_bytes > 0
    assert len(set(moved)) > 1


def test_a_model_serves_the_codec_it_was_loaded_for(served: dict[str, CudaModel], config: RunConfig) -> None:
    for codec, other in zip(CODECS, reversed(CODECS), strict=True):
        with pytest.raises(SpecterError, match=f"codec={other}"):
            served[codec].run(resolve(replace(config, codec=other)), PROMPT, ())


def test_the_staging_area_counts_against_the_budget(served: dict[str, CudaModel]) -> None:
    model = served["residual"].model
    assert model.blobs is not None
    slot_bytes = max(model.blobs.sizes.sizes)
    options = RunnerOptions(2, CAPACITY, max_rows=4, slot_bytes=slot_bytes, num_staged=6)
    staging_bytes = 6 * 2 * NARROW.expert_params
    assert staging_bytes > 2 * slot_bytes
    with pytest.raises(SpecterError, match="a staging area of 6 decoded experts"):
        ModelRunner(model, host_budget(staging_bytes - 1), options)
