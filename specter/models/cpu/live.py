"""A model on the CPU: checkpoint, store and decoder, which run inputs under any budget, and the memory to load it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.progress import Progress
from rich.table import Table

from specter import host_memory
from specter.config import SamplingConfig, SystemConfig
from specter.engine import Engine
from specter.errors import SpecterError
from specter.experts.slots import SlotArena
from specter.experts.store import ExpertStore, RawCodec
from specter.experts.transfer import Backend, Mover
from specter.models.base import Model
from specter.models.checkpoint import Checkpoint
from specter.models.cpu.blobs import BlobSlots, BlobStore
from specter.models.cpu.decoder import Decoder
from specter.models.cpu.invariance import invariance_check
from specter.models.weights import DecoderWeights
from specter.quantize.gptq_format import check_draft_origin, read_directory
from specter.resolve import ResolvedRun, resolve
from specter.session import OnCommit, RunResult, build_engine, run_input, virtual_backend
from specter.speculation.accept import FirstToken, Sampler
from specter.speculation.drafts import DRAFTS
from specter.speculation.sampling import build_sampler

RESIDENT = SystemConfig(name="resident", eviction="resident")  # plain decoding with every expert in a slot
DTYPE = torch.float32  # represents BF16 values, a stand-in's too, exactly
MARGIN = 1.1  # of memory: one expert while loading, the folding of one layer, the allocator


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Host memory by part, for a checkpoint whose structure has been checked."""

    checkpoint: Checkpoint
    part_bytes: dict[str, int]
    available_bytes: int

    @classmethod
    def build(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        *,
        has_draft: bool,
        slot_bytes: int,
        kv_capacity: int,
        available: Callable[[], int] = host_memory.available_bytes,
    ) -> LoadPlan:
        """For a model that runs on the host: store, shared weights, slots and KV in `dtype`, the draft dequantized."""
        spec, size, name = checkpoint.spec, dtype.itemsize, str(dtype).removeprefix("torch.")
        experts = spec.experts_params * size
        draft = {f"draft: the same from INT4, dequantized to {name}": experts} if has_draft else {}
        parts = {
            f"store: {spec.num_moe_layers} x {spec.num_experts} experts, {name}": experts,
            **draft,
            f"shared weights, {name}": spec.non_expert_params * size,
            "slots": slot_bytes,
            f"KV cache of {kv_capacity} positions": spec.num_layers * kv_capacity * spec.kv_width * size,
        }
        return cls(checkpoint, parts, available())

    @property
    def source(self) -> str:
        spec = self.checkpoint.spec
        return f"{spec.name} ({spec.family}) from {self.checkpoint.directory}"

    @property
    def needed_bytes(self) -> int:
        return round(MARGIN * sum(self.part_bytes.values()))

    def check(self) -> None:
        """Raises SpecterError if the host has too little memory."""
        if self.needed_bytes > self.available_bytes:
            raise SpecterError(
                f"{self.source} needs {self.needed_bytes / 1e9:.1f} GB of host memory, "
                f"{self.available_bytes / 1e9:.1f} GB are available",
                "use a machine with more memory, a smaller checkpoint, or a stand-in (model=deepseek_v2_lite)",
            )

    def table(self) -> Table:
        """The plan as a table to print."""
        sizes = self.checkpoint.stored_bytes.items()
        stored = ", ".join(f"{size / 1e9:.2f} GB {dtype}" for dtype, size in sorted(sizes))
        table = Table(title=self.source, show_header=False, title_justify="left")
        table.add_row("on disk, all tensors there", f"{stored} in {self.checkpoint.num_files} files")
        for part, num_bytes in self.part_bytes.items():
            table.add_row(part, f"{num_bytes / 1e9:.2f} GB")
        table.add_row("host memory needed", f"{self.needed_bytes / 1e9:.2f} of {self.available_bytes / 1e9:.2f} GB")
        return table


@dataclass(slots=True)
class LiveModel:
    """Weights loaded once for any number of runs."""

    decoder: Decoder
    store: ExpertStore
    notes: dict[str, str]  # provenance and degradations, for every run's env.json
    blobs: BlobStore | None = None  # in place of the store's payloads, if loaded for codec=residual

    @classmethod
    def load(cls, run: ResolvedRun, progress: Progress) -> LiveModel:
        """Loads target and draft, and checks that a row's bits do not depend on its place on this machine.
        Raises SpecterError: from the strict readers of the checkpoint and of the quantized directory."""
        config = run.config
        checkpoint = Checkpoint.open(config.model.checkpoint)
        spec = checkpoint.spec
        has_codes = config.system.speculative or config.decodes
        slot_bytes = run.num_slots * spec.expert_params * DTYPE.itemsize
        plan = LoadPlan.build(
            checkpoint, DTYPE, has_draft=has_codes, slot_bytes=slot_bytes, kv_capacity=config.kv_capacity
        )
        if config.model.checkpoint_kind == "hub":
            progress.console.print(plan.table())
        plan.check()
        notes = {"checkpoint_digest": checkpoint.digest()}
        draft = None
        if has_codes:
            notes["draft_origin"] = check_draft_origin(Path(config.model.quantized), checkpoint)
            draft = read_directory(Path(config.model.quantized), spec)
            if draft.num_ignored:
                notes["draft_ignores"] = f"{draft.num_ignored} quantised modules besides the routed experts"
        blobs = None
        if config.decodes:
            assert draft is not None
            blobs = BlobStore.open(Path(config.model.residual), Path(config.model.quantized), spec, draft)
        codec = RawCodec(DTYPE, spec.expert_inter, spec.hidden)
        moe_layers = progress.track(range(spec.num_moe_layers), description="load experts")
        store = ExpertStore.read(codec, checkpoint, moe_layers)
        weights = DecoderWeights.load(checkpoint, DTYPE)
        arena = SlotArena(spec.num_experts, codec)
        decoder = Decoder(spec, weights, arena, draft, config.tile_rows, config.kv_capacity)
        invariance_check(decoder)
        return cls(decoder, store, notes | {"rowwise": str(decoder.rowwise)}, blobs)

    def run(
        self,
        run: ResolvedRun,
        prompt: Sequence[int],
        warmup: Sequence[int],
        on_commit: OnCommit = lambda tokens: None,
        *,
        commits_one: bool = False,
    ) -> RunResult:
        """Runs one input with its own slots; see `session.run_input`. `commits_one`: for a dense recording."""
        model, sampler, backend = self._open(run)
        if commits_one:
            sampler = FirstToken(sampler)
        with torch.inference_mode():
            return run_input(run, model, sampler, prompt, warmup, backend=backend, on_commit=on_commit, predicts=True)

    @contextmanager
    def serving(self, run: ResolvedRun, longest: int) -> Iterator[Engine]:
        """An engine for any number of generations, over slots of its own. See `CudaModel.serving`."""
        with torch.inference_mode():
            yield build_engine(run, *self._open(run))

    def set_sampling(self, engine: Engine, sampling: SamplingConfig) -> None:
        """How an engine of `serving` selects tokens from here on."""
        engine.sampler = build_sampler(sampling)

    def _open(self, run: ResolvedRun) -> tuple[Model, Sampler, Backend]:
        """Model, sampler and clock of a run, with empty slots."""
        model = DRAFTS[run.config.system.draft].join(self.decoder, self.decoder.twin)
        return model, build_sampler(run.config.sampling), virtual_backend(run, self._open_slots(run))

    def _open_slots(self, run: ResolvedRun) -> Mover:
        """Empty slots for a run, in the decoder; returns what fills them."""
        if not run.costs.decodes:
            arena = self.decoder.arena = SlotArena(run.num_slots, self.store.codec)
            return lambda expert, slot: arena.write(slot, self.store.payload(expert))
        if self.blobs is None:
            raise SpecterError("the model was loaded without its residual blobs", "load it with codec=residual")
        staging = self.decoder.arena = SlotArena(run.costs.num_staged, self.store.codec)
        slots = BlobSlots(run.num_slots, self.blobs, staging)
        self.decoder.unpack = slots.decode
        return slots.move

    def agrees_with_plain(
        self, run: ResolvedRun, result: RunResult, on_commit: OnCommit = lambda tokens: None
    ) -> bool | None:
        """Whether plain decoding yields the same tokens; None for rejection sampling, which is lossless in
        distribution only."""
        if run.config.sampling.kind == "rejection":
            return None
        return self.plain_tokens(run, result.recording.prompt, on_commit) == result.generation.tokens

    def plain_tokens(
        self, run: ResolvedRun, prompt: Sequence[int], on_commit: OnCommit = lambda tokens: None
    ) -> list[int]:
        """What plain decoding with everything resident yields."""
        plain = resolve(replace(run.config, system=RESIDENT, codec=None, payload_bits=None, warmup_tokens=0))
        return self.run(plain, prompt, (), on_commit).generation.tokens
