"""A model on the CPU: checkpoint, store and decoder, which run inputs under any budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.progress import Progress

from specter.config import SystemConfig
from specter.experts.slots import SlotArena
from specter.experts.store import ExpertStore, RawCodec
from specter.load_plan import LoadPlan
from specter.models.checkpoint import Checkpoint
from specter.models.cpu.decoder import Decoder
from specter.models.cpu.invariance import invariance_check
from specter.models.spec import ExpertId
from specter.models.weights import DecoderWeights
from specter.quantize.gptq_format import check_draft_origin, read_directory
from specter.resolve import ResolvedRun, resolve
from specter.session import OnCommit, RunResult, run_input, virtual_backend
from specter.speculation.drafts import DRAFTS
from specter.speculation.sampling import build_sampler

RESIDENT = SystemConfig(name="resident", eviction="resident")  # plain decoding with every expert in a slot
DTYPE = torch.float32  # represents a checkpoint's int8 or BF16 values exactly


@dataclass(slots=True)
class LiveModel:
    """Weights loaded once for any number of runs."""

    decoder: Decoder
    store: ExpertStore
    notes: dict[str, str]  # provenance and degradations, for every run's env.json

    @classmethod
    def load(cls, run: ResolvedRun, progress: Progress) -> LiveModel:
        """Loads target and draft, and checks that a row's bits do not depend on its place on this machine.
        Raises SpecterError: from the strict readers of the checkpoint and of the quantized directory."""
        config = run.config
        checkpoint = Checkpoint.open(config.model.checkpoint)
        spec = checkpoint.spec
        slot_bytes = run.num_slots * spec.expert_params * DTYPE.itemsize
        plan = LoadPlan.build(
            checkpoint,
            DTYPE,
            has_draft=config.system.speculative,
            slot_bytes=slot_bytes,
            kv_capacity=config.kv_capacity,
        )
        if config.model.checkpoint_kind == "hub":
            progress.console.print(plan.table())
        plan.check()
        notes = {"checkpoint_digest": checkpoint.digest()}
        draft = None
        if config.system.speculative:
            notes["draft_origin"] = check_draft_origin(Path(config.model.quantized), checkpoint)
            draft = read_directory(Path(config.model.quantized), spec)
            if draft.num_ignored:
                notes["draft_ignores"] = f"{draft.num_ignored} quantised modules besides the routed experts"
        codec = RawCodec(DTYPE, spec.expert_inter, spec.hidden)
        moe_layers = progress.track(range(spec.num_moe_layers), description="load experts")
        store = ExpertStore.read(codec, checkpoint, moe_layers)
        weights = DecoderWeights.load(checkpoint, DTYPE)
        arena = SlotArena(spec.num_experts, codec)
        decoder = Decoder(spec, weights, arena, draft, config.tile_rows, config.kv_capacity)
        invariance_check(decoder)
        return cls(decoder, store, notes | {"rowwise": str(decoder.rowwise)})

    def run(
        self, run: ResolvedRun, prompt: Sequence[int], warmup: Sequence[int], on_commit: OnCommit = lambda tokens: None
    ) -> RunResult:
        """Runs one input with its own slots; see `session.run_input`."""
        arena = SlotArena(run.num_slots, self.store.codec)
        self.decoder.arena = arena

        def move(expert: ExpertId, slot: int) -> None:
            arena.write(slot, self.store.payload(expert))

        model = DRAFTS[run.config.system.draft].join(self.decoder, self.decoder.twin)
        sampler = build_sampler(run.config.sampling)
        backend = virtual_backend(run, move)
        with torch.inference_mode():
            return run_input(run, model, sampler, prompt, warmup, backend=backend, on_commit=on_commit, predicts=True)

    def agrees_with_plain(
        self, run: ResolvedRun, result: RunResult, on_commit: OnCommit = lambda tokens: None
    ) -> bool | None:
        """Whether plain decoding with everything resident yields the same tokens; None for rejection sampling, which is
        lossless in distribution only."""
        if run.config.sampling.kind == "rejection":
            return None
        plain = resolve(replace(run.config, system=RESIDENT, warmup_tokens=0))
        tokens = self.run(plain, result.recording.prompt, (), on_commit).generation.tokens
        return tokens == result.generation.tokens
